"""What is tried out before a stage trains: the device of every rank, and the links between them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from truestep.errors import SUPERVISED, Again, UserError
from truestep.parallel.job import Job
from truestep.parallel.preflight import preflight
from truestep.runlog.records import Fault
from truestep.sentinel.host import LONG, check_device
from truestep.train.accuse import Accuser
from truestep.train.guard import hosts_of


@dataclass(frozen=True)
class FirstChecks:
    """`faults`: those found, the same on all ranks; `bad`: those with which nothing should be trained."""

    faults: list[Fault]
    bad: list[Fault]


def check_first(job: Job, stage: str, step: int) -> FirstChecks:
    """Collective. `step`: what is done already. Slow links are told and no more."""
    accuser = Accuser(job, stage)
    bad = devices(accuser, check_device(job.device, LONG[job.device.type]), step)
    slow = []
    for link in preflight(job):
        fault = accuser.fault(
            "link", link.text, link.ranks, named=link.named, step=step, since=step + 1, what=link.what
        )
        (bad if link.what == "corrupt" else slow).append(fault)
    return FirstChecks(bad + slow, bad)


def devices(accuser: Accuser, sentence: str, step: int) -> list[Fault]:
    """Faults of devices that failed their test; `sentence`: of this rank's. Collective."""
    told = enumerate(accuser.job.everybody(sentence))
    return [accuser.fault("host", said, [rank], named=True, step=step, since=step + 1) for rank, said in told if said]


def refuse(found: FirstChecks, say: Callable[[Fault], None], environ: Mapping[str, str] = os.environ) -> None:
    """Say every fault. With one that forbids training: Again without the hosts that are named, where a supervisor sees
    to that, else UserError. All ranks together."""
    for fault in found.faults:
        say(fault)
    if not found.bad:
        return
    hosts = hosts_of(found.bad)
    reason = "; ".join(fault.text for fault in found.bad)
    if hosts and environ.get(SUPERVISED):
        raise Again(reason, hosts)
    raise broken(reason)


def broken(reason: str) -> UserError:
    """What a run without a supervisor ends with: its devices or links fail their tests."""
    return UserError(f"{reason}; replace what is broken (sentinel.check_host = false trains without this test)")
