"""Set-up of a stage: model, parallel form, optimizer, loss, scaler, made into one TrainState.

Here the model and the mesh are introduced to each other; neither knows the other elsewhere.
"""

from collections import ChainMap
from functools import partial

import torch
from torch import nn

from truestep.errors import UserError
from truestep.imports import is_import_path
from truestep.losses.base import open_loss
from truestep.models.decoder import Decoder
from truestep.numerics.precision import DTYPES
from truestep.numerics.uses import as_use
from truestep.optim.build import build_optimizer
from truestep.optim.scaler import LossScaler
from truestep.parallel.apply import TABLE, Fill, PipelineSettings, Splittable, is_small, parallelize
from truestep.parallel.exact import Exact
from truestep.parallel.exact_model import reduce_exactly
from truestep.parallel.job import Job
from truestep.parallel.layout import layouts
from truestep.parallel.mesh import Limits, resolve
from truestep.parallel.model import Parallel
from truestep.plan.split import stage_layers
from truestep.recipe.machine import Machine
from truestep.recipe.numerics import Numerics
from truestep.recipe.stage import Stage
from truestep.train.adapt import hold_low, place_dropout, require_one_table, require_whole
from truestep.train.average import Average
from truestep.train.low_precision import compute_low
from truestep.train.recomputation import recomputed
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
    limits: Limits | None = None,
) -> TrainState:
    """`model` lies on the meta device; `fill(model, pieces)` gives the pieces that this rank holds their first values.

    `precision` is the compute dtype; parameters are fp32, or float64 where everything is; what is frozen beside
    adapters is held in it. `limits`: what the model and the rows allow of a mesh. Raises UserError for a mesh that they
    do not allow, or what only a GPU has without one.
    """
    require_gpu(machine, job.device)
    if precision == "float64":
        model = model.double()
    numerics = numerics or Numerics()
    exact = numerics.reduction == "exact"
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if stage.lora is not None:
        roles = model.roles()  # pyright: ignore[reportCallIssue]
        hold_low(model, DTYPES[precision], lambda name, shape: is_small(roles[name], shape))
    degrees = resolve(machine.mesh, job.world, limits)
    if stage.lora is not None:
        require_whole(stage.lora, degrees, numerics.low_precision is not None)
        require_one_table(model, degrees)
    chunk = machine.head_chunk_tokens or HEAD_CHUNK_TOKENS[job.device.type]
    modes = recomputed(model, stage, machine, degrees, precision, chunk)
    parallel = parallelize(
        model,
        degrees,
        device=job.device,
        dtype=DTYPES[precision],
        fill=fill,
        activation_checkpointing=modes or machine.activation_checkpointing,
        compile_blocks=machine.compile,
        reshard_after_forward=machine.reshard_after_forward,
        context=machine.context,
        pipeline=pipeline_settings(model, machine, degrees.pp, stage.context),
        reduces_itself=exact,
        async_tp=machine.async_tp,
    )
    if numerics.low_precision is not None:
        compute_low(parallel, numerics.low_precision, machine.context, stage.context, seed)
    if stage.lora is not None and stage.lora.dropout:
        place_dropout(parallel, stage.lora.dropout, machine.context, seed)
    offload = machine.offload_optimizer
    options = {"offload": offload, "alike": exact}
    state = assemble(stage, parallel, job=job, head_chunk_tokens=chunk, seed=seed, steps=steps, **options)
    state.recomputed = modes
    if exact:
        state.exact = make_exact(parallel, names, job)
    return state


def require_gpu(machine: Machine, device: torch.device) -> None:
    """Refuse, where device = "auto" turned out to be a CPU, what only a GPU has."""
    if device.type != "cpu":
        return
    if machine.async_tp:
        raise UserError(
            "machine.async_tp needs the symmetric memory of CUDA devices, and the device here is a CPU; remove it"
        )
    if machine.offload_optimizer:
        raise UserError(
            "machine.offload_optimizer moves state from a GPU to the host's memory, and the device here is a CPU; "
            "remove it"
        )


def make_exact(parallel: Parallel, names: list[str], job: Job) -> Exact:
    """Let all sums of gradients be exact. `names`: of the whole model's trainable parameters. A table that is the
    head's as well has two uses, whose gradients are rounded apart."""
    part = parallel.parts[0]
    tied = TABLE if isinstance(part, Decoder) and part.section.tie_embeddings and TABLE in names else None
    exact = reduce_exactly(parallel, names, job.control, tied=tied, once_a_step=parallel.pipeline is not None)
    parallel.after_backward = exact.sweep
    for part in parallel.parts:
        if tied and isinstance(part, Decoder) and part.embed is not None and part.norm is not None:
            part.second_use = partial(as_use, sink=exact.sink(TABLE))
    return exact


def assemble(
    stage: Stage,
    parallel: Parallel,
    *,
    job: Job,
    head_chunk_tokens: int,
    seed: int,
    steps: int,
    offload: bool = False,
    alike: bool = False,
) -> TrainState:
    """Optimizer, loss and scaler around a parallel model. `offload`, `alike`: see build_optimizer."""
    roles = {name: role for part in parallel.parts for name, role in part.roles().items()}  # pyright: ignore[reportCallIssue]
    splits = [part.splits() for part in parallel.parts if isinstance(part, Splittable)]
    optimizer = build_optimizer(
        parallel.named_parameters().items(),
        roles,
        stage.optim,
        local_params=parallel.locals(),
        layouts=layouts(parallel.named_parameters(), parallel.places, dict(ChainMap(*splits)), parallel.groups),
        group=parallel.groups.stage.group,
        offload=offload,
        alike=alike,
    )
    return TrainState(
        job=job,
        parallel=parallel,
        optimizer=optimizer,
        section=stage.optim,
        loss=open_loss(stage, head_chunk_tokens),
        scaler=LossScaler() if parallel.dtype == torch.float16 else LossScaler.off(),
        steps=steps,
        seed=seed,
        own_weight=is_import_path(stage.loss.kind) or stage.kind != "pretrain",
        counters=job.counters,
        average=Average.of(parallel, stage.remember.ema) if stage.remember.ema else None,
    )


def pipeline_settings(model: nn.Module, machine: Machine, pp: int, context: int) -> PipelineSettings | None:
    """How the layers lie on the pipeline, where there is one."""
    if pp == 1 or not isinstance(model, Decoder):
        return None
    section, asked = model.section, machine.pipeline
    layers = tuple(stage_layers(section, asked, pp, context))
    sizes = section.hidden_size, section.tie_embeddings
    return PipelineSettings(asked.schedule, asked.stages_on_a_rank, layers, *sizes)
