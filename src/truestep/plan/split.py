"""Which layers lie on which pipeline stage: contiguous parts whose dearest is as cheap as can be."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from truestep.recipe.machine import FOLDED, Pipeline
from truestep.recipe.model import ModelSection


def balanced(costs: Sequence[int], stages: int, first: int = 0, last: int = 0) -> list[int]:
    """How many of the layers, with these costs in order, go on each of `stages` stages, at least one on each.

    The first stage costs `first` more (embedding), the last one `last` (head). The largest cost of a stage is as small
    as any split allows; of the splits with that, the sum of squares is least, then the earlier stages are the smaller
    ones (they hold more microbatches). Raises ValueError where there are fewer layers than stages."""
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split into {stages} stages of one or more")
    extra = [(first if i == 0 else 0) + (last if i == stages - 1 else 0) for i in range(stages)]
    prefix = [0, *accumulate(costs)]
    low, high = max(costs), prefix[-1] + first + last
    while low < high:  # the least bound under which a split exists
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(prefix, extra, middle) else (middle + 1, high)
    return _smoothest(prefix, extra, low)


def _fits(prefix: list[int], extra: list[int], bound: int) -> bool:
    """Whether a split exists with no stage dearer than `bound`: each takes all that it can, and leaves one for each of
    those that follow."""
    start, stages = 0, len(extra)
    for stage, more in enumerate(extra):
        stop = bisect_right(prefix, bound - more + prefix[start]) - 1
        start, before = min(stop, len(prefix) - stages + stage), start
        if start <= before:
            return False
    return start == len(prefix) - 1


def _smoothest(prefix: list[int], extra: list[int], bound: int) -> list[int]:
    """The best split with no stage dearer than `bound`, by dynamic programming from the last stage.

    best[l] = (least sum of squares, sizes) of the layers from l on over the stages from `stage` on."""
    layers, stages = len(prefix) - 1, len(extra)
    best: dict[int, tuple[int, list[int]]] = {layers: (0, [])}
    for stage in reversed(range(stages)):
        found: dict[int, tuple[int, list[int]]] = {}
        starts = [0] if stage == 0 else range(stage, layers)
        for start in starts:
            for stop in range(start + 1, layers + 1):
                cost = prefix[stop] - prefix[start] + extra[stage]
                if cost > bound:
                    break
                if stop in best:
                    square, sizes = best[stop]
                    option = (square + cost * cost, [stop - start, *sizes])
                    if start not in found or option < found[start]:
                        found[start] = option
        best = found
    return best[0][1]


def layer_costs(model: ModelSection, context: int) -> tuple[list[int], int]:
    """Forward FLOPs of a row in each block of a resolved section, and in the head."""
    whole = [_first(model, n).flops_per_row(context) for n in range(model.num_layers + 1)]
    return [after - before for before, after in pairwise(whole)], whole[0]


def stage_layers(model: ModelSection, pipeline: Pipeline, pp: int, context: int) -> list[range]:
    """The blocks of each pipeline stage, by stage: as [machine.pipeline] says, or balanced by cost."""
    stages = pp * (pipeline.stages_on_a_rank if pp > 1 else 1)
    sizes = pipeline.split
    if not isinstance(sizes, list) or pp == 1:
        costs, head = layer_costs(model, context)
        sizes = balanced(costs, stages, last=head)
    ends = [0, *accumulate(sizes)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def stages_of_rank(schedule: str, pp: int, per_rank: int, rank: int) -> list[int]:
    """The pipeline stages, in order, that a rank of the pipeline axis holds: `per_rank` of them."""
    if schedule in FOLDED and pp > 1:
        return [rank, 2 * pp - 1 - rank]
    return list(range(rank, pp * per_rank, pp))


def _first(model: ModelSection, layers: int) -> ModelSection:
    """The model with its first blocks only."""
    return model.model_copy(update={"num_layers": layers})
