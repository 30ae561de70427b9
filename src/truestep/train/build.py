"""Set-up of a stage: model, parallel form, optimizer, loss, scaler, made into one TrainState.

Here the model and the mesh are introduced to each other; neither knows the other elsewhere.
"""

import torch
from torch import nn

from truestep.imports import is_import_path
from truestep.losses.base import open_loss
from truestep.numerics.precision import DTYPES
from truestep.optim.build import build_optimizer
from truestep.optim.scaler import LossScaler
from truestep.parallel.apply import Fill, parallelize
from truestep.parallel.job import Job
from truestep.parallel.mesh import resolve
from truestep.parallel.model import Parallel
from truestep.recipe.machine import Machine
from truestep.recipe.stage import Stage
from truestep.train.state import TrainState

HEAD_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
"""Each chunk adds a product into the whole weight gradient: few and large ones on a GPU; on a CPU time hardly depends
on the size and memory does."""


def build(
    stage: Stage,
    model: nn.Module,
    fill: Fill,
    *,
    job: Job,
    machine: Machine,
    precision: str,
    seed: int,
    steps: int,
) -> TrainState:
    """`model` lies on the meta device; `fill(model, pieces)` gives the pieces that this rank holds their first values.

    `precision` is the compute dtype; parameters are fp32, or float64 where everything is.
    """
    if precision == "float64":
        model = model.double()
    parallel = parallelize(
        model,
        resolve(machine.mesh, job.world),
        device=job.device,
        dtype=DTYPES[precision],
        fill=fill,
        activation_checkpointing=machine.activation_checkpointing,
        compile_blocks=machine.compile,
        reshard_after_forward=machine.reshard_after_forward,
    )
    chunk = machine.head_chunk_tokens or HEAD_CHUNK_TOKENS[job.device.type]
    return assemble(stage, parallel, job=job, head_chunk_tokens=chunk, seed=seed, steps=steps)


def assemble(
    stage: Stage, parallel: Parallel, *, job: Job, head_chunk_tokens: int, seed: int, steps: int
) -> TrainState:
    """Optimizer, loss and scaler around a parallel model."""
    bare = parallel.bare
    optimizer = build_optimizer(
        bare.named_parameters(),
        parallel.locals(),
        bare.roles(),  # pyright: ignore[reportCallIssue]
        stage.optim,
        replicas=parallel.replica_group,
    )
    return TrainState(
        job=job,
        parallel=parallel,
        optimizer=optimizer,
        section=stage.optim,
        loss=open_loss(stage.loss, head_chunk_tokens),
        scaler=LossScaler() if parallel.dtype == torch.float16 else LossScaler.off(),
        steps=steps,
        seed=seed,
        own_weight=is_import_path(stage.loss.kind),
    )
