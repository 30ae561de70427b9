"""One factor of a product a bᵀ in a narrow format: codes, the scales of their blocks, and an outer scale.

Every way to make one is a `Cast`. Scales come from the largest magnitudes of the *global* tensor.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from truestep.numerics.axis import Axis
from truestep.numerics.formats import (
    E2M1,
    E4M3,
    Format,
    decode,
    e8m0_scale,
    encode,
    floor_log2,
    power_of_two,
    round_stochastic,
)

Along = tuple[Axis, ...]
_LEAST_BLOCK_SCALE = 2.0**-6  # the least normal e4m3; as torchao
_LEAST_NORMAL = 2.0**-126
_LEAST_OUTER = 2.0**-120  # its reciprocal over the least block scale is finite


class Operand:
    """(rows, K) values: codes · block · outer. `codes` as `encode` makes them; `block` (rows, K / size) or None;
    `outer` fp32, () or (rows, 1), or None for 1."""

    def __init__(self, form: Format, codes: torch.Tensor, block: torch.Tensor | None, outer: torch.Tensor | None):
        self.form, self.codes, self.block, self.outer = form, codes, block, outer

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What has to be kept for a backward pass; `Operand(form, *tensors)` is the operand again."""
        return self.codes, self.block, self.outer

    @property
    def transposed(self) -> "Operand":
        """The same for a product over the other dimension, where one scale serves the whole tensor."""
        assert self.block is None and (self.outer is None or self.outer.ndim == 0)
        return Operand(self.form, self.codes.t().contiguous(), None, self.outer)

    def inner(self, dtype: torch.dtype) -> torch.Tensor:
        """codes · block: few enough bits to be exact in fp32 and even in bfloat16."""
        values = decode(self.codes, self.form, dtype)
        if self.block is None:
            return values
        return (values.unflatten(-1, (self.block.shape[-1], -1)) * self.block.to(dtype)[..., None]).flatten(-2)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers that this stands for, rounded to `dtype` once."""
        wide = torch.promote_types(dtype, torch.float32)
        inner = self.inner(wide)
        return (inner if self.outer is None else inner * self.outer.to(wide)).to(dtype)


class Cast(ABC):
    """How a matrix (rows, K) of fp32 becomes an operand; K is the dimension that is summed over.

    `block`: values along K that share a block scale (1 where there is none). `tensor`: whether a scale of the whole
    tensor belongs to it, so that `amax` is needed."""

    block = 1
    tensor = False

    def __init__(self, form: Format):
        self.form = form

    def amax(self, x: torch.Tensor, axes: Iterable[Axis]) -> torch.Tensor | None:
        """The largest magnitude of the global tensor, fp32 (), where a scale needs it."""
        return largest(x.abs().max(), axes) if self.tensor else None

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, amax: torch.Tensor | None, columns: Along = (), draws: torch.Tensor | None = None
    ) -> Operand:
        """`columns`: the axes over which K is split. With `draws` (as round_stochastic wants them) it rounds so."""

    def _encode(self, scaled: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        return encode(scaled if draws is None else round_stochastic(scaled, self.form, draws), self.form)


class TensorScale(Cast):
    """One scale: largest format value over largest magnitude (torchao's "tensorwise", current scaling)."""

    tensor = True

    def __call__(
        self, x: torch.Tensor, amax: torch.Tensor | None, columns: Along = (), draws: torch.Tensor | None = None
    ) -> Operand:
        assert amax is not None
        scale = _fp8_scale(amax, self.form)
        return Operand(self.form, self._encode(x * scale, draws), None, scale.reciprocal())


class RowScale(Cast):
    """A power of two for each row, the largest with which nothing is clipped (torchao's "rowwise")."""

    def __call__(
        self, x: torch.Tensor, amax: torch.Tensor | None, columns: Along = (), draws: torch.Tensor | None = None
    ) -> Operand:
        exact = _fp8_scale(largest(x.abs().amax(-1, keepdim=True), columns), self.form)
        # Inf and NaN keep their NaN; the reciprocal of 2^127 would be subnormal
        scale = torch.where(exact.isfinite(), power_of_two(floor_log2(exact).clamp(-126, 126)), exact)
        return Operand(self.form, self._encode(x * scale, draws), None, scale.reciprocal())


class MXScale(Cast):
    """A power of two for each 32 values along K (OCP MX v1.0); `rule` as in `e8m0_scale`."""

    block = 32

    def __init__(self, form: Format, rule: str):
        super().__init__(form)
        self.rule = rule

    def __call__(
        self, x: torch.Tensor, amax: torch.Tensor | None, columns: Along = (), draws: torch.Tensor | None = None
    ) -> Operand:
        blocks = x.unflatten(-1, (-1, self.block))
        scale = e8m0_scale(blocks.abs().amax(-1), self.form, self.rule)
        # a block of zeros has scale 2^-127, which is subnormal: some devices flush it to 0
        wide = scale.float().clamp(min=_LEAST_NORMAL)[..., None]
        return Operand(self.form, self._encode((blocks / wide).flatten(-2), draws), scale, None)


class NVScale(Cast):
    """e2m1 with an e4m3 scale for each 16 values along K, or each 16x16 where `square`, over one fp32 scale of the
    tensor: amax / (448 · 6) (arXiv 2509.25149, appendix B). Rounding the block scale down may clip its largest value by
    up to 1/17. `amax` may also be (rows, 1), for several tensors one above the other."""

    block = 16
    tensor = True

    def __init__(self, square: bool = False):
        super().__init__(E2M1)
        self.square = square

    def __call__(
        self, x: torch.Tensor, amax: torch.Tensor | None, columns: Along = (), draws: torch.Tensor | None = None
    ) -> Operand:
        assert amax is not None
        outer = (amax / (E4M3.largest * E2M1.largest)).clamp(min=_LEAST_OUTER)
        blocks = x.unflatten(-1, (-1, self.block))
        most = blocks.abs().amax(-1)
        if self.square:
            tiles = most.unflatten(0, (-1, self.block)).amax(1)
            most = tiles.repeat_interleave(self.block, 0)
        scale = encode((most / E2M1.largest / outer).clamp(min=_LEAST_BLOCK_SCALE), E4M3)
        factor = (1.0 / outer) / scale.float()
        return Operand(E2M1, self._encode((blocks * factor[..., None]).flatten(-2), draws), scale, outer)


class NVRowScale(NVScale):
    """The same with an fp32 scale for each row: what a row becomes depends on no other row."""

    tensor = False

    def __call__(
        self, x: torch.Tensor, amax: torch.Tensor | None, columns: Along = (), draws: torch.Tensor | None = None
    ) -> Operand:
        return super().__call__(x, largest(x.abs().amax(-1, keepdim=True), columns), columns, draws)


def largest(amax: torch.Tensor, axes: Iterable[Axis]) -> torch.Tensor:
    """The largest over the ranks that hold other parts."""
    for axis in axes:
        amax = axis.max_(amax.contiguous())
    return amax


def _fp8_scale(amax: torch.Tensor, form: Format) -> torch.Tensor:
    """fp32(largest / amax). Of zeros, or magnitudes below fp32's normal numbers, a finite scale; of Inf NaN, for all of
    the tensor is lost and must be seen to be."""
    scale = (form.largest / amax.double().clamp(min=form.largest * 2.0**-126)).float()
    return torch.where(amax.isfinite(), scale, math.nan)
