"""Where the local operands of a linear map lie in the global ones: what its scales and random draws are defined on.

The global operands are those of one microbatch: x of (rows of the batch · tokens, inputs) and W of (outputs, inputs).
A rank holds part of the tokens, of the outputs or of the inputs. No data-parallel axis occurs here.
"""

import math
from collections.abc import Callable, Sequence

import torch

from truestep.errors import UserError
from truestep.numerics.axis import Axis

Runs = list[tuple[int, int]]
"""Contiguous pieces (first, length) of a row's tokens, in the order in which a rank holds them."""


class Tokens:
    """How the tokens of every row are split: `runs(T)` are those of a row of T that this rank holds. Split over no axis
    unless told otherwise."""

    def __init__(self, axes: Sequence[Axis] = (), runs: Callable[[int], Runs] = lambda num: [(0, num)]):
        self.axes = tuple(axis for axis in axes if axis.size > 1)
        self.runs = runs

    def numbers(self, rows: int, local: int, device: torch.device) -> torch.Tensor:
        """Numbers in the microbatch of `rows` times `local` tokens, int64: row · T + place in the row."""
        whole = local * math.prod(axis.size for axis in self.axes)
        runs = [torch.arange(first, first + length, device=device) for first, length in self.runs(whole)]
        return (torch.arange(rows, device=device)[:, None] * whole + torch.cat(runs)).flatten()


def split_tokens(cp: Axis | None = None, tp: Axis | None = None, *, balanced: bool = False) -> Tokens:
    """Split first over cp (`balanced`: a part of the head and its mirror of the tail), then contiguously over tp."""

    def runs(num: int) -> Runs:
        out = [(0, num)]
        if cp is not None and cp.size > 1 and balanced:
            part = num // (2 * cp.size)
            out = [(cp.rank * part, part), ((2 * cp.size - 1 - cp.rank) * part, part)]
        elif cp is not None and cp.size > 1:
            out = _cut(out, cp)
        return _cut(out, tp) if tp is not None else out

    return Tokens([axis for axis in (cp, tp) if axis is not None], runs)


def _cut(runs: Runs, axis: Axis) -> Runs:
    """Of the runs one after the other, the part of this rank of `axis`."""
    part = sum(length for _, length in runs) // axis.size
    begin, end, passed, out = axis.rank * part, (axis.rank + 1) * part, 0, []
    for first, length in runs:
        low, high = max(begin - passed, 0), min(end - passed, length)
        if low < high:
            out.append((first + low, high - low))
        passed += length
    return out


class Place:
    """`name`: the parameter's global name. `shape`: (outputs, inputs) of the whole weight; the local part begins at
    `start`. `outputs`, `inputs`: the axis over which they are split (column, row parallel), or None. `shares`: the axis
    whose ranks all compute the whole product and have a share each of the gradient of its result, as where heads of
    keys and values serve several ranks.

    Neither a dataclass nor a module, so that nobody casts or moves what is in it."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        start: tuple[int, int] = (0, 0),
        tokens: Tokens | None = None,
        outputs: Axis | None = None,
        inputs: Axis | None = None,
        shares: Axis | None = None,
    ):
        self.name, self.shape, self.start = name, shape, start
        self.tokens = tokens or Tokens()
        self.outputs = (outputs,) if outputs is not None and outputs.size > 1 else ()
        self.inputs = (inputs,) if inputs is not None and inputs.size > 1 else ()
        self.shares = shares if shares is not None and shares.size > 1 else None


def check_shapes(kind: str, block: int, place: Place, local: tuple[int, int], context: int | None = None) -> None:
    """Refuse a local weight of shape `local`, and rows of `context` tokens (None: products over tokens stay high),
    whose blocks of `block` values would lie on two ranks or reach over an end."""
    for what, start, size, whole in zip(("outputs", "inputs"), place.start, local, place.shape):
        if start % block or size % block:
            held = f"{whole} {what}" if size == whole else f"{size} of {whole} {what} on a rank, from {start}"
            near = _nearest(whole, block * round(whole / size))
            raise UserError(
                f"numerics.low_precision.kind = {kind!r} scales blocks of {block} values, but {place.name} has {held}; "
                f'the nearest number that fits is {near}, or take kind = "fp8-rowwise".'
            )
    if context is None:
        return
    for first, length in place.tokens.runs(context):
        if first % block or length % block:
            near = _nearest(context, block * round(context / length))
            raise UserError(
                f"numerics.low_precision.kind = {kind!r} scales blocks of {block} tokens, but a rank holds {length} of "
                f"a row's {context}; the nearest context that fits is {near}, or set "
                f'numerics.low_precision.weight_gradient = "high".'
            )


def _nearest(number: int, unit: int) -> int:
    return max(1, round(number / unit)) * unit
