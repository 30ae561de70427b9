"""A stage of a run built once more, on other processes, from what the run left: to do steps again or to try a restore.

Nothing of the run is written to.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from truestep.checkpoint.catalogue import list_committed
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import Loaded, Mismatch, load
from truestep.checkpoint.manifest import FINGERPRINTS
from truestep.checkpoint.marks import quarantined
from truestep.checkpoint.of_run import checkpoint_place
from truestep.checkpoint.sealed import Committed
from truestep.errors import CheckpointError
from truestep.numerics.fingerprint import combined
from truestep.numerics.pieces import natural
from truestep.recipe.degrees import Degrees
from truestep.recipe.digests import bits_fields, changed
from truestep.recipe.load import load as load_recipe
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import Stage
from truestep.stages.assemble import Parts
from truestep.stages.context import Context
from truestep.stages.recorded import Attempt, Recorded
from truestep.stages.resume import bits_now
from truestep.storage.interface import Store
from truestep.storage.store import open_store

AXES = ("tp", "cp", "ep")
"""Axes of the mesh whose degrees change how a microbatch is computed."""
SETTLED = ("processes", "machine.threads", "machine.precision", "machine.device", "version of python")
"""Fields that are compared as what came of them, or that change no bit."""


class Damaged(CheckpointError):
    """None of the checkpoints to begin with is what it should be."""


@dataclass(frozen=True)
class Plan:
    """What all ranks that do it have to agree on, as JSON. Steps [first, last] are numbered as in the log; there may be
    none. `sources`: keys of the commits to try, in this order; `initial`: whether to begin with first weights else.
    `left_out`: [step, row, row] as in Recorded; `digests_at`: the steps whose digests the log has."""

    mapping: dict[str, Any]
    overrides: list[str]
    stage: str
    precision: str
    first: int
    last: int
    sources: list[str] = field(default_factory=list)
    initial: bool = False
    left_out: list[list[int]] = field(default_factory=list)
    digests_at: list[int] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.mapping, self.overrides)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fewest_processes(attempt: Attempt) -> int:
    """The fewest that compute a microbatch as an attempt did; more of them are data-parallel."""
    return max(attempt.mesh.tp * attempt.mesh.cp, attempt.mesh.ep)


def elsewhere(mapping: dict[str, Any], attempt: Attempt, processes: int, same_mesh: bool) -> dict[str, Any]:
    """The recipe as an attempt computed with it, on so many processes here: on the same mesh, or data-parallel."""
    mesh, machine = asdict(attempt.mesh), dict(mapping.get("machine", {}))
    for name in ("elastic", "profile_steps", "timeout"):
        machine.pop(name, None)
    if not same_mesh:
        mesh |= {"dp_replicate": 1, "dp_shard": "auto", "pp": 1}
    if mesh["pp"] == 1:
        machine.pop("pipeline", None)
    bits = {"threads": attempt.bits.get("threads", 1), "precision": attempt.precision}
    return _with_bits(mapping | {"machine": machine | bits | {"mesh": mesh, "processes": processes}}, attempt)


def _with_bits(mapping: dict[str, Any], attempt: Attempt) -> dict[str, Any]:
    """The fields of [machine] that the attempt had otherwise than the recipe that the directory was made with."""
    mine = bits_fields(load_recipe(mapping))
    for path, value in attempt.bits.items():
        section, _, name = path.partition(".")
        if section == "machine" and "." not in name and path not in SETTLED and mine.get(path) != value:
            mapping["machine"][name] = value
    return mapping


def candidates(store: Store, found: Recorded, at_most: int) -> list[Committed]:
    """Checkpoints of at most that many steps that the recorded steps stand on, newest first; quarantined ones and those
    of steps that were given up are left out."""
    commits = [c for c in trusted(store) if c.step <= at_most]
    return sorted((c for c in commits if c.step == 0 or c.step in found.steps), reverse=True)


def trusted(store: Store) -> list[Committed]:
    """Checkpoints that are not quarantined, be their bytes as they may."""
    bad = quarantined(store)
    return [committed for committed in list_committed(store) if committed.key not in bad]


def open_checkpoints_of(recipe: Recipe, run_dir: Path, stage: str) -> Store:
    return open_store(checkpoint_place(recipe, run_dir, stage), recipe.checkpoint.storage_options)


def stage_of(recipe: Recipe, name: str) -> Stage:
    return next(stage for stage in recipe.stages if stage.name == name)


def restore(context: Context, parts: Parts, plan: Plan, found: Recorded | None) -> tuple[Loaded | None, list[str]]:
    """Fill the state from the first source that is sound, and whose tensors are what was in memory when it was saved.
    Returns it (None for first weights), and why others were passed over. `found`: the log, on rank 0. Collective.

    Damaged, on all ranks, if there is none; Mismatch if one does not fit what this program builds."""
    job, state, notes = context.job, parts.state, list[str]()
    assert state.digests is not None
    store = open_checkpoints_of(context.recipe, context.run_dir, plan.stage)
    tensors = state.tensors()
    for key in plan.sources:
        committed = Committed.parse(key)
        assert committed is not None
        deadline_s = context.recipe.checkpoint.deadline
        group = Group.of(job.store, job.rank, job.world, deadline_s, "again", job.lost)
        try:
            loaded = load(store, committed, tensors, group=group)
            state.restore(loaded.extra)
            parts.loader.restore(state.loader)
            problem = _damage(state.digests.state(state.step), loaded.facts.get(FINGERPRINTS), found, state.step)
            problem = job.agree(f"sound/{key}", lambda problem=problem: problem)
            if problem:
                raise CheckpointError(f"{store.url}/{key}: {problem}")
            return loaded, notes
        except Mismatch:
            raise
        except CheckpointError as error:
            notes.append(f"passed over the checkpoint of step {committed.step}: {error}")
    if not plan.initial or state.step:
        raise Damaged("; ".join(notes) or f"{store.url}: holds no checkpoint to begin with")
    return None, notes


def _damage(here: dict[str, int], saved: dict[str, int] | None, found: Recorded | None, step: int) -> str | None:
    """What a state that was loaded has against it. A checkpoint of an older version says nothing of its tensors."""
    if saved is None:
        return None
    other = sorted((name for name in saved.keys() | here.keys() if here.get(name) != saved.get(name)), key=natural)
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        return f"{other[0]}{more} came back with other bits than were in memory at the save"
    done = found.steps.get(step) if found else None
    if done is not None and done.state not in (None, combined(saved, saved.values())):
        return f"its state is not the one that the log has of step {step}"
    return None


def differences(context: Context, parts: Parts, attempt: Attempt) -> list[str]:
    """What the last bits depend on and is otherwise here than in an attempt, each as "field: there → here"."""
    if not attempt.bits:
        return ["what bits depend on was not recorded"]
    exact = context.recipe.numerics.reduction == "exact"
    there = _fields(attempt.bits, attempt.mesh, attempt.precision, exact)
    here = _fields(bits_now(context), parts.state.parallel.groups.degrees, parts.precision, exact)
    found = changed(there, here)
    if not exact and context.job.device.type == "cuda":
        found.append('numerics.reduction: "fast" takes CUDA kernels that do not repeat themselves')
    return found


def _fields(bits: dict[str, Any], mesh: Degrees, precision: str, exact: bool) -> dict[str, Any]:
    """Those that count, with what came of them in place of what was asked for."""
    kept = {path: value for path, value in bits.items() if not path.startswith("machine.mesh.") and path not in SETTLED}
    degrees = {f"mesh.{axis}": degree for axis, degree in asdict(mesh).items() if axis in AXES or not exact}
    experts = {"data-parallel degree of experts": mesh.edp * mesh.dp_replicate} if mesh.ep > 1 else {}
    return kept | {"precision": precision} | degrees | experts
