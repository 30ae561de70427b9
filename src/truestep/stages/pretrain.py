"""The pretrain stage: text in, base model out. Read top to bottom."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from truestep.checkpoint.catalogue import begin_epoch
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load_newest
from truestep.data.loader import Corpus, Loader, Prefetcher, evaluation_batches
from truestep.data.tokenizer import Tokenizer, check_vocab
from truestep.errors import CheckpointError, ModelError
from truestep.models.build import build_model, init_weights
from truestep.models.foreign import ForeignModel
from truestep.models.hf import load_hf, read_section
from truestep.models.hub import fetch, is_hub_id
from truestep.models.load import require_own_module, tensors_of
from truestep.numerics.pieces import Piece
from truestep.optim.groups import describe
from truestep.parallel.mesh import Limits
from truestep.plan.activations import Recompute
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.digests import bits_fields, changed, what
from truestep.recipe.model import COUNTING_RULE, ModelSection
from truestep.recipe.stage import Stage
from truestep.stages.context import Context, checkpoint_place
from truestep.stages.corpora import Corpora, mixture
from truestep.stages.finish import Finished, finish
from truestep.stages.measure import measure_peak, measure_precision, versions
from truestep.storage.store import open_store
from truestep.train.build import build
from truestep.train.evaluate import HeldOut, Text, evaluate_with_gap
from truestep.train.loop import Loop
from truestep.train.profile import StepProfiler
from truestep.train.state import TrainState


def carry_out(context: Context, stage: Stage) -> str:
    """Returns "done", "stopped" or "gate" (the model was made, but not accepted)."""
    recipe, job, machine = context.recipe, context.job, context.recipe.machine
    schedule = BatchSchedule.of(stage)
    start = starting_point(context, stage)
    corpora = Corpora.prepare(context, stage, partial(model_section, context, start))
    section = model_section(context, start, corpora.tokenizer)
    precision = measure_precision(context, stage, section)
    model = build_model(section, section.vocab_size)
    check_fit(stage, section, model)
    names = list(tensors_of(model))
    state = build(
        stage,
        model,
        partial(load_into, start.directory, names) if start else partial(first_weights, recipe.run.seed),
        job=job,
        machine=machine,
        precision=precision,
        seed=recipe.run.seed,
        steps=schedule.steps,
        numerics=recipe.numerics,
        limits=Limits.of(recipe, section),
    )
    held_out = corpora.held_out(stage)
    measure = held_out and partial(evaluate_on, state, stage, machine.microbatch_rows, held_out, corpora.tokenizer)
    loader = Loader(corpora.training(stage), stage.context, recipe.run.seed, stage.mask_documents)
    checkpointer = open_checkpoints(context, stage)
    resume(context, stage, state, loader, checkpointer)
    say_start(context, stage, state, section, schedule, precision, start)
    say_idle(context, stage, schedule, state.parallel.groups.data_size)
    if start and measure and state.parent is None:
        state.parent = asdict(measure(True))

    prefetched = Prefetcher(
        loader,
        schedule,
        state.parallel.groups.data_rank,
        state.parallel.groups.data_size,
        machine.microbatch_rows,
        machine.prefetch,
        state.step,
        pin=job.device.type == "cuda",
    )
    loop = Loop(
        stage=stage.name,
        state=state,
        feed=prefetched,
        loader_state=lambda step: loader.state(schedule.rows(step - 1)[1]),
        tokens_of=lambda step: schedule.rows_in(step) * stage.context,
        checkpointer=checkpointer,
        cadence=recipe.checkpoint,
        metrics=context.metrics,
        log=context.log,
        watcher=context.progress,
        evaluate=measure,
        evaluate_every=stage.evaluate.every if stage.evaluate else 0,
        evaluate_data=stage.evaluate.data if stage.evaluate else None,
        profiler=StepProfiler(machine.profile_steps, job.device) if machine.profile_steps else None,
    )
    corpora.record(context)
    context.progress.begin(stage.name, state.step, state.steps)
    with prefetched:
        outcome = loop.run()
    context.progress.close()
    checkpointer.close()
    loop.metrics.flush()
    if outcome == "stopped":
        context.progress.say(f"{stage.name}: stopped after step {state.step}; to go on: {context.command}")
        return "stopped"
    return finish(context, stage, Finished(state, section, corpora, loop.figures))


@dataclass(frozen=True)
class Start:
    """The model that a stage starts from; `pinned` names it for the record (a hub id with its commit)."""

    directory: Path
    pinned: str

    @property
    def digest(self) -> str | None:
        """Digest of its weights, where the directory has a manifest of ours that says."""
        file = self.directory / "manifest.json"
        return json.loads(file.read_text()).get("weights") if file.exists() else None


def starting_point(context: Context, stage: Stage) -> Start | None:
    """None where the stage starts from fresh weights. Rank 0 fetches, the others wait."""
    if stage.start == "init":
        return None
    if stage.start.startswith("stage:"):
        directory = context.model_dir(stage.start.removeprefix("stage:"))
        return Start(directory, stage.start)
    if not is_hub_id(stage.start):
        return Start(Path(stage.start), stage.start)
    cache = Path(context.recipe.machine.cache).expanduser() / "hub"

    def get() -> list[str]:
        found = fetch(stage.start, cache)
        return [str(found.directory), found.pinned]

    directory, pinned = context.job.agree(f"start/{stage.name}", get)
    return Start(Path(directory), pinned)


def model_section(context: Context, start: Start | None, tokenizer: Tokenizer) -> ModelSection:
    """The architecture, filled in: that of the start model, else that of the recipe."""
    section = context.recipe.model
    if start:
        own_module = section.module if section else None
        section = read_section(start.directory)
        require_own_module(section, own_module, start.directory)
    if section is None:
        raise ModelError("the recipe has no [model] and its stage starts from fresh weights; add [model]")
    resolved = section.resolved(tokenizer.vocab_size)
    check_vocab(tokenizer, resolved.vocab_size)
    return resolved


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


def load_into(directory: Path, names: list[str], model: nn.Module, pieces: Mapping[str, Piece]) -> None:
    """`names`: those of the whole model, of which `model` may be a part."""
    load_hf(directory, pieces, names)


def first_weights(seed: int, model: nn.Module, pieces: Mapping[str, Piece]) -> None:
    init_weights(model, seed, pieces)


def open_checkpoints(context: Context, stage: Stage) -> Checkpointer:
    """The stage's store of checkpoints, fenced off from earlier attempts."""
    recipe, job, settings = context.recipe, context.job, context.recipe.checkpoint
    store = open_store(checkpoint_place(recipe, context.run_dir, stage.name), settings.storage_options)
    return Checkpointer(
        store,
        attempt=job.agree(f"epoch/{stage.name}", lambda: begin_epoch(store).number),
        rank=job.rank,
        world=job.world,
        kv=job.store,
        block_bytes=settings.block,
        deadline_s=settings.deadline,
        facts={"what": what(recipe), "stage": stage.name, "run": recipe.run.name, "bits": bits_now(context)},
    )


