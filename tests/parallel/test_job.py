"""Who is in a job: hosts by rank, and what a rank ends with when another one fails or is gone."""

import os
import signal
import threading

import pytest
import torch.distributed as dist

from tests.dist import run_job
from truestep.errors import Again, HeardError, Lost, UserError
from truestep.parallel.environment import Place, host_name, place, rendezvous_variables
from truestep.parallel.failure import FailureWatch, connection_broke
from truestep.parallel.job import join
from truestep.runlog.counters import is_gone


def _joined(rank: int, world: int) -> tuple:
    os.environ["TRUESTEP_HOST"] = f"host-{rank // 2}"
    job = join(place(os.environ), device="cpu", threads=1, timeout_s=30)
    seen = job.host, job.hosts, job.all_sum([float(rank)]), job.counters.spent_s()["waited"] > 0
    job.leave(meet=True)
    return seen


def test_hosts_are_known_to_all_ranks():
    hosts = ("host-0", "host-0", "host-1")
    assert run_job(_joined, 3) == [(hosts[rank], hosts, [3.0], True) for rank in range(3)]


def test_a_lone_process_has_a_host(monkeypatch):
    monkeypatch.setenv("TRUESTEP_HOST", "mine")
    job = join(None, device="cpu", threads=1, timeout_s=30)
    assert (job.host, job.hosts) == ("mine", ("mine",))
    monkeypatch.delenv("TRUESTEP_HOST")
    assert host_name(os.environ) == os.uname().nodename


def test_a_place_with_an_address_replaces_that_of_the_environment():
    environ = {"MASTER_ADDR": "old", "MASTER_PORT": "1", "RANK": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rendezvous_variables(environ, Place(1, 2, 0, 1, "truestep", ("new", 22), "eth7", "10.0.0.7:99"))
    assert environ == {
        "GLOO_SOCKET_IFNAME": "eth7",
        "TRUESTEP_KEEPER": "10.0.0.7:99",
        "MASTER_ADDR": "new",
        "MASTER_PORT": "22",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


class Heard:
    """Two ranks' watches over one store of this process."""

    def __init__(self, regroups: bool):
        self.store = dist.HashStore()
        self.watches = [FailureWatch(self.store, rank, 2, regroups=regroups) for rank in range(2)]

    def settle(self, first: Exception, second: Exception) -> list[BaseException]:
        """Rank 1 fails with `first`, rank 0 notices with `second`."""
        ends: dict[int, BaseException] = {}
        earlier = threading.Thread(target=lambda: ends.update({1: self.watches[1].settle(first)}))
        earlier.start()
        earlier.join()
        ends[0] = self.watches[0].settle(second)
        return [ends[0], ends[1]]


BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize("regroups", [True, False])
def test_a_sentence_for_a_person_is_heard_by_all(regroups):
    mine, theirs = Heard(regroups).settle(UserError("bad data; look"), BROKEN)
    assert isinstance(mine, HeardError) and str(mine) == "bad data; look"
    assert isinstance(theirs, UserError)


@pytest.mark.parametrize("regroups", [True, False])
def test_an_error_of_the_program_is_nobodys_sentence(regroups):
    mine, theirs = Heard(regroups).settle(ValueError("a bug"), BROKEN)
    assert isinstance(mine, Lost) and "rank 1 failed: ValueError('a bug')" in str(mine)
    assert isinstance(theirs, ValueError)


def test_survivors_that_may_regroup_are_lost_together():
    ends = Heard(regroups=True).settle(BROKEN, BROKEN)
    assert all(isinstance(end, Lost) for end in ends) and "rank 1 lost another one" in str(ends[0])


def test_a_failed_save_is_no_sentence_of_its_own_once_a_process_is_gone():
    heard = Heard(regroups=True)
    for watch in heard.watches:
        watch.lost.set()
    ends = heard.settle(UserError("saving step 4 failed"), UserError("saving step 4 failed"))
    assert all(isinstance(end, Lost) for end in ends)


def test_again_passes_as_it_is():
    again = Again("host b is slow", ("b",))
    assert Heard(regroups=True).settle(again, again) == [again, again]


def test_what_is_a_broken_connection():
    assert connection_broke(BROKEN) and connection_broke(dist.DistNetworkError("recvValue failed"))
    assert not connection_broke(RuntimeError("shapes (2, 3) and (4, 5) do not fit"))
    assert not connection_broke(ValueError("gloo"))
    assert not connection_broke(UserError("connection refused"))


def test_processes_that_are_gone():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    assert not is_gone(pid)
    os.kill(pid, signal.SIGKILL)
    while not is_gone(pid):  # a zombie, until it is waited for
        pass
    os.waitpid(pid, 0)
    assert is_gone(pid)
