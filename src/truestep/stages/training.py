"""A stage that trains, of whatever kind: data in, model out. What the kinds differ in is chosen where the parts are put
together: data, loss, what the model is made of (stages.assemble). Read top to bottom."""

import os
from dataclasses import asdict

from truestep.plan.interval import Interval
from truestep.recipe.stage import Stage
from truestep.runlog.digests import DigestLog
from truestep.runlog.log import read
from truestep.stages.assemble import assemble, digests
from truestep.stages.context import Context
from truestep.stages.drills import drills
from truestep.stages.finish import Finished, finish
from truestep.stages.guarding import guard, measured
from truestep.stages.opening import say_idle, say_start
from truestep.stages.resume import open_checkpoints, resume
from truestep.stages.rollback import StageRewinder
from truestep.train.balance import Balance
from truestep.train.falling import BothFall
from truestep.train.invariants import Invariants
from truestep.train.loop import Loop
from truestep.train.pace import Pace
from truestep.train.profile import StepProfiler
from truestep.train.state import TrainState


def carry_out(context: Context, stage: Stage) -> str:
    """Returns "done", "stopped" or "gate" (the model was made, but not accepted)."""
    recipe, job, machine = context.recipe, context.job, context.recipe.machine
    parts = assemble(context, stage)
    state, measure = parts.state, parts.measure
    rows = DigestLog(context.run_dir, context.attempt) if context.log else None
    state.digests = digests(parts, every=recipe.sentinel.sweep_every, log=context.log, rows=rows)
    checkpointer = open_checkpoints(context, stage)
    resume(context, stage, state, parts.loader, checkpointer)
    say_start(context, parts)
    say_idle(context, stage, parts.schedule, state.parallel.groups.data_size)
    if parts.start and measure and state.parent is None:
        state.parent = asdict(measure(True))

    watch = guard(context, stage, state)
    feed = parts.feed(context)
    loop = Loop(
        stage=stage.name,
        state=state,
        feed=feed,
        loader_state=parts.loader_state,
        tokens_of=parts.tokens_of,
        checkpointer=checkpointer,
        cadence=recipe.checkpoint,
        metrics=context.metrics,
        log=context.log,
        watcher=context.progress,
        evaluate=measured(measure, watch),
        evaluate_every=stage.evaluate.every if stage.evaluate else 0,
        evaluate_data=stage.evaluate.data if stage.evaluate else None,
        interval=_interval(context),
        checks=[
            watch,
            *invariants(context, state),
            *drills(context, stage.name, checkpointer.store),
            *astray(context, stage),
        ],
        rewinder=StageRewinder(context, parts, feed, checkpointer),
        balance=balance(context, state),
        profiler=StepProfiler(machine.profile_steps, job.device) if machine.profile_steps else None,
    )
    parts.corpora.record(context)
    context.progress.begin(stage.name, state.step, state.steps)
    with feed:
        outcome = loop.run()
    context.progress.close()
    loop.saves.close()
    loop.metrics.flush()
    if rows:
        rows.close()
    if outcome == "stopped":
        context.progress.say(f"{stage.name}: stopped after step {state.step}; to go on: {context.command}")
        return "stopped"
    return finish(context, stage, Finished(state, parts.section, parts.corpora, loop.figures))


def invariants(context: Context, state: TrainState) -> list[Invariants]:
    """If they are wanted."""
    settings = context.recipe.sentinel
    return [Invariants(state, settings.sweep_every)] if settings.invariants else []


def astray(context: Context, stage: Stage) -> list[BothFall]:
    """Of preferences."""

    def tell(text: str) -> None:
        context.note("note", text=f"{stage.name}: {text}")
        context.progress.alarm(f"{stage.name}: {text}")

    return [BothFall(tell)] if stage.kind == "preference" else []


def balance(context: Context, state: TrainState) -> Balance | None:
    """Of several processes."""
    machine, world = context.recipe.machine, context.job.world
    if world == 1:
        return None
    fewest = machine.elastic.min or world
    return Balance(state, Pace.of(state, machine.compile), fewest, machine.elastic.spares, os.environ)


def _interval(context: Context) -> Interval | None:
    """How often to save, where that is to be learnt; rank 0 decides."""
    if context.log is None or context.recipe.checkpoint.every_time != "auto":
        return None
    return Interval.of(read(context.run_dir), context.job.world)