def resume(context: Context, stage: Stage, state: TrainState, loader: Loader, checkpointer: Checkpointer) -> None:
    """Go on from the newest sound checkpoint, if there is one, and say so."""
    job, wish = context.job, context.recipe.run.resume
    group = Group.of(job.store, job.rank, job.world, context.recipe.checkpoint.deadline, f"load-{stage.name}")
    tensors = state.tensors()
    loaded = load_newest(checkpointer.store, tensors, group=group)
    if loaded is None:
        if wish == "required":
            raise CheckpointError(
                f"run.resume is required, but {checkpointer.store.url} holds no checkpoint; set it to auto"
            )
        context.progress.say(f"{stage.name}: starts at step 0 (no checkpoint in {checkpointer.store.url})")
        return
    if wish == "never":
        raise CheckpointError(
            f"run.resume is never, but {checkpointer.store.url} holds step {loaded.step}; choose another run.name"
        )
    if loaded.facts["what"] != what(context.recipe):
        raise CheckpointError(f"{checkpointer.store.url} holds checkpoints of another recipe; choose another run.name")
    state.restore(loaded.extra)
    loader.restore(state.loader)
    differences = changed(loaded.facts["bits"], bits_now(context))
    context.note(
        "resume",
        stage=stage.name,
        step=loaded.step,
        checkpoint=loaded.commit,
        fell_back=loaded.fell_back,
        changed=differences,
    )
    if differences:
        context.progress.say(f"{stage.name}: last bits of results may differ from here on: {'; '.join(differences)}")
    for sentence in loaded.fell_back:
        context.progress.alarm(sentence)
    context.progress.say(f"{stage.name}: goes on from step {loaded.step} ({loaded.commit})")


def bits_now(context: Context) -> dict[str, Any]:
    """What the last bits of a result depend on: fields of the recipe, the mesh's size, versions and hardware."""
    device = context.job.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    here = {"processes": context.job.world, "threads": torch.get_num_threads(), "hardware": hardware}
    return bits_fields(context.recipe) | here | {f"version of {name}": v for name, v in versions().items()}


