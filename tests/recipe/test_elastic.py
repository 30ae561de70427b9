"""[machine.elastic]: numbers of processes that cannot be are said, with the remedy."""

import pytest

from truestep.errors import RecipeError
from truestep.recipe.load import load

from .small import small


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        ({"elastic": {"min": 3}}, "machine.elastic.min is 3, more than machine.processes 2; lower it."),
        ({"elastic": {"min": 5, "max": 4}}, "machine.elastic.min is 5, more than machine.elastic.max 4"),
        ({"elastic": {"max": 1}}, "machine.elastic.max is 1, fewer than machine.processes 2"),
        (
            {"elastic": {"min": 1}, "mesh": {"dp_shard": 2}},
            "the run cannot go on with 1 to 2 processes; set dp_shard or dp_replicate",
        ),
        ({"elastic": {"listen": "localhost"}}, "'localhost', which is not host:port"),
        ({"elastic": {"start": "torchrun", "regroup": True}}, "machine.elastic.regroup is set but will not be used"),
    ],
)
def test_what_cannot_be_is_said(machine, sentence):
    with pytest.raises(RecipeError) as caught:
        load(small(machine={"processes": 2} | machine))
    assert sentence in str(caught.value)
    assert len(caught.value.problems) == 1


def test_what_can_be_is_taken():
    elastic = load(small(machine={"processes": 2, "elastic": {"min": 1, "max": 4, "listen": ":0"}})).machine.elastic
    assert (elastic.min, elastic.max) == (1, 4)
