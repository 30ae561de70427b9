"""Everything that a stage trains with, built from the recipe for the processes that are there: the same parts for a
run, a replay and a drill."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from truestep.data.loader import Corpus, Loader, Prefetcher, evaluation_batches
from truestep.data.shares import Shares
from truestep.data.store import TokenStore
from truestep.data.tokenizer import Tokenizer, check_vocab
from truestep.errors import ModelError
from truestep.models.build import build_model, init_weights
from truestep.models.foreign import ForeignModel
from truestep.models.hf import read_section
from truestep.models.load import require_own_module, tensors_of
from truestep.numerics.digest import files_digest
from truestep.numerics.pieces import Piece
from truestep.parallel.apply import Fill
from truestep.parallel.mesh import Limits
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.sentinel.spikes import SpikeWatch
from truestep.sentinel.statistics import Statistics, apart
from truestep.stages.context import Context
from truestep.stages.corpora import Corpora
from truestep.stages.epochs import in_tokens
from truestep.stages.measure import measure_precision
from truestep.stages.references import refer
from truestep.stages.starts import Start, load_into, starting_point
from truestep.stages.teachers import remember, teach
from truestep.train.adapt import adapt
from truestep.train.build import build
from truestep.train.digests import Digests
from truestep.train.evaluate import HeldOut, Text, evaluate_loss, evaluate_with_gap
from truestep.train.state import TrainState

BY_LOSS = ("reward_model", "preference")
"""Kinds whose held-out figure is their own loss, since it counts something else than targets."""


@dataclass(frozen=True)
class Parts:
    """What a stage, its length told in tokens, trains with. `precision`: the compute dtype. `start`: None for fresh
    weights; `fill` gives the model its first ones, `first` is the rest of the state before the first step.
    `measure(whole)`: the held-out figures of the model as it is, if the stage has a held-out text."""

    stage: Stage
    schedule: BatchSchedule
    start: Start | None
    fill: Fill
    corpora: Corpora
    section: ModelSection
    precision: str
    state: TrainState
    first: dict[str, Any]
    loader: Loader
    measure: Callable[[bool], HeldOut] | None

    def feed(self, context: Context) -> Prefetcher:
        """This rank's microbatches from the state's step on. The loader's skipped ranges are known by now."""
        groups, machine = self.state.parallel.groups, context.recipe.machine
        return Prefetcher(
            self.loader,
            self.schedule,
            groups.data_rank,
            groups.data_size,
            machine.microbatch_rows,
            machine.prefetch,
            self.state.step,
            pin=context.job.device.type == "cuda",
            shares=self.state.shares,
        )

    def loader_state(self, step: int) -> dict:
        """The loader's state once `step` steps were trained on."""
        return self.loader.state(self.schedule.rows(step - 1)[1])

    def tokens_of(self, step: int) -> int:
        """Tokens of the global batch of a step, counted from 0."""
        return self.schedule.rows_in(step) * self.stage.context


