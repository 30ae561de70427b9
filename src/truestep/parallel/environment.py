"""Which job this process belongs to, read from the variables that torchrun or srun set. Torch-free."""

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from truestep.errors import UserError
from truestep.storage.keeper import ADDRESS


@dataclass(frozen=True)
class Place:
    """This process's place in its job. Where the environment does not say: `master`, address and port of its store;
    `interface`, of the network to the others; `keeper`, address of its host's keeper of checkpoints in memory."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    launcher: str
    master: tuple[str, int] | None = None
    interface: str | None = None
    keeper: str | None = None


def place(environ: Mapping[str, str]) -> Place | None:
    """The job that the environment describes, or None where the process stands alone.

    torchrun (and truestep's own launcher) set RANK and WORLD_SIZE; srun sets SLURM_PROCID and SLURM_NTASKS in a step.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        local_rank = _number(environ, "LOCAL_RANK", rank)
        local_world = _number(environ, "LOCAL_WORLD_SIZE", world)
        return _checked(Place(rank, world, local_rank, local_world, environ.get("TRUESTEP_LAUNCHER", "torchrun")))
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and _number(environ, "SLURM_NTASKS", 1) > 1:
        rank, world = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
        local_rank = _number(environ, "SLURM_LOCALID", 0)
        local_world = int(environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0])
        return _checked(Place(rank, world, local_rank, local_world, "srun"))
    return None


def host_name(environ: Mapping[str, str]) -> str:
    """Name of the failure domain that this process lives in."""
    return environ.get("TRUESTEP_HOST") or socket.gethostname()


def rendezvous_variables(environ: MutableMapping[str, str], job: Place) -> None:
    """Fill in what torch's env:// rendezvous needs where the launcher did not (srun sets no MASTER_ADDR)."""
    environ["RANK"], environ["WORLD_SIZE"] = str(job.rank), str(job.world)
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(job.local_rank), str(job.local_world)
    if job.master is not None:
        environ["MASTER_ADDR"], environ["MASTER_PORT"] = job.master[0], str(job.master[1])
        environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the store of a torchrun is that of its first group
    if job.interface is not None:
        environ["GLOO_SOCKET_IFNAME"] = job.interface
    if job.keeper is not None:
        environ[ADDRESS] = job.keeper
    if "MASTER_ADDR" not in environ:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise UserError(
                "the environment names no rendezvous (MASTER_ADDR is not set and there is no SLURM node list); "
                "start with torchrun or srun, or set MASTER_ADDR and MASTER_PORT"
            )
        environ["MASTER_ADDR"] = first_host(nodes)
    if "MASTER_PORT" not in environ:
        # All tasks of a SLURM job must agree on a port without talking: derive it from the job's number.
        environ["MASTER_PORT"] = str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000)


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: "gpu[07-09,12],cpu3" -> "gpu07"."""
    match = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\])?([^,\[]*)", node_list)
    if match is None:
        raise UserError(f"SLURM's node list {node_list!r} cannot be read; set MASTER_ADDR to the host of rank 0")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what says that this process belongs to a job: for one that is started beside it."""
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    launchers = ("TRUESTEP_", "TORCHELASTIC_", "SLURM_")
    return {name: value for name, value in environ.items() if name not in own and not name.startswith(launchers)}


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdigit():
        raise UserError(
            f"the environment variable {name} is {value!r}, which is no whole number; "
            f"unset it, or start with torchrun or srun"
        )
    return int(value)


def _checked(job: Place) -> Place:
    if not 0 <= job.rank < job.world:
        raise UserError(
            f"the environment says rank {job.rank} of {job.world} processes; ranks run from 0 to {job.world - 1}"
        )
    return job
