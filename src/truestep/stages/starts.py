"""Models that a stage takes from elsewhere: what it starts from, and its teacher."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from truestep.errors import ModelError
from truestep.models.hf import load_hf
from truestep.models.hub import fetch, is_hub_id
from truestep.numerics.pieces import Piece
from truestep.recipe.stage import Stage
from truestep.stages.context import Context


@dataclass(frozen=True)
class Start:
    """A model directory; `pinned` names it for the record (a hub id with its commit)."""

    directory: Path
    pinned: str

    @property
    def digest(self) -> str | None:
        """Digest of its weights, where the directory has a manifest of ours that says."""
        file = self.directory / "manifest.json"
        return json.loads(file.read_text()).get("weights") if file.exists() else None


def starting_point(context: Context, stage: Stage) -> Start | None:
    """The model that a stage starts from; None for fresh weights."""
    return None if stage.start == "init" else open_start(context, stage.start, f"start/{stage.name}")


def open_start(context: Context, where: str, key: str) -> Start:
    """The model "stage:NAME", or of a directory or hub id. Rank 0 fetches, the others wait; they meet under `key`."""
    if where.startswith("stage:"):
        return Start(context.model_dir(where.removeprefix("stage:")), where)
    if not is_hub_id(where):
        return Start(Path(where), where)
    cache = Path(context.recipe.machine.cache).expanduser() / "hub"

    def get() -> list[str]:
        found = fetch(where, cache)
        return [str(found.directory), found.pinned]

    directory, pinned = context.job.agree(key, get)
    return Start(Path(directory), pinned)


def load_into(directory: Path, names: list[str], model: nn.Module, pieces: Mapping[str, Piece]) -> None:
    """`names`: those of the whole model, of which `model` may be a part. ModelError for a weight that is no number:
    a start, a reference or a teacher like that would make every later number none."""
    load_hf(directory, pieces, names)
    for name, piece in pieces.items():
        if piece.local.is_floating_point() and not bool(piece.local.isfinite().all()):
            raise ModelError(
                f"{directory}: {name} holds NaN or infinity, so nothing can be learnt from this model; name another "
                f"one, or fetch it again"
            )
