"""Set-up of a stage: model, parallel form, optimizer, loss, scaler, made into one TrainState.

Here the model and the mesh are introduced to each other; neither knows the other elsewhere.
"""

import torch
from torch import nn

from truestep.imports import is_import_path
from truestep.losses.base import open_loss
from truestep.models.decoder import Decoder
from truestep.numerics.precision import DTYPES
from truestep.optim.build import build_optimizer
from truestep.optim.scaler import LossScaler
from truestep.parallel.apply import Fill, PipelineSettings, parallelize
from truestep.parallel.job import Job
from truestep.parallel.mesh import resolve
from truestep.parallel.model import Parallel
from truestep.plan.split import stage_layers
from truestep.recipe.machine import Machine
from truestep.recipe.numerics import Numerics
from truestep.recipe.stage import Stage
from truestep.train.low_precision import compute_low
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
    numerics: Numerics | None = None,
) -> TrainState:
    """`model` lies on the meta device; `fill(model, pieces)` gives the pieces that this rank holds their first values.

    `precision` is the compute dtype; parameters are fp32, or float64 where everything is.
    """
    if precision == "float64":
        model = model.double()
    degrees = resolve(machine.mesh, job.world)
    parallel = parallelize(
        model,
        degrees,
        device=job.device,
        dtype=DTYPES[precision],
        fill=fill,
        activation_checkpointing=machine.activation_checkpointing,
        compile_blocks=machine.compile,
        reshard_after_forward=machine.reshard_after_forward,
        context=machine.context,
        pipeline=pipeline_settings(model, machine, degrees.pp, stage.context),
    )
    numerics = numerics or Numerics()
    if numerics.low_precision is not None:
        compute_low(parallel, numerics.low_precision, machine.context, stage.context, seed)
    chunk = machine.head_chunk_tokens or HEAD_CHUNK_TOKENS[job.device.type]
    return assemble(stage, parallel, job=job, head_chunk_tokens=chunk, seed=seed, steps=steps)


def assemble(
    stage: Stage, parallel: Parallel, *, job: Job, head_chunk_tokens: int, seed: int, steps: int
) -> TrainState:
    """Optimizer, loss and scaler around a parallel model."""
    roles = {name: role for part in parallel.parts for name, role in part.roles().items()}  # pyright: ignore[reportCallIssue]
    optimizer = build_optimizer(
        parallel.named_parameters().items(),
        parallel.locals(),
        roles,
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


def pipeline_settings(model: nn.Module, machine: Machine, pp: int, context: int) -> PipelineSettings | None:
    """How the layers lie on the pipeline, where there is one."""
    if pp == 1 or not isinstance(model, Decoder):
        return None
    section, asked = model.section, machine.pipeline
    layers = tuple(stage_layers(section, asked, pp, context))
    sizes = section.hidden_size, section.tie_embeddings
    return PipelineSettings(asked.schedule, asked.stages_on_a_rank, layers, *sizes)
