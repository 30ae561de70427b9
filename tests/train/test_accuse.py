"""From findings to faults: since when, who, and on which host."""

from dataclasses import replace

from tests import tiny
from truestep.parallel.wire import Delivered
from truestep.sentinel.verdict import judge
from truestep.train.accuse import Accuser
from truestep.train.recheck import Trial

JOB = replace(tiny.job(), hosts=("a", "b", "b", "c"))
ACCUSER = Accuser(JOB, "base")


def trial(said: dict[int, str], column=(0, 1, 2)) -> Trial:
    return Trial(column[0], "the loss", column, judge(said), repeats=True)


def test_what_is_always_wrong_may_have_been_so_since_the_last_time_that_it_was_right():
    (always,) = ACCUSER.recomputed([trial({0: "XXX", 1: "AA", 2: "A"})], step=90, clean=41)
    assert (always.rank, always.host, always.since, always.evidence["repeatable"]) == (0, "a", 42, True)
    (once,) = ACCUSER.recomputed([trial({0: "XAA", 1: "AA", 2: "A"})], step=90, clean=41)
    assert (once.rank, once.since, once.evidence["repeatable"]) == (0, 90, False)


def test_ranks_of_one_data_rank_are_one_suspect_and_their_host_is_named_if_it_is_one():
    both = [trial({0: "XX", 2: "AA", 3: "A"}, (0, 2, 3)), trial({1: "XX", 2: "AA", 3: "A"}, (1, 2, 3))]
    (fault,) = ACCUSER.recomputed(both, step=5, clean=4)
    assert (fault.named, fault.rank, fault.host, fault.evidence["ranks"]) == (False, None, None, [0, 1])
    both = [trial({1: "XX", 0: "AA", 3: "A"}, (1, 0, 3)), trial({2: "XX", 0: "AA", 3: "A"}, (2, 0, 3))]
    (fault,) = ACCUSER.recomputed(both, step=5, clean=4)
    assert (fault.named, fault.rank, fault.host, fault.evidence["ranks"]) == (True, None, "b", [1, 2])


def test_gathers_and_sums():
    gathered = Delivered([0, 1, 3], [[7, 7, 8], [5, 5, 5], [6, 6, 6]], [0, 0, 0], alike=False)
    (fault,) = ACCUSER.misdelivered([[gathered], [gathered], [], [gathered]], step=5)
    assert (fault.named, fault.rank, fault.evidence["giver"]) == (True, 3, 0)
    for alike, wrong, rank in ((True, [0, 2, 0], 1), (False, [0, 2, 0], None), (True, [1, 2, 0], None)):
        (fault,) = ACCUSER.misdelivered([[Delivered([0, 1, 3], [], wrong, alike)]], step=5)
        assert fault.rank == rank  # without copies of a sum there is nobody to compare with


def test_pairs_between_which_bits_changed():
    def ranks(*pairs):
        fault = ACCUSER.damaged([pairs, pairs, []], step=5, gave_up=False)
        return fault.named, fault.evidence["ranks"], fault.since

    assert ranks((0, 3)) == (False, [0, 3], 6)
    assert ranks((0, 3), (1, 3)) == (True, [3], 6)
    assert ranks((2, 2)) == (True, [2], 6)
    assert ranks((0, 0), (1, 1)) == (False, [0, 1], 6)


def test_nobody_is_named_for_what_happens_on_all_ranks_at_once():
    told = [(["model.x"], []), (["model.x"], [])]
    (fault,) = ACCUSER.own_memory(told, step=5)
    assert (fault.named, fault.since) == (False, 4) and "every rank" in fault.text
    (fault,) = ACCUSER.own_memory([(["model.x"], []), ([], [])], step=5)
    assert (fault.named, fault.rank, fault.since) == (True, 0, 4)
    (fault,) = ACCUSER.torn([(0, True), (1, False)], step=5)
    assert (fault.named, fault.rank) == (True, 1)
    assert [fault.named for fault in ACCUSER.torn([(0, False), (1, False)], step=5)] == [False, False]
    assert [fault.named for fault in ACCUSER.torn([(0, False)], step=5)] == [True]
