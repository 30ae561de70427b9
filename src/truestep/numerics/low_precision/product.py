"""The three products of a linear map in low precision, and what a model shares for them."""

import weakref
from typing import Any

import torch

from truestep.numerics.low_precision.draws import Draws, signs
from truestep.numerics.low_precision.hadamard import rotate
from truestep.numerics.low_precision.operand import Operand
from truestep.numerics.low_precision.place import Place, check_shapes
from truestep.numerics.low_precision.rules import Rule
from truestep.numerics.low_precision.units import Units, find_units, multiply
from truestep.recipe.numerics import LowPrecision

Kept = tuple[Operand, Operand | None]
"""x as a factor of y; x as the factor of dW that is kept for the backward pass, None where there is none."""


class LowPrecisionModel:
    """What all products of one model share: the rule, the draws, the device's units, and the last activation cast.

    `draws.begin(step, microbatch)` is to be called as `Draws` says."""

    def __init__(self, section: LowPrecision, seed: int, device: torch.device, units: Units | None = None):
        self.rule = Rule(section)
        self.draws = Draws(seed)
        self.signs = signs(seed, device)
        self.units = find_units(device) if units is None else units
        self._last: tuple[Any, ...] = ()

    def product(self, place: Place, local: tuple[int, int], context: int | None = None) -> "LowPrecisionProduct":
        """The product for a local weight of shape `local`; UserError where blocks would not fit (`context`: tokens of a
        row in training)."""
        if self.rule.block > 1:
            check_shapes(self.rule.kind, self.rule.block, place, local, context if self.rule.over_tokens else None)
        return LowPrecisionProduct(self, place)

    def activation(self, x: torch.Tensor, dtype: torch.dtype, place: Place, keep: bool) -> Kept:
        """x as an operand, cast once for the maps that take the very same tensor (q, k and v; gate and up)."""
        if torch.compiler.is_compiling():
            return self._activation(x, dtype, place, keep)
        tag = (x._version, dtype, place.tokens.axes, place.inputs, keep)
        if self._last and self._last[0]() is x and self._last[1] == tag:
            return self._last[2]
        kept = self._activation(x, dtype, place, keep)
        self._last = (weakref.ref(x, self._forget), tag, kept)
        return kept

    def _forget(self, gone: Any) -> None:
        if self._last and self._last[0] is gone:
            self._last = ()

    def _activation(self, x: torch.Tensor, dtype: torch.dtype, place: Place, keep: bool) -> Kept:
        rule, tokens = self.rule, place.tokens.axes
        x_NI = _matrix(x.to(dtype))
        over_inputs = rule.x(x_NI, rule.x.amax(x_NI, (*tokens, *place.inputs)), place.inputs)
        if not keep or rule.one_cast or not rule.over_tokens:
            return over_inputs, over_inputs if keep else None
        x_IN = self._turned(x_NI)
        return over_inputs, rule.x(x_IN, rule.x.amax(x_IN, (*tokens, *place.inputs)), tokens)

    def gradient(self, g: torch.Tensor, place: Place, moment: tuple[int, int], keep: bool) -> Kept:
        """The gradient of y as a factor of dX, and as one of dW where that is low."""
        rule, tokens = self.rule, place.tokens.axes
        g_NO = _matrix(g)
        amax = rule.g.amax(g_NO, (*tokens, *place.outputs))
        over_outputs = rule.g(g_NO, amax, place.outputs, self._drawn(g, place, moment, "dX"))
        if not keep or rule.one_cast or not rule.over_tokens:
            return over_outputs, over_outputs if keep else None
        g_ON = self._turned(g_NO)
        drawn = self._drawn(g, place, moment, "dW")
        amax = rule.g.amax(g_ON, (*tokens, *place.outputs))
        return over_outputs, rule.g(g_ON, amax, tokens, None if drawn is None else drawn.t())

    def _turned(self, x_NF: torch.Tensor) -> torch.Tensor:
        """Tokens last, rotated where the rule asks for it."""
        x_FN = x_NF.t().contiguous()
        return rotate(x_FN, self.signs) if self.rule.hadamard else x_FN

    def _drawn(self, g: torch.Tensor, place: Place, moment: tuple[int, int], use: str) -> torch.Tensor | None:
        if not self.rule.stochastic:
            return None
        rows = g.shape[:-2].numel()
        tokens_N = place.tokens.numbers(rows, g.shape[-2], g.device)
        return self.draws.sixteen_bits(place.name, use, moment, tokens_N, place.start[0], g.shape[-1], place.shape[0])


