"""What a model and its rows allow of a mesh: what is wrong with one, and the nearest that is right.

`Limits` holds what must be respected, `faults` says what a mesh violates, and the mesh with the least change of degrees
that violates nothing is searched for."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd, inf, log2, prod

from truestep.errors import UserError
from truestep.recipe.degrees import AXES, Degrees
from truestep.recipe.effect import unused
from truestep.recipe.machine import Machine, Mesh
from truestep.recipe.model import ModelSection
from truestep.recipe.problems import Problem
from truestep.recipe.recipe import Recipe

Asked = Mapping[str, int | None]
"""Degrees by axis; None where a degree is open ("auto")."""
MOST_PROCESSES = 2**24
_WEIGHTS = {"dp_shard": 1.0, "dp_replicate": 1.1, "ep": 1.5, "cp": 1.5, "pp": 1.5, "tp": 1.5}
"""What doubling or halving a degree costs in the search: another number of replicas changes the least."""


@dataclass(frozen=True)
class Limits:
    """What a mesh must respect. None: not known (a model that was not read yet sets no limit)."""

    own_module: bool = False
    num_heads: int | None = None
    num_layers: int | None = None
    num_experts: int | None = None
    contexts: tuple[int, ...] = ()
    machine: Machine = field(default_factory=Machine)

    @classmethod
    def of(cls, recipe: Recipe, model: ModelSection | None = None) -> "Limits":
        """Those of a recipe. `model`: one that a stage starts from; by default the recipe's own."""
        model = model or recipe.model
        sizes = {}
        if model is not None and model.module is None:
            experts = model.moe.num_experts if model.moe is not None else 0
            sizes = {"num_heads": model.num_heads, "num_layers": model.num_layers, "num_experts": experts}
        contexts = tuple(dict.fromkeys(stage.context for stage in recipe.stages))
        own = model is not None and model.module is not None
        return cls(own_module=own, contexts=contexts, machine=recipe.machine, **sizes)

    def stages(self, pp: int) -> int:
        """Pipeline stages on `pp` ranks."""
        return pp * self.machine.pipeline.stages_on_a_rank

    def parts(self, cp: int, tp: int) -> int:
        """Equal parts that a row is cut into."""
        return cp * tp * (self.machine.context.parts_per_rank if cp > 1 else 1)


def asked_of(mesh: Mesh) -> dict[str, int | None]:
    """The degrees that a mesh asks for."""
    return {axis: None if degree == "auto" else degree for axis, degree in mesh}


def faults(asked: Asked, limits: Limits) -> Iterator[str]:
    """What is wrong with a mesh, each as words that follow "has". What rests on an open degree is not judged."""
    pp, cp, tp, ep = (asked[axis] or 1 for axis in ("pp", "cp", "tp", "ep"))
    split = [f"{axis} = {asked[axis]}" for axis in ("pp", "cp", "tp", "ep") if (asked[axis] or 1) > 1]
    if limits.own_module and split:
        yield f"{', '.join(split)}, but a model of your own can be split over dp_replicate and dp_shard only"
    if limits.own_module:
        return
    if limits.num_heads and tp > limits.num_heads:
        yield f"tp = {tp}, more than model.num_heads {limits.num_heads}"
    if pp > 1 and limits.num_layers and limits.stages(pp) > limits.num_layers:
        each = limits.machine.pipeline.stages_on_a_rank
        many = f" with {each} pipeline stages a rank" if each > 1 else ""
        yield f"pp = {pp}{many}, more than model.num_layers {limits.num_layers}"
    yield from _row_faults(cp, tp, limits)
    yield from _expert_faults(asked, ep, limits)


def _row_faults(cp: int, tp: int, limits: Limits) -> Iterator[str]:
    parts, style = limits.parts(cp, tp), limits.machine.context.style
    for context in limits.contexts:
        if context % parts:
            halves = " · 2 (machine.context.balance)" if parts > cp * tp else ""
            yield f"cp · tp{halves} = {parts}, which does not divide the context of {context} tokens"
    if cp > 1 and style == "ulysses" and limits.num_heads and limits.num_heads % (cp * tp):
        yield f'cp · tp = {cp * tp}, which does not divide model.num_heads {limits.num_heads} (style = "ulysses")'


