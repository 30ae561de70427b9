"""Compositions: a mesh, a tiny model and a batch, as one frozen value that is drawn, printed as a line and read back.

The first value of every choice is the plainest, and the default: what shrinks, shrinks to a short line.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, cycle, islice, product
from typing import Any

from truestep.recipe.check_mesh import Limits, asked_of, faults
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import FOLDED, LOOPED, Context, Machine, Mesh, Pipeline
from truestep.recipe.mla import Mla
from truestep.recipe.model import ModelSection
from truestep.recipe.moe import Moe

AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"scoring": "softmax", "balance": "aux"},
    "qwen3": {"scoring": "softmax", "balance": "aux", "counts": "pre-pass", "normalise": False, "z_loss": 1e-2},
    "deepseek": {
        "scoring": "sigmoid",
        "balance": "bias",
        "groups": 2,
        "shared_size": 10,
        "dense_layers": 1,
        "scale": 2.5,
        "bias_rate": 0.02,
    },
}
"""Kinds of routing. The balance loss weighs a hundred times what it does in practice, so that a wrong one shows."""
LATENT: dict[str, Mla | None] = {
    "none": None,
    "plain": Mla(kv_rank=6, nope_dim=4, rope_dim=4, v_dim=6),
    "queries": Mla(q_rank=10, kv_rank=6, nope_dim=6, rope_dim=2, v_dim=4),
}
"""Kinds of multi-head latent attention."""


@dataclass(frozen=True)
class Composition:
    """`window`: every second layer is a sliding one of that many tokens. `rows` of the global batch come in
    microbatches of `size`; the last is filled up with rows of padding. `seed` chooses weights and data."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 2
    style: str = "all-gather"
    balance: bool = True
    layers: int = 2
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    vocab: int = 32
    inner: int = 24
    tie: bool = False
    qk_norm: str = "none"
    placement: str = "pre"
    offset: bool = False
    bias: str = "none"
    window: int = 0
    softcap: bool = False
    moe: str = "none"
    experts: int = 4
    mla: str = "none"
    rows: int = 6
    size: int = 2
    context: int = 16
    documents: bool = False
    z_loss: bool = False
    recompute: str = "none"
    reshard: bool = True
    precision: str = "float64"
    optimizer: str = "sgd"
    seed: int = 0

    @property
    def world(self) -> int:
        return self.degrees.world

    @property
    def degrees(self) -> Degrees:
        return Degrees(**{axis: getattr(self, axis) for axis in AXES})

    @property
    def active(self) -> list[str]:
        """Axes of more than one rank."""
        return [axis for axis in AXES if getattr(self, axis) > 1]

    @property
    def kind(self) -> str:
        """The class under which the parity table counts it."""
        return " x ".join(self.active) or "one rank"

    def on(self, **degrees: int) -> "Composition":
        """The same model and data on another mesh."""
        return replace(self, **(dict.fromkeys(AXES, 1) | {"schedule": "1f1b", "style": "all-gather"} | degrees))

    def section(self) -> ModelSection:
        biased = {"none": (False, False, False), "qkv": (True, False, False), "all": (True, True, True)}[self.bias]
        return ModelSection(
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.inner,
            tie_embeddings=self.tie,
            qk_norm=self.qk_norm,
            norm_placement=self.placement,
            norm_offset=self.offset,
            attention_bias=biased[0],
            attention_out_bias=biased[1],
            mlp_bias=biased[2],
            sliding_window=self.window or None,
            full_attention_every=2 if self.window else 0,
            attention_softcap=5.0 if self.softcap else None,
            logit_softcap=4.0 if self.softcap else None,
            moe=self._moe(),
            mla=LATENT[self.mla],
        ).resolved(self.vocab)

    def _moe(self) -> Moe | None:
        if self.moe == "none":
            return None
        return Moe(num_experts=self.experts, top_k=2, expert_size=12, **EXPERTS[self.moe], balance_coefficient=1.0)

    def machine(self) -> Machine:
        return Machine(
            mesh=Mesh(**{axis: getattr(self, axis) for axis in AXES}),
            pipeline=Pipeline(schedule=self.schedule, stages_per_rank=self.stages_per_rank),
            context=Context(style=self.style, balance=self.balance),
            microbatch_rows=self.size,
            head_chunk_tokens=7,
            activation_checkpointing=self.recompute,
            reshard_after_forward=self.reshard,
        )

    def line(self) -> str:
        """What differs from the plainest, as "field=value" words; `parse` reads it back."""
        plain = Composition()
        return " ".join(
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        )

    def __str__(self) -> str:
        return self.line() or "plain"


def parse(line: str) -> Composition:
    """The composition of a line."""
    readers = {bool: lambda text: {"True": True, "False": False}[text], int: int, str: str}
    kinds = {f.name: type(f.default) for f in fields(Composition)}
    words = [word.split("=", 1) for word in line.split()]
    return Composition(**{name: readers[kinds[name]](text) for name, text in words})


@cache
def meshes(world: int) -> list[dict[str, int]]:
    """All meshes of `world` ranks, those with few axes first; the expert axis takes any divisor of what it folds."""
    found = []
    for sizes in product(range(1, world + 1), repeat=5):
        mesh = dict(zip(AXES, sizes))
        if Degrees(**mesh).world == world:
            inner = mesh["dp_shard"] * mesh["cp"] * mesh["tp"]
            found += [mesh | {"ep": ep} for ep in range(1, inner + 1) if inner % ep == 0]
    return sorted(found, key=lambda mesh: sum(degree > 1 for degree in mesh.values()))


Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of a sequence: a random generator's `choice`, or hypothesis (which shrinks towards the first)."""


