"""Models beside the one that a stage trains: the teacher of a distillation, laid over the same ranks."""

from functools import partial

from truestep.data.tokenizer import Tokenizer, load_tokenizer
from truestep.errors import ModelError, UserError
from truestep.losses.distill import HIDDEN, Distillation
from truestep.losses.remember import HIDDEN as REMEMBERED
from truestep.losses.remember import Remembering
from truestep.models.build import build_model
from truestep.models.hf import read_section
from truestep.models.load import tensors_of
from truestep.parallel.mesh import Limits
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.stages.context import Context
from truestep.stages.starts import Start, load_into, open_start
from truestep.train.build import HEAD_CHUNK_TOKENS
from truestep.train.frozen import Frozen, HiddenStates, freeze
from truestep.train.state import TrainState


def teach(
    context: Context, stage: Stage, state: TrainState, student: ModelSection, precision: str, tokenizer: Tokenizer
) -> None:
    """Let a teacher give its hidden states to the loss, where the stage distils online. Collective."""
    if stage.distill is None or not isinstance(state.loss, Distillation):
        return
    if stage.distill.logits == "stored":
        raise UserError(
            f'stage {stage.name!r} has distill.logits = "stored", and nothing writes a teacher\'s store yet; write '
            f'"online", which gives the same loss'
        )
    teacher = teacher_of(context, stage)
    section = check_teacher(stage, teacher, student, tokenizer)
    frozen = frozen_model(context, stage, teacher, section, state, precision)
    state.before.append(HiddenStates(frozen, HIDDEN, state.loss))


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