class LowPrecisionProduct:
    """(x (..., T, inputs), W (outputs, inputs)) -> x Wᵀ (..., T, outputs), in the dtype of x or of autocast.

    Operands are this rank's parts of the global ones, as `place` says; where the inputs are split the result is this
    rank's summand."""

    def __init__(self, model: LowPrecisionModel, place: Place):
        self.model, self.place = model, place
        # the key of the draws changes every step and would be compiled in; collectives break the graph anyhow
        self.compiles = not (
            model.rule.stochastic or place.tokens.axes or place.outputs or place.inputs or place.shares
        )

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self._call(x, w) if self.compiles else _uncompiled(self, x, w)  # pyright: ignore[reportCallIssue]

    def _call(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return _Product.apply(x, w, self, x.dtype)  # pyright: ignore[reportReturnType]
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return _Product.apply(x, w, self, dtype)  # pyright: ignore[reportReturnType]


@torch.compiler.disable
def _uncompiled(product: LowPrecisionProduct, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return product._call(x, w)


class _Product(torch.autograd.Function):
    """Keeps x in the low format, and W as it came (the parameter, whose memory exists anyway); W is cast again in the
    backward pass. Gradients pass straight through the casts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, product: LowPrecisionProduct, dtype: torch.dtype):
        model, place = product.model, product.place
        rule = model.rule
        low_x, kept_x = model.activation(x, dtype, place, keep=ctx.needs_input_grad[1])
        w_OI = _matrix(w.to(dtype))
        amax = rule.w.amax(w_OI, (*place.outputs, *place.inputs))
        y = multiply(low_x, rule.w(w_OI, amax, place.inputs), dtype, model.units)
        form = None if kept_x is None else kept_x.form
        ctx.save_for_backward(w, amax, *(() if kept_x is None else kept_x.tensors))
        ctx.kept = (product, dtype, form, model.draws.moment, x.shape, x.dtype)
        return y.view(*x.shape[:-1], len(w_OI))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        product, dtype, form, moment, shape, x_dtype = ctx.kept
        w, amax, *x_tensors = ctx.saved_tensors
        model, place = product.model, product.place
        rule, g = model.rule, grads[0]
        need_x, need_w = _wanted(ctx)
        if place.shares is not None:
            # what is cast must be the whole gradient, and one rank's share of what comes of it is all of it
            g = place.shares.sum_(g.clone(memory_format=torch.contiguous_format))
            if place.shares.rank > 0:
                return w.new_zeros(shape, dtype=x_dtype) if need_x else None, torch.zeros_like(w), None, None
        g_x, g_w = model.gradient(g, place, moment, keep=need_w)
        dx = dw = None
        if need_x:
            w_IO = _matrix(w.to(dtype)).t().contiguous()
            low_w = rule.w(w_IO, amax, place.outputs)
            dx = multiply(g_x, low_w, dtype, model.units).view(shape).to(x_dtype)
        if need_w:
            kept_x = Operand(form, *x_tensors)
            if not rule.over_tokens:
                dw = g.to(dtype).flatten(0, -2).t() @ kept_x.values(dtype)
            elif rule.one_cast:
                dw = multiply(g_w.transposed, kept_x.transposed, dtype, model.units)
            else:
                dw = multiply(g_w, kept_x, dtype, model.units)
            dw = dw.to(w.dtype)
        return dx, dw, None, None


def _wanted(ctx: Any) -> tuple[bool, bool]:
    """Which of dX and dW this backward pass is for: a zero-bubble pipeline asks for them one after the other.

    Private torch API: nothing public tells a Python function what the pass that runs will use."""
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    x_node, w_node = (node for node, _ in ctx.next_functions[:2])
    return _runs(x_node), _runs(w_node)


def _runs(node: Any) -> bool:
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad was asked for
        return True


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """(..., n) as an fp32 matrix (rows, n): casts compute in fp32 whatever the dtype."""
    return x.flatten(0, -2).float().contiguous()
