"""The model inside a checkpoint of a run, for `export`: in the middle of a stage, or of a run that was given up."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from truestep.checkpoint.load import load_newest
from truestep.checkpoint.of_run import checkpoint_place, recorded_mapping
from truestep.data.tokenizer import load_tokenizer
from truestep.errors import CheckpointError, UserError
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.load import require_own_module
from truestep.recipe.load import load
from truestep.recipe.model import ModelSection
from truestep.rollout.directory import token_ids
from truestep.runlog.log import read
from truestep.stages.corpora import build_tokenizer
from truestep.storage.store import open_store


@dataclass(frozen=True)
class CheckpointModel:
    """The weights of one step of a stage, fp32 masters, and the folder of the run's tokenizer."""

    model: nn.Module
    section: ModelSection
    tokenizer_dir: Path
    token_ids: dict[str, int | list[int]]
    stage: str
    step: int


def model_from_run(run_dir: Path, stage: str | None = None, own_module: str | None = None) -> CheckpointModel:
    """Load the newest sound checkpoint of `stage` (by default the one that began last), verified, on the CPU."""
    recipe = load(recorded_mapping(run_dir))
    starts = [record.data for record in read(run_dir) if record.kind == "stage_start"]
    chosen = next((start for start in reversed(starts) if stage in (None, start.stage)), None)
    if chosen is None:
        begun = ", ".join(dict.fromkeys(start.stage for start in starts)) or "none"
        raise UserError(f"{run_dir} has not begun stage {stage!r}; stages that it began: {begun}")
    if any(one.name == chosen.stage and one.lora is not None for one in recipe.stages):
        raise UserError(
            f"stage {chosen.stage!r} of {run_dir} trains adapters, and its checkpoints hold no whole model; let the "
            f"stage end, then take {run_dir / 'models' / chosen.stage}"
        )
    section = ModelSection(**chosen.model)
    require_own_module(section, own_module, run_dir)
    model = build_model(section, section.vocab_size).to(
        torch.float64 if chosen.precision == "float64" else torch.float32
    )
    model = model.to_empty(device="cpu") if isinstance(model, Decoder) else model
    init_weights(model, 0)  # buffers that a checkpoint does not hold
    store = open_store(checkpoint_place(recipe, run_dir, chosen.stage), recipe.checkpoint.storage_options)
    tensors = {f"model.{name}": value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    loaded = load_newest(store, tensors, weights_only=True)
    if loaded is None:
        raise CheckpointError(f"{store.url} holds no checkpoint yet; wait for its first one")
    tokenizer_dir = build_tokenizer(recipe, run_dir.parent / ".data", print)
    ids = token_ids(load_tokenizer(tokenizer_dir))
    return CheckpointModel(model, section, tokenizer_dir, ids, chosen.stage, loaded.step)
