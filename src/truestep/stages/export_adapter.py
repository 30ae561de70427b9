"""What a stage that trained adapters gives: models/NAME/adapter in PEFT's layout, and the merged model in models/NAME
unless the recipe wants none."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from truestep.adapters.add import DEFAULT, scale_of
from truestep.adapters.peft import Factors, write_adapter
from truestep.adapters.targets import chosen
from truestep.models.build import build_model
from truestep.models.decoder import Decoder
from truestep.models.hf_names import hf_parts
from truestep.models.roles import SCORE
from truestep.numerics.digest import digest_of, tensor_digest
from truestep.numerics.low_rank import is_adapter
from truestep.numerics.pieces import stream_whole
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.stages.context import Context
from truestep.stages.merge import words, write
from truestep.stages.starts import Start, open_start
from truestep.train.state import TrainState

ADAPTER = "adapter"
"""Name of the adapter's directory in that of the model."""

_SCORE_MODULE = "score"


def export_adapter(
    context: Context, stage: Stage, state: TrainState, section: ModelSection, directory: Path, options: dict[str, Any]
) -> tuple[str, int]:
    """Write the directory, which must not exist yet; collective. Returns the digest and the bytes of the merged
    weights, or of the adapter where that is all. `options`: tokenizer_dir and generation of the merged model."""
    start = open_start(context, stage.start, f"merge/{stage.name}")
    kept = {name: piece for name, piece in state.result().items() if is_adapter(name) or name == SCORE}
    values = {name: x.detach().cpu().clone() for name, x in stream_whole(kept) if x is not None}

    def conclude() -> list[Any]:
        return list(_write(context, stage, state, section, directory, options, start, values))

    digest, size = context.job.agree(f"adapter/{stage.name}", conclude)
    return digest, size


def _write(
    context: Context,
    stage: Stage,
    state: TrainState,
    section: ModelSection,
    directory: Path,
    options: dict[str, Any],
    start: Start,
    values: Mapping[str, torch.Tensor],
) -> tuple[str, int]:
    lora, model = stage.lora, build_model(section, section.vocab_size)
    assert lora is not None and isinstance(model, Decoder) and state.base is not None
    everywhere = model.sites()
    sites, scale = chosen(everywhere, lora.targets), scale_of(lora.rank, lora.alpha, lora.rslora)
    by_path = {name.replace(f".{DEFAULT}.", "."): x for name, x in values.items()}
    factors = {site.path: Factors(by_path[f"{site.path}.a"], by_path[f"{site.path}.b"], scale) for site in sites}
    whole = {_SCORE_MODULE: values[SCORE]} if SCORE in values else {}
    digest = digest_of({name: tensor_digest(x) for name, x in values.items()})
    size = sum(x.nbytes for x in values.values())
    if lora.merge:
        merging = write(start.directory, section, factors, whole, directory, torch.float32, held=lora.base, **options)
        context.note("merge", stage=stage.name, weights=len(merging.merged.lost), error=merging.merged.error)
        context.progress.say(f"{stage.name}: {words(merging)}")
        digest, size = merging.digest, merging.num_bytes
    else:
        directory.mkdir(parents=True)
    write_adapter(
        directory / ADAPTER,
        by_path,
        sites,
        everywhere,
        partial(hf_parts, section=section),
        lora,
        base=state.base,
        base_name=str(start.directory.resolve()) if start.pinned.startswith("stage:") else start.pinned,
        head=whole,
        tied=section.tie_embeddings and not section.scores,
    )
    return digest, size
