"""Where a stage's checkpoints have copies nearby: this host's disk, its memory, and that of the next host.

Hosts stand in a ring, in the order of their ranks. Each rank copies what it writes to the keeper of its own host and to
that of the next one, so the loss of one host loses no copy. It reads its own host's first, then the others in the order
of the ring.
"""

import os

from truestep.checkpoint.control import Group
from truestep.checkpoint.of_run import disk_place
from truestep.checkpoint.places import Place, Places
from truestep.recipe.stage import Stage
from truestep.runlog.outbox import post
from truestep.stages.context import Context
from truestep.storage.interface import Store
from truestep.storage.keeper import ADDRESS, TOKEN, KeeperStore
from truestep.storage.local import LocalStore

MOST_ASKED = 16
"""Other hosts whose memory a rank asks when it loads; the rest of a large job comes from the store."""


def with_places(context: Context, stage: Stage, store: Store, again: int = 0) -> Store:
    """`store`, with the nearer places that the recipe wants. All ranks call this together."""
    settings = context.recipe.checkpoint
    if not settings.memory and settings.disk is None:
        return store
    prefix = f"{context.recipe.run.name}/{stage.name}"
    memory = _memories(context, prefix, f"{stage.name}/{again}") if settings.memory else []
    folder = disk_place(context.recipe, stage.name)
    disk = [Place("disk", LocalStore(folder))] if folder else []

    def alarm(text: str) -> None:
        """Any rank may find a copy wanting; the event reaches the log by way of the outbox."""
        context.progress.alarm(f"{stage.name}: {text}")
        job = context.job
        post(context.run_dir, "fault", kind="save", text=text, stage=stage.name, rank=job.rank, host=job.host)

    return Places(store, memory[:2] + disk, memory[:1] + disk + memory[1 : 1 + MOST_ASKED], alarm)


def said_places(places: dict[str, int]) -> str:
    """From where a checkpoint was read, for a person; nothing if there is only the store."""
    total = sum(places.values())
    parts = (f"{100 * count / total:.0f} % from {name}" for name, count in places.items() if count)
    return f", {', '.join(parts)}" if total else ""


def _memories(context: Context, prefix: str, name: str) -> list[Place]:
    """The keepers of all hosts that have one, own first, then round the ring."""
    job, token = context.job, os.environ.get(TOKEN, "")
    group = Group.of(job.store, job.rank, job.world, context.recipe.checkpoint.deadline, f"keepers-{name}", job.lost)
    mine = [f"{job.host} {os.environ[ADDRESS]}"] if ADDRESS in os.environ else []
    found = dict(pair.rsplit(" ", 1) for pair in group.union("keepers", mine))
    if job.host not in found:
        context.progress.alarm(
            "checkpoint.memory is on, but this host has no keeper: `truestep run` starts one beside several processes, "
            "torchrun and srun do not; checkpoints are not kept in memory here"
        )
    ring = list(dict.fromkeys(job.hosts))
    here = ring.index(job.host)
    return [
        Place("memory" if host == job.host else f"memory of {host}", KeeperStore(found[host], token, prefix))
        for host in ring[here:] + ring[:here]
        if host in found
    ]
