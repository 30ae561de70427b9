"""`truestep replay`: steps of a run done again from a checkpoint, on any number of processes, beside what its log says.

The run's directory is only read. In "exact" mode every bit is the same at any degree of dp_replicate, dp_shard and pp;
in "fast" mode on the mesh of the run alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from truestep.checkpoint.control import begin_job
from truestep.checkpoint.of_run import recorded_mapping
from truestep.errors import HeardError, UserError
from truestep.numerics.batch import Batch
from truestep.parallel.environment import Place
from truestep.parallel.job import Job, join
from truestep.recipe.load import load
from truestep.recipe.recipe import Recipe
from truestep.runlog.digests import Kind, read_digests
from truestep.sentinel.finite import Verdict
from truestep.stages.again import (
    Damaged,
    Plan,
    candidates,
    differences,
    elsewhere,
    fewest_processes,
    open_checkpoints_of,
    restore,
    stage_of,
)
from truestep.stages.assemble import Parts, assemble, digests
from truestep.stages.compare import Again, Compared, Part, Parting, compare
from truestep.stages.context import Context
from truestep.stages.progress import TerminalProgress
from truestep.stages.recorded import Recorded, Shard, recorded, shards
from truestep.train.state import TrainState
from truestep.train.step import StepResult, train_step

EQUAL, PARTS, NOT_COMPARABLE = 0, 1, 3


@dataclass(frozen=True)
class Outcome:
    """What a replay found. `commit` is None where it began with first weights. `differences`: what bits depend on and
    is otherwise here; if bits differ as well, that is no sign of damage. `notes`: checkpoints that were passed over."""

    stage: str
    first: int
    last: int
    commit: str | None
    from_step: int
    processes: int
    compared: list[Compared]
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def parting(self) -> Parting | None:
        return next((one.parting for one in self.compared if one.parting), None)

    @property
    def code(self) -> int:
        """Exit code of the command."""
        if self.parting is None:
            return EQUAL
        return NOT_COMPARABLE if self.differences else PARTS

    @property
    def sentence(self) -> str:
        if self.parting is None:
            microbatches = sum(one.microbatches for one in self.compared)
            kinds = [kind for one in self.compared for kind in one.digests]
            what = f"loss and gradient norm of each, {microbatches} microbatches; digests of the gradient after "
            what += f"{kinds.count('gradient')} and of the state after {kinds.count('state')} of them"
            return f"steps {self.from_step + 1} to {self.last}: every bit equal ({what})"
        if self.differences:
            return f"not comparable: {'; '.join(self.differences)} ({self.parting.sentence})"
        return self.parting.sentence

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "steps": [self.from_step + 1, self.last],
            "checkpoint": self.commit,
            "processes": self.processes,
            "compared": len(self.compared),
            "code": self.code,
            "sentence": self.sentence,
            "differences": self.differences,
            "notes": self.notes,
        }


def plan_replay(
    run_dir: Path, first: int, last: int, stage: str | None, processes: int, overrides: Sequence[str]
) -> Plan:
    """What `truestep replay` is to do: steps [first, last] of the log, on so many processes (0: the fewest that give
    the same bits). UserError for steps that the log does not have."""
    found = recorded(run_dir, stage)
    missing = [step for step in range(first, last + 1) if step not in found.steps]
    if first < 1 or last < first or missing:
        known = f"{min(found.steps)} to {max(found.steps)}" if found.steps else "none yet"
        raise UserError(
            f"--steps {first}:{last}: the log of {run_dir} has steps {known} of stage {found.stage!r}; "
            "give the first and the last step to do again, as numbered there"
        )
    plan = plan_of(run_dir, found, first, last, processes, overrides)
    store = open_checkpoints_of(plan.recipe, run_dir, found.stage)
    keys = [committed.key for committed in candidates(store, found, first - 1)]
    return replace(plan, sources=keys, initial=True)


def plan_of(
    run_dir: Path, found: Recorded, first: int, last: int, processes: int, overrides: Sequence[str] = ()
) -> Plan:
    """A plan without sources. `processes` = 0: the fewest that give the same bits."""
    mapping, attempt = recorded_mapping(run_dir), found.of(first)
    exact = mapping.get("numerics", {}).get("reduction") == "exact"
    processes = processes or (fewest_processes(attempt) if exact else attempt.mesh.world)
    same_mesh = not exact and processes == attempt.mesh.world
    mapping = elsewhere(mapping, attempt, processes, same_mesh)
    asked = load(mapping, overrides).machine.precision
    precision = attempt.precision if asked == "auto" else asked
    at = [step for step, one in found.steps.items() if step <= last and (one.gradient or one.state)]
    left_out = [[step, *rows] for step, ranges in found.left_out.items() for rows in ranges]
    return Plan(mapping, list(overrides), found.stage, precision, first, last, left_out=left_out, digests_at=at)


def carry_out(run_dir: Path, plan: Plan, here: Place | None) -> Outcome | None:
    """Do what is planned, on this process's part of the job. The outcome is there on rank 0.

    Damaged if there is no sound checkpoint to begin with (on other ranks than 0 HeardError)."""
    with joined(plan.recipe, here) as job, TerminalProgress(False) as progress:
        agreed = Plan(**job.agree("plan", plan.to_json))
        found = recorded(run_dir, agreed.stage) if job.first else None
        context = Context(agreed.recipe, job, run_dir, 0, progress, "")
        try:
            with context.closing:
                return repeat(context, agreed, found)
        except Damaged as error:  # on all ranks alike, so that the job can be left in order
            damaged = error
    raise damaged if job.first else HeardError(str(damaged))


@contextmanager
def joined(recipe: Recipe, here: Place | None) -> Iterator[Job]:
    """The job of this process, left in order, or with the one sentence of the rank that failed first."""
    machine, well = recipe.machine, False
    begin_job()
    job = join(here, device=machine.device, threads=machine.threads, timeout_s=machine.timeout)
    try:
        yield job
        well = True
    except BaseException as error:
        end = job.settle(error)
        if end is not error:
            raise end from error
        raise
    finally:
        job.leave(meet=well)


def repeat(context: Context, plan: Plan, found: Recorded | None) -> Outcome | None:
    """Restore, do the steps again, compare; it ends at the first step that parts. Every rank calls this; rank 0 has
    `found`, the log, and gets the outcome."""
    job = context.job
    parts = assemble(context, stage_of(context.recipe, plan.stage), plan.precision)
    state = parts.state
    state.digests = digests(parts, at=frozenset(plan.digests_at))
    loaded, notes = restore(context, parts, plan, found)
    began = state.step
    logged = shards(context.run_dir, found, began + 1, plan.last) if found else {}
    compared: list[Compared] = []
    for batches, num_targets in _steps(context, parts, plan):
        result = train_step(state, batches, num_targets, [])
        state.digests.stepped(state.step)
        again = _again(state, result)
        if found is not None:
            compared.append(_compare(context.run_dir, found, logged.get(state.step, {}), again, state))
        if job.all_sum([float(bool(compared and compared[-1].parting))])[0]:
            break
    if found is None:
        return None
    done = found.steps.get(state.step)
    unlike = differences(context, parts, done.attempt) if done else []
    commit = loaded.commit if loaded else None
    return Outcome(plan.stage, plan.first, plan.last, commit, began, job.world, compared, unlike, notes)


def _steps(context: Context, parts: Parts, plan: Plan) -> Iterator[tuple[list[Batch], int]]:
    """This rank's microbatches and the targets of all, step after step, without the rows that the run left out."""
    state = parts.state
    while state.step < plan.last:
        for at, start, stop in plan.left_out:
            known = any(a <= start and stop <= b for a, b in parts.loader.skipped)
            if at == state.step and not known:
                parts.loader.skip(start, stop, parts.schedule.rows(at)[0])
        until = min([at for at, *_ in plan.left_out if at > state.step] + [plan.last])
        with parts.feed(context) as feed:
            for _, batches, num_targets in feed:
                yield batches, num_targets
                if state.step >= until:
                    break


def _again(state: TrainState, result: StepResult) -> Again:
    """The step as it came out, with the microbatches of all ranks."""
    groups, job = state.parallel.groups, state.job
    mine: dict[Part, Shard] = {
        (state.number(index, groups.data_rank), groups.axes.cp.rank): Shard(job.rank, *shard)
        for index, shard in enumerate(result.shards)
        if shard[1] > 0
    }
    everything = {part: shard for one in job.everybody(mine) for part, shard in one.items()}
    taken = state.digests.taken if state.digests and state.digests.taken_at == state.step else {}
    skipped = result.verdict is not Verdict.GO
    return Again(state.step, result.loss, result.grad_norm, skipped, everything, taken)


def _compare(run_dir: Path, found: Recorded, logged: dict[Part, Shard], again: Again, state: TrainState) -> Compared:
    done = found.steps[again.step]
    same_mesh = done.attempt.mesh == state.parallel.groups.degrees
    one = compare(done, logged, {}, again, same_mesh=same_mesh)
    if one.parting is None or not again.digests:
        return one
    rows: dict[Kind, dict[str, int]] = read_digests(run_dir, done.attempt.number, found.stage, again.step)
    return compare(done, logged, rows, again, same_mesh=same_mesh)
