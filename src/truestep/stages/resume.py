"""A stage's checkpoints: the store is opened, fenced off from earlier attempts, and the newest sound one taken up."""

from math import inf
from typing import Any

import torch

from truestep.checkpoint.catalogue import begin_epoch, list_committed
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load_newest
from truestep.checkpoint.of_run import checkpoint_place
from truestep.checkpoint.retention import Policy
from truestep.checkpoint.upkeep import Upkeep
from truestep.data.loader import Loader
from truestep.errors import CheckpointError
from truestep.recipe.digests import bits_fields, changed, what
from truestep.recipe.stage import Stage
from truestep.stages.context import Context
from truestep.stages.measure import hardware, versions
from truestep.stages.tiers import said_places, with_places
from truestep.storage.store import open_store
from truestep.train.state import TrainState


def open_checkpoints(context: Context, stage: Stage, again: int = 0, last_step: float = inf) -> Checkpointer:
    """The stage's store of checkpoints, fenced off from earlier attempts, and, the `again`-th time that it is opened in
    this one, from what was saved so far. Checkpoints of steps after `last_step` no longer count."""
    recipe, job, settings = context.recipe, context.job, context.recipe.checkpoint
    store = open_store(checkpoint_place(recipe, context.run_dir, stage.name), settings.storage_options)

    def begin() -> int:
        late = [committed.key for committed in list_committed(store) if committed.step > last_step]
        # An attempt that was paused must not fence off a newer one: that has its log first, then its epoch. Looked at
        # once more behind, nothing that began meanwhile is missed, since this epoch then is the older one.
        context.require_newest()
        number = begin_epoch(store, late).number
        context.require_newest()
        return number

    checkpointer = Checkpointer(
        with_places(context, stage, store, again),
        attempt=job.agree(f"epoch/{stage.name}/{again}", begin),
        rank=job.rank,
        world=job.world,
        kv=job.store,
        block_bytes=settings.block,
        deadline_s=settings.deadline,
        facts={"what": what(recipe), "stage": stage.name, "run": recipe.run.name, "bits": bits_now(context)},
        stopped=job.lost,
    )
    context.closing.callback(checkpointer.abandon)
    if job.first and settings.keep:
        policy = Policy(settings.keep, settings.keep_every)
        checkpointer.upkeep = Upkeep(store, policy, checkpointer.attempt)
        context.closing.callback(checkpointer.upkeep.stop)
    return checkpointer


def resume(context: Context, stage: Stage, state: TrainState, loader: Loader, checkpointer: Checkpointer) -> None:
    """Go on from the newest sound checkpoint, if there is one, and say so."""
    job, wish = context.job, context.recipe.run.resume
    deadline_s = context.recipe.checkpoint.deadline
    group = Group.of(job.store, job.rank, job.world, deadline_s, f"load-{stage.name}", job.lost)
    tensors = state.tensors()
    loaded = load_newest(checkpointer.store, tensors, group=group, attempt=checkpointer.attempt)
    if loaded is None:
        if wish == "required":
            raise CheckpointError(
                f"run.resume is required, but {checkpointer.store.url} holds no checkpoint; set it to auto"
            )
        context.progress.say(f"{stage.name}: starts at step 0 (no checkpoint in {checkpointer.store.url})")
        return
    if wish == "never":
        raise CheckpointError(
            f"run.resume is never, but {checkpointer.store.url} holds step {loaded.step}; choose another run.name"
        )
    if loaded.facts["what"] != what(context.recipe):
        raise CheckpointError(f"{checkpointer.store.url} holds checkpoints of another recipe; choose another run.name")
    if checkpointer.upkeep:
        checkpointer.upkeep.went_on_from(loaded.commit)
    state.restore(loaded.extra)
    loader.restore(state.loader)
    differences = changed(loaded.facts["bits"], bits_now(context))
    context.note(
        "resume",
        stage=stage.name,
        step=loaded.step,
        checkpoint=loaded.commit,
        fell_back=loaded.fell_back,
        changed=differences,
        places=loaded.places,
    )
    if differences:
        context.progress.say(f"{stage.name}: last bits of results may differ from here on: {'; '.join(differences)}")
    for sentence in loaded.fell_back:
        context.progress.alarm(sentence)
    context.progress.say(f"{stage.name}: goes on from step {loaded.step} ({loaded.commit}){said_places(loaded.places)}")


def bits_now(context: Context) -> dict[str, Any]:
    """What the last bits of a result depend on: fields of the recipe, versions, hardware, and the number of processes
    unless sums are exact."""
    recipe, here = context.recipe, {"threads": torch.get_num_threads(), "hardware": hardware(context.job.device)}
    if recipe.numerics.reduction == "fast" or recipe.machine.mesh.ep != 1:
        here["processes"] = context.job.world
    return bits_fields(context.recipe) | here | {f"version of {name}": v for name, v in versions().items()}
