"""From a few small steps to a large one: what repeats is traced three times and carried on along a line.

Microbatches repeat once the pipeline is full, and blocks repeat by kind. Each number of a cost then grows by the same
amount with each further repetition; whether it does is looked at, and where not, all of it is traced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from truestep.recipe.machine import Pipeline
from truestep.recipe.model import ModelSection
from truestep.stages.dry_run import StepCost, Traffic


def carried_on(costs: Sequence[StepCost], further: int) -> StepCost | None:
    """Of costs at equal distances, the one that lies `further` such distances behind the last; None where they do not
    lie on a line, as when their peaks are at different moments."""
    if further == 0:
        return costs[-1]
    numbers = [_numbers(cost) for cost in costs]
    keys = numbers[-1].keys()
    if any(one.keys() != keys for one in numbers):
        return None
    growth = [{key: b[key] - a[key] for key in keys} for a, b in pairwise(numbers)]
    if any(one != growth[-1] for one in growth):
        return None
    return _cost({key: value + further * growth[-1][key] for key, value in numbers[-1].items()})


@dataclass(frozen=True)
class Series:
    """`sizes` are to be traced, at equal distances; the goal lies `further` distances behind the last."""

    sizes: list[int]
    further: int

    @property
    def saves(self) -> bool:
        return len(self.sizes) > 1


def series_of_microbatches(count: int, pipeline: Pipeline, pp: int) -> Series:
    """What stands for a step of `count` microbatches on a rank. Only a pipeline that has filled repeats itself."""
    plain = pp == 1 or pipeline.schedule in ("1f1b", "gpipe")
    distance = 1 if plain else pp
    first = 2 if pp == 1 else pp + 1 if plain else 2 * pp + count % pp
    return _series(first, distance, count)


def series_of_layers(model: ModelSection) -> Series:
    """What stands for a model of so many layers, all of which lie on one rank."""
    kinds = [(model.window_of(layer), model.moe is not None and model.moe.in_layer(layer)) for layer in _layers(model)]
    start, period = _repeats(kinds)
    first = start + 3 * period + (len(kinds) - start) % period  # with fewer, FSDP2 gathers all there are at once
    return _series(first, period, len(kinds))


def _layers(model: ModelSection) -> range:
    return range(model.num_layers)


def _series(first: int, distance: int, goal: int) -> Series:
    sizes = [first, first + distance, first + 2 * distance]
    if (goal - first) % distance or sum(sizes) >= goal:
        return Series([goal], 0)
    return Series(sizes, (goal - sizes[-1]) // distance)


def _repeats(kinds: Sequence[object]) -> tuple[int, int]:
    """(where, with which period) a sequence repeats itself to its end: the least sum of both."""
    count = len(kinds)
    options = (
        (start, period)
        for total in range(1, count + 1)
        for start in range(total)
        for period in [total - start]
        if all(kinds[i] == kinds[i - period] for i in range(start + period, count))
    )
    return next(options)


def _numbers(cost: StepCost) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {("parameters",): cost.parameters}
    found |= {("memory", kind): value for kind, value in cost.memory.items()}
    found |= {("flops", kind): value for kind, value in cost.flops.items()}
    for traffic in cost.traffic:
        found["count", traffic.kind, traffic.axis] = traffic.count
        found["bytes", traffic.kind, traffic.axis] = traffic.bytes
    return found


def _cost(numbers: dict[tuple[str, ...], int]) -> StepCost:
    def under(name: str) -> dict[str, int]:
        return {key[1]: value for key, value in numbers.items() if key[0] == name}

    pairs = [(key[1], key[2]) for key in numbers if key[0] == "count"]
    traffic = [Traffic(kind, axis, numbers["count", kind, axis], numbers["bytes", kind, axis]) for kind, axis in pairs]
    return StepCost(numbers["parameters",], under("memory"), traffic, under("flops"))
