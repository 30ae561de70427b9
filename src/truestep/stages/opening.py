"""What a stage says when it begins or goes on: all that its ledger and card are computed from, and a few warnings."""

from dataclasses import asdict
from typing import Any

from truestep.optim.groups import describe
from truestep.plan.activations import Recompute
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.model import COUNTING_RULE
from truestep.recipe.stage import Stage
from truestep.stages.assemble import Parts
from truestep.stages.context import Context
from truestep.stages.corpora import mixture
from truestep.stages.measure import measure_peak
from truestep.train.state import TrainState


def say_start(context: Context, parts: Parts) -> None:
    """Everything about the stage that its ledger and card are computed from."""
    stage, state, section, start = parts.stage, parts.state, parts.section, parts.start
    schedule, precision = parts.schedule, parts.precision
    counts = {} if section.module else asdict(section.counts()) | {"total": section.counts().total}
    peak_flops, peak_source = measure_peak(context, precision)
    known = not section.module
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    groups = whole_groups(state)
    reports = {item.data: packing.report for item, packing in zip(mixture(stage), parts.loader.packings)}
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
            "packing": reports,
        },
    )
    for name, report in reports.items():
        lost = [f"{report[what]:,} {what.replace('_', ' ')}" for what in report if _is_loss(what) and report[what]]
        if lost:
            words = f"{name}: {', '.join(lost)} of {report['tokens_in']:,} tokens"
            context.progress.say(f"[yellow]{stage.name}: {words}; see `truestep data inspect --stage`[/yellow]")
    for group in groups:
        context.progress.say(
            f"{stage.name}: {group['group']}: {group['elements']:,} elements in {group['tensors']} tensors, "
            f"{group['method']}, lr {group['lr']:g}, decay {group['weight_decay']:g}"
        )
    if context.recipe.machine.activation_checkpointing == "auto":
        counts = ", ".join(f"{mode} {len(layers)}" for mode, layers in blocks.items())
        context.progress.say(f"{stage.name}: blocks that recompute activations: {counts}")


def _is_loss(what: str) -> bool:
    """Whether a count of a packing tells of data that is not trained on."""
    return what.startswith(("truncated", "dropped"))


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
