"""A whole run: every stage of the recipe in order, build → loop → gate → card, on this process's part of the job."""

import gc
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable

import torch

from truestep.checkpoint.control import begin_job
from truestep.errors import Again, Lost, UserError
from truestep.files import publish
from truestep.parallel.environment import Place
from truestep.parallel.groups import forget_meshes
from truestep.parallel.job import Job, join
from truestep.parallel.orders import Orders
from truestep.parallel.witness import Witness
from truestep.recipe.digests import bits, what, where
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import TRAINED, Stage
from truestep.runlog.log import RunLog, next_attempt
from truestep.runlog.outbox import take_in
from truestep.stages import quantise, training
from truestep.stages.context import Context, adopt, open_run
from truestep.stages.doors import check_doors
from truestep.stages.measure import versions
from truestep.stages.progress import TerminalProgress
from truestep.stages.resume import bits_now

COLLECTIONS = 5
"""Most passes of the collector over what a failed attempt leaves."""
STAGES: dict[str, Callable[[Context, Stage], str]] = dict.fromkeys(TRAINED, training.carry_out) | {
    "quantise": quantise.carry_out
}
"""Kinds of stages. A new one that does not train is one new file here with `carry_out(context, stage)`, and a line in
this dict."""


def carry_out(recipe: Recipe, here: Place | None, command: str) -> str:
    """Run every stage that is not done yet. Returns "finished", "stopped" (a polite stop) or "gate".

    Every rank of the job calls this; rank 0 keeps the log and speaks. Bad input raises UserError on one rank, and
    HeardError on the others. Where the machine's agent gives orders, the survivors of a failure go on in this process
    as the next attempt, from the newest checkpoint; elsewhere Lost is raised, and Again by all ranks together.
    """
    witness = Witness.of(os.environ)
    try:
        return _attempts(recipe, here, command)
    finally:
        if witness is not None:
            witness.close()


def _attempts(recipe: Recipe, here: Place | None, command: str) -> str:
    launched, orders = float(os.environ.get("TRUESTEP_LAUNCHED") or time.time()), Orders.of(os.environ)
    if orders is not None:
        gc.freeze()  # what was imported stays; not to look through it makes _let_go many times as quick
    while True:
        try:
            return _attempt(recipe, here, command, launched)
        except Lost as end:
            if orders is None or here is None:
                raise
            why = str(end)
        _let_go()
        launched = time.time()
        here = orders.ask(why)
        if here is None:
            raise Lost(why)


def _let_go() -> None:
    """Now that no traceback holds them any more: the model and the groups, whose connections close with them. That is
    what tells those who wait for this rank."""
    forget_meshes()
    for _ in range(COLLECTIONS):
        if not gc.collect():  # what one finds holds others, by way of C++
            return


def _attempt(recipe: Recipe, here: Place | None, command: str, launched: float) -> str:
    machine, together = recipe.machine, False  # whether all ranks end alike
    regroups = Orders.of(os.environ) is not None
    begin_job()
    job = join(here, device=machine.device, threads=machine.threads, timeout_s=machine.timeout, regroups=regroups)
    with TerminalProgress(job.first) as progress:
        context = Context(recipe, job, recipe.directory, 0, progress, command)
        try:
            context.attempt = job.agree("open", lambda: _open(context))
            _say_start(context, launched)
            reason, together = _stages(context), True
            _take_in(context)
            context.note("attempt_end", reason=reason)
            return reason
        except BaseException as error:
            end = job.settle(error)
            together = isinstance(end, Again)
            _say_end(context, end)
            if end is not error:
                raise end from error
            raise
        finally:
            context.closing.close()
            if context.log:
                context.log.close()
            job.leave(meet=together)


def _say_end(context: Context, end: BaseException) -> None:
    """Why the attempt ends, in the log; and what the next one is to do without, where a supervisor looks for it."""
    _take_in(context)
    if isinstance(end, Again):
        context.note("attempt_end", reason="again", error=str(end))
        if context.log:
            ask = {"attempt": context.attempt, "reason": end.reason, "without": list(end.without)}
            (context.run_dir / "elastic").mkdir(exist_ok=True)
            publish(context.run_dir / "elastic" / "ask.json", json.dumps(ask).encode())
        return
    sentence = str(end) if isinstance(end, UserError | Lost) else f"{type(end).__name__}: {end}"
    context.note("attempt_end", reason="failed", error=sentence)


def _take_in(context: Context) -> None:
    """Events that others left for the log."""
    if context.log:
        take_in(context.run_dir, context.log)


def _open(context: Context) -> int:
    """The number of the attempt. What cannot go well is refused before anything is written; then this process, rank 0,
    has the log, and with it the run, for itself."""
    recipe, job = context.recipe, context.job
    check_doors(recipe, [stage for stage in recipe.stages if not _done(context, stage)], job.world, job.device)
    open_run(recipe)
    attempt = next_attempt(context.run_dir)
    context.log = RunLog(context.run_dir, attempt)
    _take_in(context)
    adopt(recipe)
    return attempt


def _stages(context: Context) -> str:
    for stage in context.recipe.stages:
        if context.job.agree(f"done/{stage.name}", lambda stage=stage: _done(context, stage)):
            context.progress.say(f"{stage.name}: done in an earlier attempt")
            continue
        outcome = STAGES[stage.kind](context, stage)
        if outcome != "done":
            return outcome
    context.progress.say(f"finished: models lie in {context.run_dir / 'models'}")
    return "finished"


def _done(context: Context, stage: Stage) -> bool:
    """A stage is done when its card is there: it is the last thing that a stage writes."""
    return (context.model_dir(stage.name) / "card.json").exists()


def _say_start(context: Context, launched: float) -> None:
    recipe, job = context.recipe, context.job
    devices = _devices(job)
    ledger = recipe.ledger
    context.note(
        "attempt_start",
        run=recipe.run.name,
        world=job.world,
        host=job.host,
        hosts=list(job.hosts),
        digests={"what": what(recipe), "where": where(recipe), "bits": bits(recipe)},
        versions=versions(),
        bits=bits_now(context),
        devices=devices,
        stages=[stage.name for stage in recipe.stages],
        drill_every_s=recipe.checkpoint.drill_every,
        launched_s=launched,
        price_per_device_hour=ledger.price_per_device_hour,
        currency=ledger.currency,
        pue=ledger.pue,
        grid_region=ledger.grid_region,
    )
    held = ", ".join(f"{count} x {name}" for name, count in devices.items())
    ranks = "1 process" if job.world == 1 else f"{job.world} processes"
    context.progress.say(f"run {recipe.run.name}, attempt {context.attempt}: {ranks} on {held}")


def _devices(job: Job) -> dict[str, int]:
    """Devices that the attempt holds, by name. On CPUs a device is a process's share of the cores."""
    if job.device.type == "cuda":
        name = torch.cuda.get_device_name(job.device)
    else:
        threads = torch.get_num_threads()
        name = f"CPU {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"
    return dict(Counter({name: job.world}))
