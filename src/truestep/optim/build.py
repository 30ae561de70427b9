"""From the recipe's section to an optimizer with complete, named state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist

from truestep.errors import UserError
from truestep.imports import is_import_path, load_object
from truestep.numerics.boxes import Layout, whole
from truestep.numerics.precision import require_master
from truestep.numerics.roles import Role
from truestep.optim.groups import Group, Named, param_groups
from truestep.optim.muon import Muon
from truestep.optim.named import NamedOptimizer
from truestep.optim.offload import BUCKET_ELEMENTS, Offloaded, at_rest, bucketed
from truestep.recipe.stage import Optim

OPTIMIZERS = ("adamw", "muon")
"""Kinds by name. Which parameters a kind updates by which method is decided in groups.py."""


def build_optimizer(
    named_params: Iterable[Named],
    roles: Mapping[str, Role],
    section: Optim,
    *,
    local_params: Mapping[str, torch.nn.Parameter] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    group: dist.ProcessGroup | None = None,
    offload: bool = False,
    alike: bool = False,
) -> NamedOptimizer:
    """`local_params`: the same parameters as plain tensors of what this rank holds, over the same memory; `layouts`:
    where that lies in the whole parameters, on every rank of `group`. Without them, parameters are whole and this
    process is alone. `offload`: state lies in the host's memory; not for an optimizer of the user's own.
    `alike`: every element is updated in the same way, wherever in a tensor it lies.

    An optimizer of the user's own is called as factory(named_params, roles, lr=..., **options) and returns a torch
    Optimizer over exactly those parameters. They are the model's own: DTensors where FSDP2 shards them. A
    parameter that tensor or expert parallelism cuts is this rank's part of it, also in its shape, and in a pipeline
    there are those of this rank's layers alone. Gradients are complete sums over ranks. So what goes element by element
    works as it is; what needs whole matrices or norms has to put them together."""
    named_params = list(named_params)
    require_master(named_params)
    if is_import_path(section.kind):
        assert not offload, section.kind
        return _own(named_params, roles, section)
    if section.kind not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UserError(f'optim.kind {section.kind!r} is unknown; write one of {known}, or "package.module:factory".')
    if section.options:
        names = ", ".join(section.options)
        raise UserError(f"optim.options ({names}) would not be used by {section.kind!r}; remove them.")
    local_params = dict(named_params) if local_params is None else local_params
    layouts = {name: whole(param.shape) for name, param in named_params} if layouts is None else layouts
    groups = [_local(some, local_params) for some in param_groups(named_params, roles, section)]
    makers: dict[str, Callable[[list[Group]], torch.optim.Optimizer]] = {
        "muon": lambda some: _muon(some, section, layouts, group),
        "adamw": lambda some: _adamw(some, section, alike),
    }
    if offload:
        ranks = group.size() if group else 1

        def elements(named: Named) -> int:
            return prod(layouts[named[0]].shape)  # the same on all ranks, which step together

        split = bucketed(groups, elements, BUCKET_ELEMENTS * ranks)
        return Offloaded(groups, [at_rest(makers[some[0].method](some)) for some in split])
    parts = []
    for method, make in makers.items():
        if some := [group for group in groups if group.method == method]:
            parts.append(make(some))
    return NamedOptimizer(groups, parts)


def _local(group: Group, local_params: Mapping[str, torch.nn.Parameter]) -> Group:
    return replace(group, params=[(name, local_params[name]) for name, _ in group.params])


def _torch_groups(groups: Sequence[Group]) -> list[dict]:
    return [
        {"params": [param for _, param in group.params], "lr": group.lr, "weight_decay": group.weight_decay}
        for group in groups
    ]


def _muon(
    groups: Sequence[Group], section: Optim, layouts: Mapping[str, Layout], ranks: dist.ProcessGroup | None
) -> Muon:
    return Muon(
        _torch_groups(groups),
        [layouts[name] for group in groups for name, _ in group.params],
        momentum=section.muon_momentum,
        num_iterations=section.muon_steps,
        dtype=section.muon_dtype,
        group=ranks,
    )


def _adamw(groups: Sequence[Group], section: Optim, alike: bool) -> torch.optim.AdamW:
    # on a CPU the fused kernel rounds the last few elements of a tensor differently from the others
    on_cpu = groups[0].params[0][1].device.type == "cpu"
    kind = {"foreach": True} if alike and on_cpu else {"fused": True}
    optimizer = torch.optim.AdamW(_torch_groups(groups), betas=section.betas, eps=section.eps, **kind)
    for group in groups:
        for _, param in group.params:
            # What torch makes lazily in the first step, made now: a checkpoint before it is complete.
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
            }
    return optimizer


def _own(named_params: list[Named], roles: Mapping[str, Role], section: Optim) -> NamedOptimizer:
    trainable = [(name, param) for name, param in named_params if param.requires_grad]
    factory = load_object(section.kind, "optimizer")
    try:
        optimizer = factory(trainable, roles, lr=section.lr, **section.options)
    except TypeError as error:
        raise UserError(
            f"optimizer {section.kind!r} does not take optim.options {section.options}: {error}."
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer {section.kind!r} made a {type(optimizer).__name__}; make a torch.optim.Optimizer.")
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, param in trainable:
        if id(param) not in held:
            raise UserError(
                f"optimizer {section.kind!r} leaves out {name!r}; give it every parameter, or freeze that one."
            )
    _materialise(optimizer)
    names = {id(param): name for name, param in trainable}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if value is not None and not isinstance(value, torch.Tensor):
                raise UserError(
                    f"optimizer {section.kind!r} keeps {key!r} of {names[id(param)]!r} as a {type(value).__name__}, "
                    f"which no checkpoint holds; keep it as a tensor."
                )
    return NamedOptimizer([Group("own", section.kind, section.lr, 0.0, trainable)], [optimizer])


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create the state that it would create in its first step: one step at rate 0 without decay and
    with zero gradients, after which the scalars, which count, return to zero."""
    if optimizer.state:
        return
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group |= {key: 0.0 for key in ("lr", "weight_decay") if key in group}
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, kept):
        group |= values
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                value.zero_()
