"""Every loss after pretraining, on every mesh and in every layout of its rows, against its formula in one process."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from tests.parallel.compositions import Composition, parse
from tests.parallel.harness import same_bits
from tests.parallel.objectives import OBJECTIVES
from tests.parallel.posttrain import Layout, faults, formula, learn, rows, told_apart, units_of

BASE = "rows=8 size=2 context=32 kv_heads=2 tie=True"
MESHES = {
    "1 x 8 rows": "size=8",
    "4 x 2 rows": "",
    "8 x 1 rows": "size=1",
    "FSDP": "dp_shard=2 size=1",
    "FSDP of 4": "dp_shard=4",
    "DDP": "dp_replicate=2 size=1",
    "HSDP": "dp_replicate=2 dp_shard=2",
    "padding rows": "dp_shard=2 size=3",
    "tensor": "tp=2 vocab=37",
    "pipeline": "pp=2 size=1",
    "context": "cp=2",
    "context of 4 by Ulysses": "cp=2 style=ulysses tp=2",
    "FSDP x tensor x pipeline": "dp_shard=2 tp=2 pp=2",
}
LAYOUTS = {
    "packed": Layout(together=2),
    "more padding": Layout(context=48),
    "other order": Layout(reverse=True),
    "packed in other order": Layout(context=64, together=3, reverse=True),
}
ALONE = Layout()
ALWAYS = ["4 x 2 rows", "FSDP", "tensor", "pipeline", "context"]
"""Meshes that take turns, two a loss, in every test run; the rest is slow."""
WITHOUT_CONTEXT = {name for name, objective in OBJECTIVES.items() if objective.model}
"""Score heads do without context parallelism (a recipe with both is refused)."""


def composition(line: str) -> Composition:
    return parse(f"{BASE} {line}")


def cases(others: Iterable[str], always: Callable[[int, str], bool]) -> list:
    """Every loss with each of `others`; slow where it is not one of those for always, told by the loss's number."""
    return [
        pytest.param(name, other, marks=() if always(number, other) else pytest.mark.slow)
        for number, name in enumerate(OBJECTIVES)
        for other in others
        if not (name in WITHOUT_CONTEXT and "context" in other)
    ]


def in_turn(number: int, mesh: str) -> bool:
    return mesh in (ALWAYS[number % len(ALWAYS)], ALWAYS[(number + 2) % len(ALWAYS)])


@pytest.mark.parametrize("name, mesh", cases(MESHES, in_turn))
def test_c13_mesh_and_accumulation_change_no_loss(pool, name, mesh):
    """Properties 1, 22, 27, 28. Units share rows, so that a row's sums do not help."""
    one = composition(MESHES[mesh])
    batch = rows(one, name, Layout(together=2))
    wanted = formula(one, OBJECTIVES[name], units_of(one, OBJECTIVES[name]))
    found = learn(pool, replace(one, rows=len(batch.tokens_BT)), name, batch)
    assert not faults(found, wanted)
    plain = composition(f"vocab={one.vocab} size=1 rows={len(batch.tokens_BT)}")
    assert not told_apart(found, learn(pool, plain, name, batch))


@pytest.mark.parametrize("name, layout", cases(LAYOUTS, lambda number, layout: layout == "packed in other order"))
def test_c13_packing_padding_and_order_of_rows_change_no_loss(pool, name, layout):
    """Properties 5, 12, 16. The formula sees each sample alone."""
    here = LAYOUTS[layout]
    one = composition(f"context={here.context} size=1")
    batch = rows(one, name, here)
    wanted = formula(one, OBJECTIVES[name], units_of(one, OBJECTIVES[name]))
    assert not faults(learn(pool, replace(one, rows=len(batch.tokens_BT)), name, batch), wanted)


DATA_RANKS = ("dp_shard=2", "dp_replicate=2", "dp_replicate=2 dp_shard=2", "dp_shard=4", "pp=2")


@pytest.mark.parametrize("name, line", cases(DATA_RANKS, lambda number, line: DATA_RANKS.index(line) == number % 5))
def test_exact_reduction_is_bitwise_over_ranks(pool, name, line):
    one = composition(f"size=1 precision=float32 {line}")
    batch = rows(one, name, Layout(together=2))
    one = replace(one, rows=len(batch.tokens_BT))
    alone, found = (learn(pool, where, name, batch, "exact") for where in (one.on(), one))
    assert (found.loss, found.norm, found.metrics) == (alone.loss, alone.norm, alone.metrics)
    assert same_bits(found.gradients, alone.gradients)


def test_the_harness_finds_a_loss_that_counts_rows_instead_of_units():
    """The harness itself: a factor, one element of a gradient, a formula that is another."""
    one = composition("")
    units = units_of(one, OBJECTIVES["sft by token"])
    wanted = formula(one, OBJECTIVES["sft by token"], units)
    assert not faults(wanted, wanted)
    name = "blocks.0.mlp.up.weight"
    off = wanted.gradients[name].clone()
    off[3, 2] += 2e-9 * off.abs().max()
    assert faults(replace(wanted, gradients=wanted.gradients | {name: off}), wanted)
    assert faults(replace(wanted, loss=wanted.loss * 2), wanted)
    assert faults(formula(one, OBJECTIVES["sft by sample"], units), wanted)
    assert faults(replace(wanted, gradients={n: torch.zeros_like(g) for n, g in wanted.gradients.items()}), wanted)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_are_told_apart(name):
    """No two of them have the same gradient on the same units, so that one cannot pass for another."""
    one, own = composition(""), OBJECTIVES[name]
    wanted = formula(one, own, units_of(one, own))
    for other, objective in OBJECTIVES.items():
        if other != name and objective.units == own.units and objective.model == own.model:
            assert faults(formula(one, objective, units_of(one, objective)), wanted), other
