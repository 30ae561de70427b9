"""Models beside the one that a stage trains: the teacher of a distillation, laid over the same ranks."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from truestep.data.packing import Column
from truestep.data.tokenizer import Tokenizer, load_tokenizer
from truestep.errors import ModelError
from truestep.losses.distill import HIDDEN, IDS, LOGP, Distillation, teacher_columns
from truestep.losses.remember import HIDDEN as REMEMBERED
from truestep.losses.remember import Remembering
from truestep.models.build import build_model
from truestep.models.hf import read_section
from truestep.models.load import tensors_of
from truestep.numerics.batch import Batch
from truestep.numerics.digest import files_digest
from truestep.parallel.mesh import Limits
from truestep.parallel.model import Parallel
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.stages.context import Context
from truestep.stages.corpora import Corpora, mixture
from truestep.stages.precompute import Wanted, token_columns
from truestep.stages.starts import Start, load_into, open_start
from truestep.train.build import HEAD_CHUNK_TOKENS
from truestep.train.frozen import Frozen, HiddenStates, freeze
from truestep.train.state import TrainState


def teach(
    context: Context, stage: Stage, state: TrainState, student: ModelSection, precision: str, corpora: Corpora
) -> Corpora:
    """Let a teacher give its hidden states to the loss in every step, or its likeliest tokens to a store before the
    first one; returns the corpora with the stored columns, if there are such. Collective."""
    loss = state.loss
    if stage.distill is None or not isinstance(loss, Distillation):
        return corpora
    teacher = teacher_of(context, stage)
    section = check_teacher(stage, teacher, student, corpora.tokenizer)
    frozen = frozen_model(context, stage, teacher, section, state, precision)
    if stage.distill.logits == "online":
        state.before.append(HiddenStates(frozen, HIDDEN, loss))
        return corpora
    digest = context.job.agree(f"teacher/{stage.name}/digest", partial(files_digest, teacher.directory))
    told = {"top_k": loss.target.top_k, "temperature": loss.target.temperature}
    decides = {"model": digest, "precision": precision, **told}
    shape, columns = (loss.target.top_k + 1,), dict(corpora.columns)
    wanted = [
        Wanted(name, Column(np.dtype(kind), shape), partial(_stored, loss, name), decides)
        for name, kind in ((IDS, "int32"), (LOGP, "float32"))
    ]
    for item in [*mixture(stage), *stage.remember.replay]:
        corpus = corpora.corpus(stage, item.data)
        made = (token_columns(context, frozen.parallel, item.data, corpus, stage, one) for one in wanted)
        columns[item.data] = tuple(made)
    return replace(corpora, columns=columns)


def _stored(loss: Distillation, column: str, parallel: Parallel, batch: Batch) -> torch.Tensor | None:
    """One of the columns of a microbatch."""
    out, target = Frozen(parallel).head_input(batch), loss.target
    if out is None:
        return None
    chunk = max(1, loss.chunk_tokens // 2)
    return teacher_columns(out, batch.labels_BT, target.top_k, target.temperature, chunk)[column]


def remember(context: Context, stage: Stage, state: TrainState, start: Start | None, precision: str) -> None:
    """Let the stage's start pull at its loss, where remember.kl asks for that. Collective."""
    if not stage.remember.kl:
        return
    assert start is not None
    machine, device = context.recipe.machine, context.job.device.type
    chunk = machine.head_chunk_tokens or HEAD_CHUNK_TOKENS[device]
    frozen = frozen_model(context, stage, start, read_section(start.directory), state, precision)
    state.loss = loss = Remembering(state.loss, stage.remember.kl, chunk)
    state.before.append(HiddenStates(frozen, REMEMBERED, loss))


def teacher_of(context: Context, stage: Stage) -> Start:
    assert stage.distill is not None
    return open_start(context, stage.distill.teacher, f"teacher/{stage.name}")


def check_teacher(stage: Stage, teacher: Start, student: ModelSection, tokenizer: Tokenizer) -> ModelSection:
    """The teacher's section; ModelError unless its logits can be held against the student's, id for id.

    Sizes are those of the models, whose tables may be longer than their tokenizers need; that ids mean the same is
    known from the content of both tokenizers."""
    section, what = read_section(teacher.directory), f"stage {stage.name!r}: the teacher {teacher.pinned}"
    if section.module is not None:
        raise ModelError(
            f"{what} is a module of your own ({section.module}), which does not give hidden states and output matrix; "
            f"name a model of a known family"
        )
    if section.vocab_size != student.vocab_size:
        raise ModelError(
            f"{what} has logits for {section.vocab_size} ids, but the student has {student.vocab_size}; give the "
            f"student vocab_size = {section.vocab_size}, or name a teacher with its vocabulary"
        )
    if stage.distill is not None and stage.distill.top_k >= section.vocab_size:
        raise ModelError(
            f"stage {stage.name!r} has distill.top_k = {stage.distill.top_k}, but there are {section.vocab_size} ids "
            f"in all; take fewer, or 0 for the whole vocabulary"
        )
    if stage.context > section.max_context:
        raise ModelError(f"{what} takes rows of {section.max_context} tokens, not {stage.context}; lower the context")
    own = load_tokenizer(teacher.directory)
    if own.fingerprint != tokenizer.fingerprint:
        raise ModelError(
            f"{what} has another tokenizer ({own.fingerprint[:12]}) than the stage ({tokenizer.fingerprint[:12]}), so "
            f"its ids mean other text; take the teacher's tokenizer (tokenizer.path), or another teacher"
        )
    return section


def frozen_model(
    context: Context, stage: Stage, model: Start, section: ModelSection, state: TrainState, precision: str
) -> Frozen:
    """A model of a directory, without gradients, on the mesh of the stage's own."""
    recipe = context.recipe
    module = build_model(section, section.vocab_size)
    return freeze(
        module,
        partial(load_into, model.directory, list(tensors_of(module))),
        state.parallel,
        machine=recipe.machine,
        precision=precision,
        context=stage.context,
        limits=Limits.of(recipe, section),
    )