def draw(pick: Pick, mesh: dict[str, int]) -> Composition:
    """Any composition on a mesh, sensible or not: `refusals` decides."""
    pipeline, context, model = {}, {}, {}
    if mesh["pp"] > 1:
        pipeline["schedule"] = pick(["1f1b", "gpipe", *LOOPED, *FOLDED])
    if mesh["cp"] > 1:
        context = {"style": pick(["all-gather", "ulysses"]), "balance": pick([True, False])}
    model["moe"] = pick(["none", "none", "none", *EXPERTS] if mesh["ep"] == 1 else [*EXPERTS])
    model["experts"] = pick([4, 6, 8]) if model["moe"] != "none" else 4
    model["mla"] = pick(["none", "none", "none", *LATENT])
    heads, kv_heads = pick([(4, 2), (4, 1), (4, 4), (8, 4), (6, 3), (3, 1)])
    if model["mla"] == "none":
        model |= {"kv_heads": kv_heads, "qk_norm": pick(["none", "head", "full"])}
    parts = mesh["pp"] * Pipeline(**pipeline).stages_on_a_rank
    return Composition(
        **mesh,
        **pipeline,
        **context,
        **model,
        layers=max(2, parts) + (pick([0, 0, 1]) if parts < 4 else 0),
        heads=heads,
        vocab=pick([32, 37, 50]),
        inner=pick([24, 20, 22]),
        tie=pick([False, True]),
        placement=pick(["pre", "post", "sandwich"]),
        offset=pick([False, False, True]),
        bias=pick(["none", "qkv", "all"]),
        window=pick([0, 5]),
        softcap=pick([False, False, True]),
        rows=pick([6, 5]),
        size=pick([2, 3]),
        context=pick([16, 24]),
        documents=pick([False, True]),
        z_loss=pick([False, True]),
        recompute=pick(["none", "full", "selective"]),
        reshard=pick([True, True, False]),
        precision=pick(["float64", "float64", "float64", "float32"]),
        optimizer=pick(["sgd", "sgd", "adamw"]),
    )


def refusals(one: Composition) -> list[str]:
    """Why the recipe's own check refuses its mesh; empty where it does not."""
    machine = one.machine()
    experts = one.experts if one.moe != "none" else 0
    limits = Limits(False, one.heads, one.layers, experts, (one.context,), machine)
    return list(faults(asked_of(machine.mesh), limits))


_SIZES = ("seed", "layers", "hidden", "head_dim", "stages_per_rank")
_OF_AXIS = {"schedule": "pp", "style": "cp", "balance": "cp"}


def features(one: Composition) -> frozenset[str]:
    """What a composition has to show, axes by being there at all."""
    options = [f.name for f in fields(one) if f.name not in (*AXES, *_SIZES)]
    shown = [name for name in options if getattr(one, _OF_AXIS.get(name, ""), 2) > 1]
    return frozenset([*one.active, *(f"{name}={getattr(one, name)}" for name in shown)])


def pairs(one: Composition) -> set[frozenset[str]]:
    """Pairs of its features."""
    return {frozenset(pair) for pair in combinations(sorted(features(one)), 2)}


WORLDS = {1: 8, 2: 56, 3: 12, 4: 96, 6: 6, 8: 26}
"""How many of the fixed set run on how many ranks."""
CANDIDATES = 12


@cache
def fixed_set() -> tuple[Composition, ...]:
    """The compositions that every test run tries: the same ones everywhere. Sets of axes take turns; each composition
    is the one of CANDIDATES random ones whose pairs of features were met least so far."""
    source = random.Random(20)
    chosen: list[Composition] = []
    met: Counter[frozenset[str]] = Counter()
    for world, number in WORLDS.items():
        kinds = by_kind(world)
        for kind in islice(cycle(source.sample(list(kinds), len(kinds))), number):
            candidates = [_sensible(source, kinds[kind]) for _ in range(CANDIDATES)]
            best = max(candidates, key=lambda one: sum(1 / (1 + met[pair]) ** 2 for pair in pairs(one)))
            met.update(pairs(best))
            chosen.append(replace(best, seed=len(chosen)))
    return tuple(chosen)


def by_kind(world: int) -> dict[str, list[dict[str, int]]]:
    """Meshes of `world` ranks by the axes that they have."""
    found: dict[str, list[dict[str, int]]] = {}
    for mesh in meshes(world):
        found.setdefault(Composition(**mesh).kind, []).append(mesh)
    return found


def _sensible(source: random.Random, among: list[dict[str, int]]) -> Composition:
    while True:
        one = draw(source.choice, source.choice(among))
        if not refusals(one):
            return one


def coverage(compositions: Sequence[Composition]) -> Iterator[tuple[str, str, int]]:
    """(axis, other axis or feature, how many compositions have both), axes first."""
    found: dict[tuple[str, str], int] = {}
    for one in compositions:
        for axis in one.active:
            for other in features(one) - {axis}:
                found[axis, other] = found.get((axis, other), 0) + 1
    for (axis, other), number in sorted(found.items(), key=lambda item: (item[0][1] not in AXES, item[0])):
        yield axis, other, number
