"""[numerics]: how sums are formed and in which number formats the products of a block are computed."""

from typing import Literal

from truestep.recipe.section import Section, field

Kind = Literal["fp8-tensorwise", "fp8-rowwise", "mxfp8", "nvfp4"]


class LowPrecision(Section):
    """Products of linear maps in blocks with operands of 8 or 4 bits. Head, embeddings, norms, router and biases stay
    as `machine.precision` says; master weights, accumulation and reductions stay fp32."""

    kind: Kind = field(
        help="fp8-tensorwise: one scale a tensor, e4m3 and for gradients e5m2; fp8-rowwise: one power of two a row, "
        "e4m3; mxfp8: a power of two for each 32 values, e4m3; nvfp4: e2m1 with an e4m3 scale for each 16 values"
    )
    weight_gradient: Literal["low", "high"] | None = field(
        None, help="operands of the product that gives the weight's gradient; by default high for fp8-rowwise, else low"
    )
    stochastic_rounding: bool | None = field(
        None, help="round gradients up or down at random, unbiased; by default true for nvfp4 only"
    )
    hadamard: bool = field(
        True, help="random Hadamard transform of 16 tokens on both operands of the product for the weight's gradient"
    )
    block_scale: Literal["ceil", "floor"] = field(
        "ceil",
        help="powers of two of blocks: ceil never clips the largest value (NVIDIA), floor is the rule of the MX "
        "specification",
    )
    high_first: int = field(0, help="first blocks that stay high", ge=0)
    high_last: int | None = field(
        None, help="last blocks that stay high; by default 15 % of them for nvfp4, rounded up, else 0", ge=0
    )

    @property
    def low_weight_gradient(self) -> bool:
        return (self.weight_gradient or ("high" if self.kind == "fp8-rowwise" else "low")) == "low"

    @property
    def stochastic(self) -> bool:
        return self.kind == "nvfp4" if self.stochastic_rounding is None else self.stochastic_rounding

    def is_low_layer(self, layer: int, num_layers: int) -> bool:
        """Whether block `layer` of `num_layers` computes in low precision."""
        last = self.high_last
        if last is None:
            last = -(-15 * num_layers // 100) if self.kind == "nvfp4" else 0
        return self.high_first <= layer < num_layers - last


class Numerics(Section):
    """Sums and number formats."""

    reduction: Literal["fast", "exact"] = field(
        "fast",
        help="fast: native reductions with fp32 accumulation; exact: gradients are rounded to integers before any sum, "
        "so that data-parallel and pipeline degrees change no bit",
    )
    low_precision: LowPrecision | None = field(None, help="number formats of the products in blocks")
