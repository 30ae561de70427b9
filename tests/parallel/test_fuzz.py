"""Every sensible composition equals one process: a fixed set in every run, as many random ones as wanted under `slow`.

A composition that fails is printed as a line. Put that into KNOWN: it stays as a test.
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parallel.compositions import AXES, WORLDS, Composition, coverage, draw, fixed_set, meshes, parse, refusals
from tests.parallel.harness import check

KNOWN = (
    "pp=2 schedule=dualpipev layers=4 recompute=selective",  # torch keeps results for one backward pass
    "dp_replicate=3 pp=2 schedule=zbv layers=4 recompute=selective",
)
"""Lines of compositions that were wrong once."""
LONG_EVERY, RELOAD_EVERY = 8, 4
"""Of the fixed set, one in so many (on few ranks) takes ten steps, the others two; one in so many loads on another mesh
what it saved."""
EXAMPLES = int(os.environ.get("TRUESTEP_FUZZ", "1000"))


def elsewhere(one: Composition, number: int) -> Composition:
    """The same model on another mesh, which takes turns; one process where no other fits."""
    others = [one.on(**mesh) for world in (2, 4, 1) for mesh in meshes(world)]
    fits = [other for other in others if other.degrees != one.degrees and not refusals(other)]
    return fits[number % len(fits)]


@pytest.mark.parametrize("number", range(len(fixed_set())), ids=lambda n: f"{n}-{fixed_set()[n].kind}")
def test_fixed_set(pool, tmp_path, number):
    one = fixed_set()[number]
    other = elsewhere(one, number // RELOAD_EVERY) if number % RELOAD_EVERY == 0 else None
    long = number % LONG_EVERY == 0 and one.world <= 4
    report = check(pool, one, tmp_path, steps=10 if long else 2, elsewhere=other)
    assert not report.faults(), f"{one.line()!r}: {'; '.join(report.faults())}, loaded on {other}"


@pytest.mark.parametrize("line", KNOWN)
def test_known(pool, tmp_path, line):
    one = parse(line)
    report = check(pool, one, tmp_path, steps=10, elsewhere=elsewhere(one, 0))
    assert not report.faults(), f"{line!r}: {'; '.join(report.faults())}"


def test_the_fixed_set_covers_every_pair():
    chosen = fixed_set()
    assert len(chosen) >= 200 and sum(one.world <= 4 for one in chosen) >= 150 and max(WORLDS) == 8
    assert len({one.line() for one in chosen}) == len(chosen)
    counts = {(axis, other): number for axis, other, number in coverage(chosen)}
    for axis in AXES:
        together = {other: counts.get((axis, other), 0) for other in AXES if other != axis}
        print(axis, together)
        assert min(together.values()) >= 5, (axis, together)


def test_lines_are_read_back():
    assert [parse(one.line()) for one in fixed_set()] == list(fixed_set())


@st.composite
def compositions(source) -> Composition:
    """Shrinks towards few ranks, few axes and the plainest options."""

    def pick(values):
        return source(st.sampled_from(list(values)))

    return draw(pick, pick(meshes(pick([1, 2, 3, 4, 6, 8]))))


@pytest.mark.slow
def test_random_compositions(pool, tmp_path_factory):
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(compositions().filter(lambda one: not refusals(one)), st.integers(0, 2**20))
    def equal(one, number):
        other = elsewhere(one, number) if number % RELOAD_EVERY == 0 else None
        report = check(pool, one, tmp_path_factory.mktemp("store"), steps=3, elsewhere=other)
        assert not report.faults(), f"{one.line()!r}: {'; '.join(report.faults())}"

    equal()
