"""Any history of attempts ends with the model of a run that nothing happened to, every row trained on once an epoch."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.stages.histories import LAYOUTS, History, Life, Theatre, Undisturbed, check, histories, undisturbed
from tests.stages.history_ranks import Strike
from truestep.data import loader as loaders
from truestep.data.loader import Loader, Prefetcher

MEMORY = Path("/dev/shm")


class Cast:
    """A theatre with the runs that nothing happens to, each carried out once."""

    def __init__(self, folder: Path):
        self.theatre = Theatre(folder)
        self._made: dict[tuple[str, str, int], Undisturbed] = {}
        self._number = 0

    def alone(self, history: History, layout: dict[str, int]) -> Undisturbed:
        key = history.reduction, history.bad, LAYOUTS.index(layout)
        if key not in self._made:
            calm = History(history.reduction, history.bad, (Life(layout, saves=frozenset({2})),))
            lived = self.theatre.live(calm, "calm-" + "-".join(map(str, key)).replace(" ", "-"))
            assert lived.outcomes == ["finished"]
            self._made[key] = undisturbed(lived)
        return self._made[key]

    def play(self, history: History) -> None:
        self._number += 1
        lived = self.theatre.live(history, f"history-{self._number}")
        layouts = [life.layout for life in history.lives]
        same = all(layout == layouts[0] for layout in layouts)
        fast = history.reduction == "fast"
        check(lived, history, self.alone(history, {}), self.alone(history, layouts[0]) if same and fast else None)


@pytest.fixture(scope="module")
def cast() -> Iterator[Cast]:
    shared = MEMORY if os.access(MEMORY, os.W_OK) else None  # what counts here is not the disk's pace
    with tempfile.TemporaryDirectory(prefix="truestep-histories-", dir=shared) as folder:
        made = Cast(Path(folder))
        yield made
        made.theatre.ranks.close()
        print("\n" + ", ".join(f"{count} {name}" for name, count in sorted(made.theatre.counts.items())))


_settings = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=10, derandomize=True, phases=[Phase.generate], **_settings)
@given(history=histories())
def test_a_history_ends_as_if_nothing_had_happened(cast: Cast, history: History):
    cast.play(history)


@pytest.mark.slow
@settings(max_examples=500, phases=[Phase.generate], **_settings)
@given(history=histories())
def test_500_histories_end_as_if_nothing_had_happened(cast: Cast, history: History):
    cast.play(history)


def _of_own_share(real: Callable) -> Callable:
    """The divisor: what this rank has, times the ranks."""

    def load(self: Prefetcher, step: int) -> Any:
        batches, _ = real(self, step)
        return batches, sum(batch.num_targets for batch in batches) * self._part[1]

    return load


def _read_ahead(real: Callable) -> Callable:
    """A resume goes on behind what was read ahead."""

    def begin(self: Prefetcher, *part: Any, **options: Any) -> None:
        *others, depth, step = part
        real(self, *others, depth, step + depth if step else step, **options)

    return begin


MUTATIONS: dict[str, tuple[Any, str, Callable]] = {
    "the divisor of another world": (Prefetcher, "_load", _of_own_share),
    "the cursor counts what was fetched": (Prefetcher, "__init__", _read_ahead),
    "what is left out is forgotten": (
        Loader,
        "state",
        lambda real: lambda self, next_row: real(self, next_row) | {"skipped": []},
    ),
    "every epoch in one order": (
        loaders,
        "Permutation",
        lambda real: lambda n, seed, epoch, stream=0: real(n, seed, 0, stream),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_loader_is_found_in_a_run(name: str, cast: Cast, monkeypatch: pytest.MonkeyPatch):
    """Of processes forked with the fault in them; the runs that nothing happens to are sound."""
    owner, attribute, broken = MUTATIONS[name]
    bad, step = ("two bad steps", 11) if "left out" in name else ("no bad rows", 7)  # 11: the sixth, once more
    lives = (Life({"dp_replicate": 2}, Strike("stop", 0, "step", step)), Life({"dp_shard": 3}))
    history = History("exact", bad, lives)
    reference = cast.alone(history, {})
    monkeypatch.setattr(owner, attribute, broken(vars(owner)[attribute]))
    theatre = Theatre(cast.theatre.folder)
    try:
        with pytest.raises(AssertionError):
            check(theatre.live(history, name.replace(" ", "-")), history, reference, None)
    finally:
        theatre.ranks.close()
