"""The reference of a preference stage: the model that it starts from. Its log-probabilities are stored before the first
step, or made in every step, by a frozen copy or, beside adapters, by the trunk without them."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from truestep.data.columns import ColumnStore
from truestep.data.loader import Corpus
from truestep.data.mismatched import mismatched_rows
from truestep.data.packing import Column
from truestep.losses.preference import REFERENCE, PreferenceLoss
from truestep.models.hf import read_section
from truestep.numerics.batch import Batch
from truestep.numerics.digest import files_digest
from truestep.parallel.model import Parallel
from truestep.recipe.stage import Stage
from truestep.stages.context import Context
from truestep.stages.corpora import Corpora
from truestep.stages.precompute import Wanted, token_columns
from truestep.stages.starts import Start
from truestep.stages.teachers import frozen_model
from truestep.train.reference import Reference, ReferencePoint, label_logp, without_dropout
from truestep.train.state import TrainState


def refer(
    context: Context, stage: Stage, state: TrainState, start: Start | None, precision: str, corpora: Corpora
) -> Corpora:
    """Let a preference stage have its reference; returns the corpora with the stored columns, if there are such.
    Collective; the state is the one before the first step, so the model is its own reference yet."""
    loss = state.loss
    if not isinstance(loss, PreferenceLoss):
        return corpora
    without_dropout(state.parallel.parts)
    if not loss.needs_reference:
        return corpora
    assert start is not None
    if stage.preference.kind == "kto":
        state.before_step.append(_point(context, stage, state, loss, corpora))
    if stage.preference.reference == "online":
        state.before.append(_online(context, stage, state, loss, start, precision))
        return corpora
    wanted = _wanted(context, stage, loss, start, precision)
    columns: dict[str, tuple[ColumnStore, ...]] = {}
    for name in corpora.stores:
        columns[name] = (token_columns(context, state.parallel, name, corpora.corpus(stage, name), stage, wanted),)
    return replace(corpora, columns=columns)


def _online(
    context: Context, stage: Stage, state: TrainState, loss: PreferenceLoss, start: Start, precision: str
) -> Reference:
    if stage.lora is not None:
        return Reference(state.parallel, loss.chunk_tokens, trunk=True)
    section = read_section(start.directory)
    frozen = frozen_model(context, stage, start, section, state, precision)
    return Reference(frozen.parallel, loss.chunk_tokens)


def _wanted(context: Context, stage: Stage, loss: PreferenceLoss, start: Start, precision: str) -> Wanted:
    digest = context.job.agree(f"reference/{stage.name}", partial(files_digest, start.directory))
    low = context.recipe.numerics.low_precision
    base = stage.lora.base if stage.lora is not None else "full"
    decides = {"model": digest, "precision": precision, "base": base, "low": low and low.model_dump(mode="json")}
    column = Column(np.dtype("float64" if precision == "float64" else "float32"))
    return Wanted(REFERENCE, column, partial(_logp, loss.chunk_tokens), decides)


def _logp(chunk_tokens: int, parallel: Parallel, batch: Batch) -> torch.Tensor | None:
    return label_logp(parallel, batch, chunk_tokens)


def _point(context: Context, stage: Stage, state: TrainState, loss: PreferenceLoss, corpora: Corpora) -> ReferencePoint:
    """KTO's reference point over pairs of the first corpus, the reference's log-probabilities kept in memory."""
    corpus: Corpus = corpora.training(stage)[0]
    parallel, groups, rows = state.parallel, state.parallel.groups, context.recipe.machine.microbatch_rows
    batches, num_pairs = mismatched_rows(corpus, stage.context, stage.preference.kl_pairs, rows, groups.data_size)
    mine = [parallel.own_part(batch) for batch in batches[groups.data_rank :: groups.data_size]]
    refer = Reference(parallel, loss.chunk_tokens)
    return ReferencePoint(
        parallel, state.job, loss, [_on_cpu(refer(one.to(parallel.device))) for one in mine], num_pairs
    )


def _on_cpu(batch: Batch) -> Batch:
    return batch.map(torch.Tensor.cpu)
