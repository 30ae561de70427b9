"""Steps on fake tensors: shapes, dtypes and lifetimes of a real one, without memory and without numbers.

A step reads a few numbers back (its loss, the norm, how many rows have a target). A fake tensor has none, so here they
are made up: a number is 1, a condition that Python branches on holds, and `nonzero` finds every element.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode


def fake_mode() -> FakeTensorMode:
    """What fake tensors belong to; those of two modes cannot meet, so a dry run has one. Real tensors may be read."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(mode: FakeTensorMode, as_on_cuda: bool = False) -> Iterator[None]:
    """New tensors are fake ones in here, and their numbers are made up. `as_on_cuda`: RMSNorm has the shapes and keeps
    what a GPU's one kernel does (its input and one number a row), where a CPU has several operators."""
    rms_norm = _rms_norm if as_on_cuda else torch.rms_norm
    with mode, _Reads(), replaced(torch.Tensor, "tolist", _tolist), replaced(torch, "rms_norm", rms_norm):
        yield


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """What is no operator is replaced by name. (A TorchFunctionMode is off in backward passes, where blocks are
    computed again.)"""
    original = owner.__dict__.get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


class _Reads(TorchDispatchMode):
    """Answers the operators that would look at the elements of a fake tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped(args[0], args[1], given["offs"] if "offs" in given else args[2])
        if func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            return func(*args, **given)
        if not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return func(*args, **given)
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_zeros((args[0].numel(), args[0].ndim), dtype=torch.int64)
        return _made_up(args[0].dtype)


_original_tolist = torch.Tensor.tolist


def _tolist(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, FakeTensor):
        return _nested(_made_up(tensor.dtype), tensor.shape)
    return _original_tolist(tensor)


def _rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> Any:
    return _FusedNorm.apply(x, weight)


def _made_up(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """What torch knows the shape of in bfloat16 only: rows in groups times a matrix for each, (M, K) by (G, K, N), or
    the products over the rows of each group, (K, M) by (M, N)."""
    if b.ndim == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(len(ends), a.shape[0], b.shape[1])


def _nested(value: Any, shape: torch.Size) -> Any:
    return value if not shape else [_nested(value, shape[1:]) for _ in range(shape[0])]


@contextmanager
def fake_memory(mode: FakeTensorMode) -> Iterator[None]:
    """Modules get fake tensors where they would get memory (`to_empty`), and everything else is real: meshes compute
    with tensors of their own when they are made. A method of torch is replaced for as long as this lasts."""
    original = nn.Module.to_empty

    def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        with mode:
            return original(self, device=device, recurse=recurse)

    with replaced(nn.Module, "to_empty", to_empty):
        yield


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """scaled_dot_product_attention of heads whose values are narrower than their keys, for which a CPU has no fused
    kernel and a GPU has."""
    if q.shape[-1] == v.shape[-1]:
        return scaled_dot_product_attention(q, k, v, **options)
    causal, scale = options["is_causal"], options["scale"]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, options["attn_mask"], True, 0.0, causal, scale=scale)[0]


class _FusedNorm(torch.autograd.Function):
    """Shapes and lifetimes of CUDA's fused RMSNorm."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
