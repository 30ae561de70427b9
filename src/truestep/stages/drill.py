"""`truestep drill`: is a checkpoint of any use? Every byte is read, the state loaded on another number of processes and
compared with what was in memory at the save, and some steps are done again beside the log.

Nothing of the run is written to but marks beside the checkpoint and, by way of the outbox, records of the log.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from truestep.checkpoint.catalogue import list_committed, read_manifest
from truestep.checkpoint.marks import being_deleted, mark
from truestep.checkpoint.of_run import recorded_mapping
from truestep.checkpoint.sealed import Committed
from truestep.checkpoint.upkeep import verify_and_mark
from truestep.errors import CheckpointError, HeardError, StorageError
from truestep.parallel.environment import Place
from truestep.recipe.load import load
from truestep.runlog.outbox import post
from truestep.stages.again import Damaged, fewest_processes, open_checkpoints_of, trusted
from truestep.stages.recorded import Recorded, recorded
from truestep.stages.replay import NOT_COMPARABLE, PARTS, carry_out, plan_of
from truestep.storage.interface import Store

MEMORY_FACTOR = 2.0
"""Memory that a restore takes, as a multiple of the checkpoint: gradients, their sums and activations come on top."""


@dataclass(frozen=True)
class Trial:
    """A restore to be tried: the commit, on how many processes, and steps to do again after it."""

    stage: str
    key: str
    processes: int
    steps: int


@dataclass(frozen=True)
class Tried:
    """What came of a trial. `damage`: why the state is not what it should be; `code`, `sentence`: of the steps that
    were done again (see truestep.stages.replay), `steps` of which came out bit for bit."""

    processes: int
    damage: str = ""
    code: int = 0
    sentence: str = ""
    steps: int = 0


Try = Callable[[Trial], Tried]
"""Carries a trial out on processes of its own."""


@dataclass(frozen=True)
class Finding:
    """What a drill found: fields of the log's `drill` record, and the kind of fault if the checkpoint is not sound."""

    stage: str
    step: int
    checkpoint: str
    ok: bool = True
    seconds: float = 0.0
    level: Literal["scrub", "load", "replay"] = "scrub"
    text: str = ""
    world: int | None = None
    steps: int = 0
    fault: Literal["checkpoint", "replay"] | None = None

    @property
    def sentence(self) -> str:
        on = "1 process" if self.world == 1 else f"{self.world} processes"
        done = {"scrub": "every byte was read", "load": f"every byte was read, and it was loaded on {on}"}
        replayed = f"every byte was read, it was loaded on {on}, and {self.steps} steps came out bit for bit"
        words = [done.get(self.level, replayed)] if self.ok else []
        verdict = "is sound" if self.ok else "is not sound" if self.fault == "checkpoint" else "cannot be relied on"
        rest = "; ".join([*words, *([self.text] if self.text else [])])
        return f"the checkpoint of step {self.step} ({self.checkpoint}) {verdict}: {rest}"


def drill(
    run_dir: Path,
    try_it: Try,
    *,
    stage: str | None = None,
    processes: int = 0,
    steps: int | None = None,
    free_bytes: float = float("inf"),
) -> Finding:
    """Drill the newest checkpoint of a stage (by default the one that began last), mark it and post the record.

    `processes`: to load it on, by default another number than it was saved by. `steps`: to do again, by default
    checkpoint.drill_steps. `free_bytes`: memory that it may take; a larger checkpoint is only read.
    """
    began = time.monotonic()
    found, recipe = recorded(run_dir, stage), load(recorded_mapping(run_dir))
    store = open_checkpoints_of(recipe, run_dir, found.stage)
    committed = _newest(store)
    finding = Finding(found.stage, committed.step, committed.key)
    damage = verify_and_mark(store, committed)
    if unread := [each.text for each in damage if not each.certain]:
        raise StorageError(f"{unread[0]}; nothing is said of the checkpoint: drill it again when the store answers")
    if damage:
        finding = replace(finding, ok=False, text=damage[0].text, fault="checkpoint")
    elif (needed := read_manifest(store, committed).num_bytes * MEMORY_FACTOR) > free_bytes:
        text = f"not loaded, which takes {needed / 2**30:.1f} GiB of memory: {free_bytes / 2**30:.1f} may be used"
        finding = replace(finding, text=text)
    else:
        exact = recipe.numerics.reduction == "exact"
        wanted = recipe.checkpoint.drill_steps if steps is None else steps
        for trial in _trials(found, committed, processes, wanted, exact):
            if finding.ok:
                finding = _take(finding, _twice(try_it, trial))
    if committed not in list_committed(store) or committed.key in being_deleted(store):
        raise CheckpointError(
            f"{store.url}/{committed.key} was deleted by retention while it was drilled, so nothing is said of it; "
            "the next drill takes a newer one (checkpoint.keep says how many are kept)"
        )
    finding = replace(finding, seconds=round(time.monotonic() - began, 3))
    _tell(run_dir, store, committed, finding)
    return finding


