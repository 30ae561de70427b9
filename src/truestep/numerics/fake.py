"""Steps on fake tensors: shapes, dtypes and lifetimes of a real one, without memory and without numbers.

A step reads a few numbers back (its loss, the norm, how many rows have a target). A fake tensor has none, so here they
are made up: a number is 1, a condition that Python branches on holds, and `nonzero` finds every element.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def fake_mode() -> FakeTensorMode:
    """What fake tensors belong to; those of two modes cannot meet, so a dry run has one. Real tensors may be read."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """New tensors are fake ones in here, and their numbers are made up."""
    with mode, _Reads(), _Lists():
        yield


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


class _Lists(TorchFunctionMode):
    """Answers Tensor.tolist, which is no operator."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.tolist and isinstance(args[0], FakeTensor):
            return _nested(_made_up(args[0].dtype), args[0].shape)
        return func(*args, **(kwargs or {}))


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

    nn.Module.to_empty = to_empty  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.to_empty = original


@contextmanager
def cuda_kernels(wanted: bool) -> Iterator[None]:
    """Where a GPU has one kernel and a CPU several operators that keep more for the backward pass, the former's shapes
    and what it keeps: RMSNorm (its input and one number a row)."""
    with _Norms() if wanted else nullcontext():
        yield


class _Norms(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.nn.functional.rms_norm and isinstance(args[0], FakeTensor):
            return _FusedNorm.apply(args[0], (kwargs or {})["weight"])  # as torch hands it on, whoever calls
        return func(*args, **(kwargs or {}))


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