def assemble(context: Context, stage: Stage, precision: str | None = None) -> Parts:
    """Build a stage's parts, the state as it is before the first step. Collective. `precision`: what was chosen before,
    where that is known; else as the recipe says."""
    recipe, machine = context.recipe, context.recipe.machine
    start = starting_point(context, stage)
    corpora = Corpora.prepare(context, stage, partial(model_section, context, stage, start))
    loader = Loader(corpora.training(stage), stage.context, recipe.run.seed, stage.mask_documents)
    stage = in_tokens(stage, loader.num_rows_per_epoch)
    schedule = BatchSchedule.of(stage)
    section = model_section(context, stage, start, corpora.tokenizer)
    precision = precision or measure_precision(context, stage, section)
    model = build_model(section, section.vocab_size)
    check_fit(stage, section, model)
    names = list(tensors_of(model))
    fill = partial(load_into, start.directory, names) if start else partial(first_weights, recipe.run.seed)
    if stage.lora is not None:
        fill = adapt(model, stage.lora, fill, recipe.run.seed)
    state = build(
        stage,
        model,
        fill,
        job=context.job,
        machine=machine,
        precision=precision,
        seed=recipe.run.seed,
        steps=schedule.steps,
        numerics=recipe.numerics,
        limits=Limits.of(recipe, section),
    )
    if stage.lora is not None and start:
        state.base = context.job.agree(f"base/{stage.name}", partial(files_digest, start.directory))
    with_columns = teach(context, stage, state, section, precision, corpora)
    remember(context, stage, state, start, precision)
    with_columns = refer(context, stage, state, start, precision, with_columns)
    if with_columns is not corpora:
        corpora = with_columns
        loader = Loader(corpora.training(stage), stage.context, recipe.run.seed, stage.mask_documents)
    held_out = corpora.held_out(stage)
    measure = held_out and partial(evaluate_on, state, stage, machine.microbatch_rows, held_out, corpora.tokenizer)
    state.spikes = SpikeWatch(recipe.sentinel.spikes)
    state.statistics = statistics(state) if recipe.sentinel.statistics else None
    state.loader = loader.state(0)
    degrees, rows = state.parallel.groups.degrees, machine.microbatch_rows
    state.shares = Shares(degrees.dp_replicate, degrees.dp_shard, lambda step: schedule.rows_in(step) // rows)
    return Parts(stage, schedule, start, fill, corpora, section, precision, state, state.extra(), loader, measure)


def statistics(state: TrainState) -> Statistics:
    """Of the shards of all ranks. Collective."""
    job, data_rank = state.job, float(state.parallel.groups.data_rank)
    return Statistics([int(number) for number in job.all_sum(apart([data_rank], job.rank, job.world))])


def digests(parts: Parts, **options: Any) -> Digests:
    """Of the gradients and the state of a stage that is assembled. Options: see Digests."""
    state = parts.state
    return Digests(parts.stage.name, state.job, state.parallel.gradients, state.tensors, **options)


def model_section(context: Context, stage: Stage, start: Start | None, tokenizer: Tokenizer) -> ModelSection:
    """The architecture, filled in: that of the start model, else that of the recipe."""
    section = context.recipe.fresh(stage)
    if start:
        own_module = section.module if section else None
        section = read_section(start.directory)
        require_own_module(section, own_module, start.directory)
    if section is None:
        raise ModelError("the recipe has no [model] and its stage starts from fresh weights; add [model]")
    resolved = section.resolved(tokenizer.vocab_size)
    check_vocab(tokenizer, resolved.vocab_size)
    return with_head(stage, resolved)


def with_head(stage: Stage, section: ModelSection) -> ModelSection:
    """The architecture with the head that a stage of its kind trains."""
    if stage.kind != "reward_model":
        if section.scores:
            raise ModelError(
                f'stage {stage.name!r} of kind = "{stage.kind}" starts from a reward model, whose head gives '
                f"scores and no logits; start from a model of text"
            )
        return section
    if section.module is not None:
        raise ModelError(
            f"stage {stage.name!r} puts a score head on its model, which a module of your own ({section.module}) "
            f"has no place for; start from a model of a known family"
        )
    return section.scoring()


def check_fit(stage: Stage, section: ModelSection, model: nn.Module) -> None:
    """What the recipe alone cannot know of a start model or of a user's own module."""
    if stage.context > section.max_context:
        raise ModelError(
            f"stage {stage.name!r} has context = {stage.context}, but its model takes rows of at most "
            f"{section.max_context} tokens; lower the context, or start from a model of longer rows"
        )
    if isinstance(model, ForeignModel) and stage.mask_documents and not model.takes_documents:
        raise ModelError(
            f"stage {stage.name!r} keeps documents apart (mask_documents), which {section.module} cannot: its forward "
            f"has no `document_ids`; add that argument, or set mask_documents = false"
        )


def first_weights(seed: int, model: nn.Module, pieces: Mapping[str, Piece]) -> None:
    init_weights(model, seed, pieces)


def evaluate_on(
    state: TrainState, stage: Stage, rows: int, corpus: Corpus, tokenizer: Tokenizer, whole: bool
) -> HeldOut:
    """Held-out figures of the model as it is now: of `evaluate.rows` rows, or of the whole text."""
    assert stage.evaluate is not None
    groups, limit = state.parallel.groups, 0 if whole else stage.evaluate.rows
    share = groups.data_rank, groups.data_size
    batches = partial(evaluation_batches, corpus, stage.context, stage.mask_documents, *share, rows, limit)
    text = text_of(corpus, tokenizer, not limit)
    with state.as_result():
        if stage.kind in BY_LOSS:
            for prepare in state.before_step:
                prepare()
            return evaluate_loss(state.parallel, state.job, batches(), state.loss, state.before)
        return evaluate_with_gap(state.parallel, state.job, batches, text)


def text_of(corpus: Corpus, tokenizer: Tokenizer, whole: bool) -> Text:
    """What turns nats of a corpus into bits per byte. `whole`: all of its rows are looked at."""
    num_bytes, store = corpus.store.num_bytes, corpus.store
    complete = whole and num_bytes is not None and corpus.packing == "split" and isinstance(store, TokenStore)
    return Text(torch.from_numpy(tokenizer.byte_lengths()), num_bytes or 0, store.num_documents, complete)