def _newest(store: Store) -> Committed:
    good = trusted(store)
    if not good:
        raise CheckpointError(f"{store.url} holds no checkpoint to drill; wait for the first one")
    return max(good)


def _trials(found: Recorded, committed: Committed, processes: int, steps: int, exact: bool) -> list[Trial]:
    """A load on another number of processes, with the steps where their bits do not depend on it; else the steps apart,
    on the run's own mesh, where this machine has a core for each."""
    attempt = found.of(committed.step)
    world, fewest = attempt.mesh.world, fewest_processes(attempt)
    here = processes or (fewest if world != fewest else 2 * fewest)
    trial = Trial(found.stage, committed.key, here, steps if exact or here == world else 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    apart = steps and not trial.steps and world <= cores
    return [trial, replace(trial, processes=world, steps=steps)] if apart else [trial]


def _twice(try_it: Try, trial: Trial) -> Tried:
    """What goes wrong has to go wrong in the same way once more, in other processes: faults of this machine do not."""
    first = try_it(trial)
    if first.damage or first.code == PARTS:
        second = try_it(trial)
        if (second.damage, second.sentence) != (first.damage, first.sentence):
            said = " | ".join(one.damage or one.sentence or "nothing wrong" for one in (first, second))
            raise CheckpointError(
                f"{trial.key}: two trials went differently, so nothing is said of it ({said}); "
                "check this machine, and drill on another one"
            )
    return first


def _take(finding: Finding, tried: Tried) -> Finding:
    if tried.damage:
        return replace(finding, ok=False, text=tried.damage, world=tried.processes, fault="checkpoint")
    world = finding.world or tried.processes
    if tried.code == PARTS:
        text = f"the steps after it came out otherwise here, twice alike: {tried.sentence}"
        return replace(finding, ok=False, level="load", text=text, world=world, fault="replay")
    if tried.code == NOT_COMPARABLE:
        return replace(finding, level="load", text=tried.sentence, world=world)
    steps = max(finding.steps, tried.steps)
    text = "" if steps else "no steps were done again: the log has none after it that can be compared"
    return replace(finding, level="replay" if steps else "load", text=text, world=world, steps=steps)


def _tell(run_dir: Path, store: Store, committed: Committed, finding: Finding) -> None:
    """Marks beside the checkpoint, which readers and retention go by, and records for the log."""
    shown = {name: value for name, value in asdict(finding).items() if name != "fault" and value is not None}
    if finding.fault == "checkpoint":
        mark(store, committed, "quarantined", reason=f"a drill found: {finding.text}")
    elif finding.level != "scrub":
        mark(
            store,
            committed,
            "drilled",
            **{name: shown[name] for name in ("level", "world", "steps", "seconds", "text")},
        )
    post(run_dir, "drill", **shown)
    if finding.fault:
        where = {"stage": finding.stage, "step": finding.step, "evidence": {"checkpoint": finding.checkpoint}}
        post(run_dir, "fault", kind=finding.fault, text=finding.sentence, **where)


def try_restore(run_dir: Path, trial: Trial, overrides: Sequence[str], here: Place | None) -> Tried | None:
    """Carry out a trial on this process's part of the job. The result is there on rank 0."""
    found = recorded(run_dir, trial.stage)
    committed = Committed.parse(trial.key)
    assert committed is not None
    last = committed.step
    while last < committed.step + trial.steps and last + 1 in found.steps:
        last += 1
    plan = plan_of(run_dir, found, committed.step + 1, last, trial.processes, overrides)
    try:
        outcome = carry_out(run_dir, replace(plan, sources=[trial.key]), here)
    except Damaged as error:
        return Tried(trial.processes, damage=str(error))
    except HeardError:
        return None
    if outcome is None:
        return None
    equal = sum(one.parting is None for one in outcome.compared)
    return Tried(outcome.processes, code=outcome.code, sentence=outcome.sentence, steps=equal)
