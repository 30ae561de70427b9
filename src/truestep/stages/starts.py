"""Models that a stage takes from elsewhere: what it starts from, and its teacher."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch import nn

from truestep.models.hf import load_hf
from truestep.models.hub import fetch, is_hub_id
from truestep.numerics.pieces import Piece
from truestep.recipe.stage import Stage
from truestep.stages.context import Context

_BLOCK_BYTES = 16 << 20


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


def files_digest(directory: Path) -> str:
    """xxh3-128 (hex) over the names and bytes of a model directory's weights, as they are on disk."""
    digest = xxhash.xxh3_128()
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def load_into(directory: Path, names: list[str], model: nn.Module, pieces: Mapping[str, Piece]) -> None:
    """`names`: those of the whole model, of which `model` may be a part."""
    load_hf(directory, pieces, names)
