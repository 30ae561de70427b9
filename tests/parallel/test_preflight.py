"""Links between ranks: sound ones pass, a bad one is named by its ends, a bad rank by the links on both its sides."""

import time
from dataclasses import replace

import pytest
import torch

from tests import tiny
from truestep.errors import Again, UserError
from truestep.parallel.preflight import Row, bad_links, preflight
from truestep.sentinel.inject import flip_bit_
from truestep.train.first_checks import check_first, refuse

SOUND = Row(0.001, 0, 0)


def _fly(rank, world, bad):
    here = tiny.job(rank, world)
    preflight(here)
    began = time.process_time()
    found = preflight(here, (lambda x: flip_bit_(x, 77, 5)) if rank in bad else None)
    return found, time.process_time() - began


def test_sound_links_pass_and_take_little_time(pool):
    for found, seconds in pool.run(_fly, 4, ()):
        assert not [link for link in found if link.what == "corrupt"]
        assert seconds < 0.2


def test_a_link_that_changes_bits_is_told_by_its_ends(pool):
    for found, _ in pool.run(_fly, 3, (2,)):
        (link,) = (link for link in found if link.what == "corrupt")
        assert (link.ranks, link.named) == ((1, 2), False)
        assert "from rank 1 to rank 2, 4 words" in link.text


def test_a_rank_whose_links_change_bits_on_both_sides_is_named(pool):
    for found, _ in pool.run(_fly, 4, (0, 3)):
        (link,) = (link for link in found if link.what == "corrupt")
        assert (link.ranks, link.named) == ((3,), True)


@pytest.mark.parametrize(
    ("seconds", "ranks", "named"),
    [
        ([0.001, 0.001, 0.3, 0.001], (1, 2), False),
        ([0.001, 0.3, 0.3, 0.001, 0.001], (1,), True),
        ([0.3, 0.001, 0.001, 0.001, 0.3], (4,), True),
        ([0.2, 0.001, 0.001], (2, 0), False),
    ],
)
def test_slow_links(seconds, ranks, named):
    (link,) = bad_links([replace(SOUND, seconds=each) for each in seconds])
    assert (link.what, link.ranks, link.named) == ("slow", ranks, named)


def test_links_that_are_all_alike_or_quick_enough_are_not_slow():
    assert bad_links([replace(SOUND, seconds=0.5)] * 4) == []
    assert bad_links([SOUND, SOUND, SOUND, replace(SOUND, seconds=0.04)]) == []


def test_a_sum_that_one_rank_has_wrong():
    (link,) = bad_links([SOUND, SOUND, replace(SOUND, wrong_sum=1)])
    assert (link.what, link.ranks, link.named) == ("corrupt", (2,), True)
    (link,) = bad_links([replace(SOUND, wrong_sum=1)] * 2)
    assert (link.ranks, link.named) == ((0, 1), False)


def _start(rank, world, broken):
    here = replace(tiny.job(rank, world), hosts=tuple(f"host{r}" for r in range(world)))
    if rank == broken:  # a device that multiplies wrongly
        right = torch.Tensor.__matmul__
        torch.Tensor.__matmul__ = lambda a, b: right(a, b) if a.dtype == torch.int64 else right(a, b) + 1
    try:
        found, said = check_first(here, "base", 0), []
        for environ in ({}, {"TRUESTEP_SUPERVISED": "1"}):
            try:
                refuse(found, said.append, environ)
                said.append("trains")
            except (UserError, Again) as end:
                said.append((type(end).__name__, str(end), getattr(end, "without", ())))
        return said
    finally:
        if rank == broken:
            torch.Tensor.__matmul__ = right


def test_a_host_that_computes_wrongly_does_not_train(pool):
    for said in pool.run(_start, 3, 1):
        fault, (kind, sentence, _), same, (again, _, without) = said
        assert fault == same and (fault.kind, fault.rank, fault.host, fault.named) == ("host", 1, "host1", True)
        assert kind == "UserError" and "rank 1 (host host1)" in sentence and "float64 are wrong" in sentence
        assert (again, without) == ("Again", ("host1",))


def test_sound_hosts_train(pool):
    for said in pool.run(_start, 2, None):
        assert [each for each in said if each == "trains"] == ["trains"] * 2
