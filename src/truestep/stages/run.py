"""A whole run: every stage of the recipe in order, build → loop → gate → card, on this process's part of the job."""

import os
import platform
import socket
import time
from collections import Counter
from importlib.metadata import version

import torch

from truestep.errors import UserError
from truestep.parallel.environment import Place
from truestep.parallel.job import Job, join
from truestep.recipe.digests import bits, what, where
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import Stage
from truestep.runlog.log import RunLog, next_attempt
from truestep.stages import pretrain
from truestep.stages.context import Context, open_run, run_directory
from truestep.stages.progress import TerminalProgress

STAGES = {"pretrain": pretrain.carry_out}
"""Kinds of stages. A new one is one new file here with `carry_out(context, stage) -> Outcome`, and a line in this dict."""


def carry_out(recipe: Recipe, here: Place | None, command: str) -> str:
    """Run every stage that is not done yet. Returns "finished", "stopped" (a polite stop) or "gate".

    Every rank of the job calls this; rank 0 keeps the log and speaks. Raises UserError for bad input, on every rank.
    """
    launched = float(os.environ.get("TRUESTEP_LAUNCHED") or time.time())
    machine = recipe.machine
    job = join(here, device=machine.device, threads=machine.threads, timeout_s=machine.timeout)
    try:
        with TerminalProgress(job.first) as progress:
            job.agree("open", lambda: open_run(recipe))
            directory = run_directory(recipe)
            attempt = job.agree("attempt", lambda: next_attempt(directory))
            context = Context(recipe, job, directory, attempt, progress, command)
            if job.first:
                context.log = RunLog(directory, attempt)
            return _attempt(context, launched)
    finally:
        job.leave()


def _attempt(context: Context, launched: float) -> str:
    """One attempt, from its first to its last record."""
    try:
        _say_start(context, launched)
        reason = _stages(context)
        context.note("attempt_end", reason=reason)
    except BaseException as error:
        sentence = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        context.note("attempt_end", reason="failed", error=sentence)
        raise
    finally:
        if context.log:
            context.log.close()
    context.job.meet()
    return reason


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
        host=socket.gethostname(),
        digests={"what": what(recipe), "where": where(recipe), "bits": bits(recipe)},
        versions=versions(),
        devices=devices,
        stages=[stage.name for stage in recipe.stages],
        launched_s=launched,
        price_per_device_hour=ledger.price_per_device_hour,
        currency=ledger.currency,
        pue=ledger.pue,
        grid_region=ledger.grid_region,
    )
    held = ", ".join(f"{count} x {name}" for name, count in devices.items())
    context.progress.say(f"run {recipe.run.name}, attempt {context.attempt}: {job.world} processes on {held}")


def _devices(job: Job) -> dict[str, int]:
    """Devices that the attempt holds, by name. On CPUs a device is a process's share of the cores."""
    if job.device.type == "cuda":
        name = torch.cuda.get_device_name(job.device)
    else:
        name = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    return dict(Counter({name: job.world}))


def versions() -> dict[str, str]:
    """What the bits of a result may depend on beside the recipe."""
    return {
        "truestep": version("truestep"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
    }
