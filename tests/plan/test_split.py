"""The split of layers over pipeline stages."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.models import LLAMA_405B
from truestep.plan.split import balanced, layer_costs, stage_layers, stages_of_rank
from truestep.recipe.machine import Pipeline
from truestep.recipe.model import ModelSection


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_no_split_is_better(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))

    def key(sizes: list[int]) -> tuple[int, int, list[int]]:
        ends = [sum(sizes[:i]) for i in range(stages + 1)]
        sums = [sum(costs[a:b]) for a, b in pairwise(ends)]
        sums[0] += first
        sums[-1] += last
        return max(sums), sum(x * x for x in sums), sizes

    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    every = [[b - a for a, b in pairwise(cut)] for cut in cuts]
    assert balanced(costs, stages, first, last) == min(every, key=key)


def test_the_first_and_last_stage_of_llama_405b_have_a_layer_less():
    """As in section 3.3.2 of the Llama 3 paper, whose 126 layers leave one out at either end of 16 stages."""
    sizes = [len(layers) for layers in stage_layers(LLAMA_405B, Pipeline(), 16, 8192)]
    assert sizes == [7] + [8] * 14 + [7]
    looped = Pipeline(schedule="interleaved", stages_per_rank=7)
    assert sum(len(layers) for layers in stage_layers(LLAMA_405B, looped, 16, 8192)) == 126


def test_costs_add_up_to_the_models_flops():
    model = ModelSection(num_layers=5, sliding_window=8, full_attention_every=2, family="gemma2").resolved(97)
    costs, head = layer_costs(model, 32)
    assert sum(costs) + head == model.flops_per_row(32) and head == 2 * 32 * 256 * 97
    assert costs[0] < costs[1] == costs[3]


def test_what_the_recipe_says_is_done():
    layers = stage_layers(LLAMA_405B, Pipeline(split=[100, 26]), 2, 8192)
    assert layers == [range(100), range(100, 126)]
    assert stage_layers(LLAMA_405B, Pipeline(), 1, 8192) == [range(126)]


def test_stages_of_a_rank():
    assert [stages_of_rank("zbv", 2, 2, r) for r in (0, 1)] == [[0, 3], [1, 2]]
    assert [stages_of_rank("interleaved", 2, 3, r) for r in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
    assert stages_of_rank("1f1b", 4, 1, 3) == [3] and stages_of_rank("zbv", 1, 1, 0) == [0]


def test_more_stages_than_layers_is_an_error():
    with pytest.raises(ValueError, match="3 layers cannot be split into 4 stages"):
        balanced([1, 1, 1], 4)
