"""An attempt's verdict and its culprit, for every order in which ranks can end."""

import itertools
import signal

import pytest

from truestep.elastic.attempt import GONE, Attempt

HOSTS = ["a", "b", "c"]


def attempt(*events) -> Attempt:
    found = Attempt(list(HOSTS))
    for at, (kind, *values) in enumerate(events):
        {"end": found.end, "wait": found.wait, "lose": found.lose}[kind](*values, float(at))
    return found


def ends(*codes) -> Attempt:
    return attempt(*(("end", rank, code) for rank, code in enumerate(codes)))


@pytest.mark.parametrize(
    ("codes", "verdict"),
    [
        ((0, 0, 0), "ended"),
        ((1, 1, 1), "gate"),
        ((2, 2, 2), "refused"),
        ((0, 2, 2), "refused"),
        ((75, 75, 75), "again"),
        ((2, 70, 2), "broken"),
        ((-9, 2, 2), "broken"),
        ((75, -11, 75), "broken"),
        ((0, 0, GONE), "broken"),
        ((1, 1, 75), "again"),
    ],
)
def test_verdict_in_any_order(codes, verdict):
    for order in itertools.permutations(range(3)):
        found = attempt(*(("end", rank, codes[rank]) for rank in order))
        assert found.settled and found.verdict() == verdict


def test_the_first_crash_is_the_culprit():
    found = ends(70, -9, 70)
    assert found.fault is not None and (found.fault.rank, found.fault.host, found.fault.code) == (0, "a", 70)


def test_a_crash_explains_those_who_waited_before_it_was_known():
    found = attempt(("wait", 0, "a connection broke"), ("wait", 2, "a connection broke"), ("end", 1, -9))
    assert found.settled and found.verdict() == "broken" and found.fault is not None
    assert found.fault.text == "rank 1 on host b was killed by SIGKILL"
    assert (found.fault.host, found.fault.at_s) == ("b", 0.0)  # since the first sign


def test_all_wait_and_nobody_is_to_blame():
    found = attempt(*(("wait", rank, "a connection broke") for rank in range(3)))
    assert found.settled and found.verdict() == "broken" and found.fault is not None and found.fault.host is None


def test_sigterm_after_a_failure_is_an_echo_and_before_it_is_not():
    assert attempt(("end", 1, 2), ("end", 0, -signal.SIGTERM), ("end", 2, 2)).verdict() == "refused"
    first = attempt(("end", 0, -signal.SIGTERM), ("end", 1, 2), ("end", 2, 2))
    assert first.verdict() == "broken" and first.fault is not None and first.fault.host == "a"


def test_a_gate_that_did_not_pass_stays_one_where_torchrun_ends_the_others():
    found = attempt(("end", 1, 1), ("end", 0, -signal.SIGTERM), ("end", 2, 1))
    assert found.verdict() == "gate" and found.fault is None


def test_ranks_that_were_condemned_prove_nothing():
    found = attempt(("end", 0, 2))
    assert found.condemn() == {1, 2}
    for rank in (1, 2):
        found.end(rank, -9, 5.0)
    assert found.verdict() == "refused" and found.fault is None


def test_a_lost_host_takes_all_its_ranks():
    found = Attempt(["a", "b", "b"])
    found.wait(1, "a connection broke", 0.0)
    found.lose("b", "hung up", 1.0)
    assert found.running == {0} and found.lost == {1, 2} and found.waiting == set()
    found.wait(0, "a connection broke", 2.0)
    assert found.settled and found.verdict() == "broken"
    assert found.fault is not None and (found.fault.kind, found.fault.host) == ("lost", "b")


def test_what_a_host_did_before_it_was_lost_stays():
    found = attempt(("end", 1, 0), ("lose", "b", "hung up"))
    assert found.lost == set() and found.fault is None
