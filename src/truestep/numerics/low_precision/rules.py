"""Which operand of which product is cast how, for each kind of low precision, and which parameters take part.

y = x Wᵀ has three products in training: y over the inputs, dX = g W over the outputs, dW = gᵀ x over the tokens.
"""

from truestep.numerics.formats import E4M3, E5M2
from truestep.numerics.low_precision.operand import Cast, MXScale, NVScale, RowScale, TensorScale
from truestep.numerics.roles import Role
from truestep.recipe.numerics import LowPrecision


class Rule:
    """Casts of activations, weights and gradients. `over_tokens`: the operands of dW are low; else dW is the product of
    the plain gradient and of x as the forward pass saw it. `hadamard`: they are rotated first. `stochastic`: gradients
    are rounded so."""

    def __init__(self, section: LowPrecision):
        self.kind = section.kind
        self.x, self.w, self.g = _casts(section)
        self.over_tokens = section.low_weight_gradient
        self.hadamard = section.kind == "nvfp4" and section.hadamard and self.over_tokens
        self.stochastic = section.stochastic

    @property
    def one_cast(self) -> bool:
        """Whether codes do not depend on the dimension that is summed over, so that one cast serves two products."""
        return isinstance(self.x, TensorScale)

    @property
    def block(self) -> int:
        """Values that share a block scale; 1 where blocks do not exist."""
        return self.x.block


def _casts(section: LowPrecision) -> tuple[Cast, Cast, Cast]:
    match section.kind:
        case "fp8-tensorwise":
            return TensorScale(E4M3), TensorScale(E4M3), TensorScale(E5M2)
        case "fp8-rowwise":
            rows = RowScale(E4M3)
            return rows, rows, rows
        case "mxfp8":
            blocks = MXScale(E4M3, section.block_scale)
            return blocks, blocks, blocks
        case "nvfp4":
            return NVScale(), NVScale(square=True), NVScale()


def is_low(section: LowPrecision, role: Role, layer: int | None, num_layers: int) -> bool:
    """Whether the product with a parameter is low: linear maps inside blocks that do not stay high. `layer`: its block,
    counted over the whole model, or None outside of blocks. Head, tables, norms, offsets, routers have other roles."""
    return role is Role.MATRIX and layer is not None and section.is_low_layer(layer, num_layers)