def evaluate_on(
    state: TrainState, stage: Stage, rows: int, corpus: Corpus, tokenizer: Tokenizer, whole: bool
) -> HeldOut:
    """Held-out figures of the model as it is now: of `evaluate.rows` rows, or of the whole text."""
    assert stage.evaluate is not None
    groups, limit = state.parallel.groups, 0 if whole else stage.evaluate.rows
    share = groups.data_rank, groups.data_size
    batches = partial(evaluation_batches, corpus, stage.context, stage.mask_documents, *share, rows, limit)
    num_bytes, store = corpus.store.num_bytes, corpus.store
    lengths = torch.from_numpy(tokenizer.byte_lengths())
    complete = not limit and num_bytes is not None and corpus.packing == "split"
    text = Text(lengths, num_bytes or 0, store.num_documents, complete)
    return evaluate_with_gap(state.parallel, state.job, batches, text)


def say_start(
    context: Context,
    stage: Stage,
    state: TrainState,
    section: ModelSection,
    schedule: BatchSchedule,
    precision: str,
    start: Start | None,
) -> None:
    """Everything about the stage that its ledger and card are computed from."""
    counts = {} if section.module else asdict(section.counts()) | {"total": section.counts().total}
    peak_flops, peak_source = measure_peak(context, precision)
    known = not section.module
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    groups = whole_groups(state)
    blocks = {mode: [layer for layer, its in state.recomputed.items() if its == mode] for mode in modes}
    context.note(
        "stage_start",
        stage=stage.name,
        stage_kind=stage.kind,
        steps=schedule.steps,
        start_step=state.step,
        tokens=schedule.total_rows * stage.context,
        context=stage.context,
        batch_tokens=stage.batch_tokens,
        params=counts or {"total": sum(p.numel() for p in state.parallel.bare.parameters())},
        train_flops_per_token_causal=section.train_flops(1, stage.context, causal=True) if known else None,
        train_flops_per_token_full=section.train_flops(1, stage.context, causal=False) if known else None,
        flops_rule=COUNTING_RULE if known else None,
        precision=precision,
        peak_flops=peak_flops,
        peak_source=peak_source,
        start=start.pinned if start else "init",
        parent=start.digest if start else None,
        data=[item.data for item in mixture(stage)],
        model=section.model_dump(mode="json"),
        settings={
            "optimizer": groups,
            "mesh": asdict(state.parallel.groups.degrees),
            "recomputed": blocks,
            "stage": stage.model_dump(mode="json"),
        },
    )
    for group in groups:
        context.progress.say(
            f"{stage.name}: {group['group']}: {group['elements']:,} elements in {group['tensors']} tensors, "
            f"{group['method']}, lr {group['lr']:g}, decay {group['weight_decay']:g}"
        )
    if context.recipe.machine.activation_checkpointing == "auto":
        counts = ", ".join(f"{mode} {len(layers)}" for mode, layers in blocks.items())
        context.progress.say(f"{stage.name}: blocks that recompute activations: {counts}")


def whole_groups(state: TrainState) -> list[dict[str, Any]]:
    """Groups of parameters of the whole model, as rank 0 has them; it counts what other ranks hold in. Collective."""
    rows = [{k: v for k, v in row.items() if k != "names"} for row in describe(state.optimizer.groups)]
    names = {group.name: [name for name, _ in group.params] for group in state.optimizer.groups}
    pieces = state.parallel.pieces()
    known = ("muon", "decay", "no decay", "own")
    owned = {group: [pieces[name] for name in names.get(group, []) if pieces[name].owned] for group in known}
    tensors = [sum(bool(p.local.numel()) and not any(p.start) for p in owned[group]) for group in known]
    elements = [sum(p.local.numel() for p in owned[group]) for group in known]
    totals = state.job.all_sum([float(n) for n in (*tensors, *elements)])
    for row in rows:
        index = known.index(row["group"])
        row["tensors"], row["elements"] = int(totals[index]), int(totals[len(known) + index])
    return rows


def say_idle(context: Context, stage: Stage, schedule: BatchSchedule, shares: int) -> None:
    """Ranks without a microbatch of their own compute on padding: right, and a waste that somebody should know of."""
    rows = context.recipe.machine.microbatch_rows
    fewest = min(schedule.rows_in(0), schedule.rows_in(schedule.steps - 1)) // rows
    if fewest < shares:
        context.progress.say(
            f"[yellow]{stage.name}: a step has {fewest} microbatches for {shares} groups of ranks, so "
            f"{shares - fewest} of them work on padding; lower machine.microbatch_rows (now {rows}) or use fewer "
            f"processes[/yellow]"
        )