def _expert_faults(asked: Asked, ep: int, limits: Limits) -> Iterator[str]:
    inner = [size for axis in ("dp_shard", "cp", "tp") if (size := asked[axis]) is not None]
    if ep > 1 and limits.num_experts == 0:
        yield f"ep = {ep}, but the model has no experts"
    elif limits.num_experts and limits.num_experts % ep:
        yield f"ep = {ep}, which does not divide model.moe.num_experts {limits.num_experts}"
    elif len(inner) == 3 and prod(inner) % ep:
        yield f"ep = {ep}, which does not divide dp_shard · cp · tp = {prod(inner)}"


def fill(asked: Asked, limits: Limits, world: int) -> dict[str, int] | None:
    """The degrees with the open one filled in; None if they do not multiply to the world. An open ep is the largest
    degree that experts and ranks allow."""
    known = prod(asked[axis] or 1 for axis in AXES)
    if (world % known) if None in [asked[axis] for axis in AXES] else (known != world):
        return None
    full = {axis: asked[axis] or world // known for axis in AXES}
    inner = full["dp_shard"] * full["cp"] * full["tp"]
    return full | {"ep": asked["ep"] or (gcd(inner, limits.num_experts) if limits.num_experts else 1)}


def refusal(mesh: Mesh, limits: Limits, world: int | None) -> str | None:
    """The words that follow "machine.mesh" if it cannot be, with the nearest mesh that can; None where it can."""
    asked = asked_of(mesh)
    full = asked if world is None else fill(asked, limits, world)
    wrong = ", and ".join(faults(full, limits)) if full else ""
    if full and not wrong:
        return None
    found = _Search(asked, limits, world).nearest()
    changed = [
        axis for axis, degree in asked.items() if found[axis] != degree and (degree or found[axis] not in (None, 1))
    ]
    remedy = ", ".join(f"{axis} = {found[axis]}" for axis in changed)
    idle = _idle_with(found, limits)
    remedy += f", without {' and '.join(idle)}" if idle else ""
    if wrong:
        of_world = f" of {world} processes" if world else ""
        return f"has {wrong}; the nearest mesh{of_world} that fits is {remedy}."
    shown = ", ".join(f"{axis} = {degree}" for axis, degree in mesh if degree != 1 or axis in mesh.model_fields_set)
    return f"({shown}) does not fit {world} processes; the nearest mesh that does is {remedy}."


def _idle_with(found: Asked, limits: Limits) -> list[str]:
    """Fields of [machine] that were given and would have no effect, or no sense, on the mesh that was found."""
    machine = limits.machine
    mesh = Mesh.model_validate({axis: degree or "auto" for axis, degree in found.items()})
    changed = machine.model_copy(update={"mesh": mesh})
    given = [name for name in unused(changed) if name in machine.model_fields_set and name not in unused(machine)]
    names = [f"machine.{name}" for name in dict.fromkeys(given)]
    split, pp = machine.pipeline.split, found["pp"] or 1
    if isinstance(split, list) and pp > 1 and len(split) != limits.stages(pp):
        names.append("machine.pipeline.split")
    return names


@dataclass
class _Search:
    """The valid mesh that differs least from what was asked: the least sum over axes of |log2(new / old)|, weighted.
    With a `world` its degrees multiply to that; without one an open degree stays open. There always is one, since
    nothing limits data parallelism."""

    asked: Asked
    limits: Limits
    world: int | None
    best: tuple[float, tuple[int, ...]] = (inf, ())
    found: dict[str, int | None] = field(default_factory=dict)

    def nearest(self) -> dict[str, int | None]:
        """Degrees of all axes."""
        self._grow({}, ["pp", "cp", "tp", "dp_replicate", "dp_shard", "ep"], self.world, 0.0)
        return self.found

    def _grow(self, mesh: dict[str, int | None], axes: list[str], left: int | None, cost: float) -> None:
        """Choose the next of `axes`, whose product with those that follow must be `left`."""
        if cost > self.best[0]:
            return
        if not axes:
            key = (cost, tuple(mesh[axis] or 0 for axis in self.asked))
            if key < self.best:
                self.best, self.found = key, mesh
            return
        axis, *later = axes
        for degree in self._candidates(axis, mesh, left):
            chosen = mesh | {axis: degree}
            if not any(True for _ in faults(chosen | dict.fromkeys(later), self.limits)):
                more = _WEIGHTS[axis] * abs(log2(degree / (self.asked[axis] or degree))) if degree else 0.0
                inner = left if left is None or degree is None or axis == "ep" else left // degree
                self._grow(chosen, later, inner, cost + more)

    def _candidates(self, axis: str, mesh: Asked, left: int | None) -> Iterable[int | None]:
        """Degrees to try for an axis, the nearest first."""
        asked, limits = self.asked[axis], self.limits
        if axis == "ep" and left is not None:
            ranks = prod(mesh[inner] or 1 for inner in ("dp_shard", "cp", "tp"))
            open_ep = gcd(ranks, limits.num_experts) if limits.num_experts else 1
            return _near(asked, _divisors(ranks)) if asked else [open_ep]
        if left is not None:
            return [left] if axis == "dp_shard" else _near(asked or 1, _divisors(left))
        if asked is None or axis in ("dp_replicate", "dp_shard"):
            return [asked]
        if axis == "pp":
            deepest = (limits.num_layers or asked) // limits.stages(1)
            return _near(asked, {1, asked, max(1, deepest)})
        whole = limits.num_experts if axis == "ep" else gcd(*limits.contexts)
        return _near(asked, {1, asked, *_divisors(whole or 1)})


def _near(degree: int, candidates: Iterable[int]) -> list[int]:
    return sorted(candidates, key=lambda other: (abs(log2(other / degree)), other))


def _divisors(number: int) -> list[int]:
    """Divisors up to 2^16 and their counterparts: all that a mesh can have of a number of ranks, tokens or experts."""
    small = [d for d in range(1, min(int(number**0.5), 2**16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def degrees(mesh: Mesh, limits: Limits, world: int) -> Degrees:
    """The mesh on `world` processes, its open degree filled in. Raises UserError with the nearest mesh that can be."""
    wrong = refusal(mesh, limits, world)
    if wrong is not None:
        raise UserError(f"machine.mesh {wrong}")
    full = fill(asked_of(mesh), limits, world)
    assert full is not None
    return Degrees(**full)


def mesh_problems(recipe: Recipe) -> Iterator[Problem]:
    """Problems of [machine.mesh] and [machine.pipeline] against the model, as far as the recipe tells them."""
    machine, asked = recipe.machine, asked_of(recipe.machine.mesh)
    open_axes = [axis for axis, degree in asked.items() if degree is None]
    if len(open_axes) > 1:
        names = ", ".join(open_axes)
        text = f'has several degrees that are "auto" ({names}); only one can be what is left: set the others.'
        yield Problem("machine.mesh", text)
        return
    world = None if set(open_axes) & set(AXES) else prod(asked[axis] or 1 for axis in AXES)
    if max(prod(degree or 1 for degree in asked.values()), 1) > MOST_PROCESSES:
        yield Problem(
            "machine.mesh", f"has degrees of more than {MOST_PROCESSES:,} processes in all; make them smaller."
        )
        return
    limits = Limits.of(recipe)
    contexts = [f"stages.{stage.name}.context" for stage in recipe.stages]
    reads = ("machine.pipeline", "machine.context", "model", *contexts)
    wrong = refusal(machine.mesh, limits, world)
    if wrong is not None:
        yield Problem("machine.mesh", wrong, reads)
    elif isinstance(machine.pipeline.split, list) and asked["pp"]:
        yield from _split(machine.pipeline.split, limits.stages(asked["pp"]), limits.num_layers)


def _split(split: list[int], stages: int, layers: int | None) -> Iterator[Problem]:
    total = layers or sum(split)
    if len(split) == stages and sum(split) == total:
        return
    even = [(i + 1) * total // stages - i * total // stages for i in range(stages)]
    yield Problem(
        "machine.pipeline.split",
        f"has {len(split)} numbers that add up to {sum(split)}, but there are {stages} pipeline stages and {total} "
        f'layers; the nearest is "auto"' + (f", or {even}." if stages <= 16 else "."),
        ("machine.mesh", "machine.pipeline", "model.num_layers"),
    )
