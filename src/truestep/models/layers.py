"""The dense parts of a block: normalisation, linear maps, attention with its projections, gated MLP.

Along the tensor axis a block's input and output are parts of the sequence (sequence parallelism, arXiv 2205.05198):
attention and MLP gather it, work on their own heads or columns, and add up and cut their results. Along the context
axis everything but the core of attention works on a part of the sequence. `place` tells a module its axes; one that
was not placed is whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain, islice

import torch
from torch import nn
from torch.nn.functional import embedding, gelu, linear, rms_norm, silu

from truestep.models.attention import attend, kv_share
from truestep.models.cache import KVCache
from truestep.models.context import Core, Rule, core_of
from truestep.models.rope import RopeTables
from truestep.numerics.axis import Axes, Axis
from truestep.numerics.blockwise import Held, Kind
from truestep.numerics.fused import gathered_products, product_scattered
from truestep.numerics.low_rank import Adapted
from truestep.numerics.pieces import Split, span
from truestep.recipe.model import ModelSection


class LayerInput:
    """What layers of one kind share for one microbatch. Neither a dataclass nor a pytree: FSDP2's mixed precision casts
    the tensors that it finds in those, and rotary tables must stay fp32. `real_BT` is false for the padding in this
    rank's part of the sequence; None: there is none."""

    def __init__(self, rope: RopeTables, mask: Rule, cache: KVCache | None, real_BT: torch.Tensor | None = None):
        self.rope = rope
        self.mask = mask
        self.cache = cache
        self.real_BT = real_BT


class Parted(nn.Module, ABC):
    """A module that knows how its work is split over axes."""

    @abstractmethod
    def place(self, axes: Axes) -> None:
        """Take up the axes; called once, before the parameters are cut."""

    @abstractmethod
    def splits(self) -> dict[str, Split]:
        """How its own parameters are split, by their names in it; those that are not named are whole on every rank.
        Names of parameters that do not exist (biases) do no harm. Called after `place`."""


class Linear(nn.Linear):
    """y = x Wᵀ + b. `product` is the seam of low precision: (x, W) -> x Wᵀ. `after` is what is done with the product
    before the bias is added, which must not be added once a rank; `fused` is both in one, where there is no `product`.
    `rows`: the outputs that are wanted. `lora`: adapters, whose product is added to that of the weight.
    `held`: the weight itself, in few bits, where there is no `weight`; of a map that no axis splits."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    fused: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    after: Callable[[torch.Tensor], torch.Tensor] | None = None
    rows: slice | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        self.lora: Adapted | None = None
        self.held: Held | None = None

    def hold(self, kind: Kind) -> Held:
        """Hold the weight in few bits from now on; it has no values yet."""
        self.held = Held(kind, (self.out_features, self.in_features)).to(self.weight.device)
        self.register_parameter("weight", None)
        return self.held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.held is not None:
            y = self._adapted(self.held(x), x)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        weight, bias = self.wanted()
        if self.after is None and self.product is None:
            return self._adapted(linear(x, weight, bias), x)
        if self.fused is not None and self.product is None:
            y = self.fused(x, weight)
            if self.lora is not None and self.after is not None:
                y = y + self.lora.up([self.after(low) for low in self.lora.down(x)])
        else:
            y = self._adapted((self.product or linear)(x, weight), x)
            y = y if self.after is None else self.after(y)
        return y if bias is None else y + bias.to(y.dtype)

    def _adapted(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y if self.lora is None else y + self.lora(x, self.rows)

    def whole(self) -> torch.Tensor:
        """The weight with what the adapters add."""
        return self.weight if self.lora is None else self.weight + self.lora.delta()

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the outputs that are wanted."""
        if self.rows is None:
            return self.weight, self.bias
        return self.weight[self.rows], None if self.bias is None else self.bias[self.rows]

    def then_scatter(self, axis: Axis) -> None:
        """The outputs are to be summed over the axis and their sequence (dim 1) cut, before the bias is added."""
        self.after = lambda y: axis.scatter_sum(y, 1)
        self.fused = (lambda x, weight: product_scattered(x, weight, axis, 1)) if axis.fuses else None


class Table(nn.Embedding):
    """A table of tokens. `lora`: adapters, whose rows are added to its own."""

    def __init__(self, num_tokens: int, size: int):
        super().__init__(num_tokens, size)
        self.lora: Adapted | None = None

    def rows_of(self, tokens_BT: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Of the tokens whose rows this rank of the axis has; 0 for others."""
        if axis.size == 1:
            x_BTD = self(tokens_BT)
            return x_BTD if self.lora is None else x_BTD + self.lora.looked_up(tokens_BT)
        first, stop = span(self.num_embeddings, axis.size, axis.rank)
        own_BT = (tokens_BT >= first) & (tokens_BT < stop)
        local_BT = (tokens_BT - first) * own_BT
        x_BTD = embedding(local_BT, self.weight) * own_BT[..., None]
        return x_BTD if self.lora is None else x_BTD + self.lora.looked_up(local_BT, own_BT)

    def whole(self) -> torch.Tensor:
        """This rank's rows with what the adapters add."""
        return self.weight if self.lora is None else self.weight + _transposed(self.lora.delta())


def _transposed(x: torch.Tensor | float) -> torch.Tensor | float:
    return x.t() if isinstance(x, torch.Tensor) else x


def of_whole(x_BTD: torch.Tensor, axis: Axis, *maps: Linear) -> list[torch.Tensor]:
    """Each map of the whole sequence, of which `x_BTD` is this rank's part along the axis."""
    if axis.fuses and all(one.product is None and not (one.lora is not None and one.lora.drops) for one in maps):
        weights, biases = zip(*(one.wanted() for one in maps))
        low = [[] if one.lora is None else one.lora.matrices() for one in maps]
        products = iter(gathered_products(x_BTD, [*weights, *chain(*low)], axis, 1))
        found = [y if bias is None else y + bias.to(y.dtype) for y, bias in zip(islice(products, len(maps)), biases)]
        lows = [list(islice(products, len(matrices))) for matrices in low]
        return [y if one.lora is None else y + one.lora.up(low, one.rows) for y, one, low in zip(found, maps, lows)]
    x_BTD = axis.gather(x_BTD, 1)
    return [one(x_BTD) for one in maps]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · (offset + weight), at least in fp32, back in the dtype of x (arXiv 1910.07467).

    `across`: the axis over which the features are split, where they are."""

    across: Axis | None = None

    def __init__(self, size: int, eps: float, offset: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.size = size
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = self.weight.to(wide)
        scale = scale + 1.0 if self.offset else scale
        if self.across is None:
            return rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)
        square = self.across.sum(x.to(wide).square().sum(-1, keepdim=True)) / self.size
        return (x.to(wide) * torch.rsqrt(square + self.eps) * scale).to(x.dtype)


class Attention(Parted):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions, and RMSNorm of q and k where asked for.

    Over the tensor axis query heads are split as evenly as they go. Key/value heads are split along where the axis
    divides both; else every rank holds all of their weights, computes the heads that its queries need, and has a share
    of their gradient."""

    def __init__(self, section: ModelSection, layer: int):
        super().__init__()
        s = section
        self.layer = layer
        self.head_dim = s.head_dim
        self.num_heads, self.num_kv_heads = s.num_heads, s.num_kv_heads
        self.scale = (s.query_scale or s.head_dim) ** -0.5
        self.softcap = s.attention_softcap
        queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.q = Linear(s.hidden_size, queries, bias=bool(s.attention_bias))
        self.k = Linear(s.hidden_size, keys, bias=bool(s.attention_bias))
        self.v = Linear(s.hidden_size, keys, bias=bool(s.attention_bias))
        self.out = Linear(queries, s.hidden_size, bias=s.attention_out_bias)
        self.norm_whole = s.qk_norm == "full"
        sizes = {"none": None, "head": (s.head_dim, s.head_dim), "full": (queries, keys)}[s.qk_norm or "none"]
        self.q_norm = RMSNorm(sizes[0], s.norm_eps, bool(s.norm_offset)) if sizes else nn.Identity()
        self.k_norm = RMSNorm(sizes[1], s.norm_eps, bool(s.norm_offset)) if sizes else nn.Identity()
        self.core: Core = attend
        self.tp = Axis("tp")
        self.kv_heads: slice | None = None
        self.kv_of_query: list[int] | None = None

    def place(self, axes: Axes) -> None:
        self.tp = tp = axes.tp
        self.core = core_of(axes)
        if tp.size == 1:
            return
        self.out.then_scatter(tp)
        if self.splits_kv:
            across = (self.q_norm, self.k_norm)
        else:
            across = (self.q_norm,)
            first, stop = span(self.num_heads, tp.size, tp.rank)
            needed, self.kv_of_query = kv_share(range(first, stop), self.num_heads // self.num_kv_heads)
            self.kv_heads = slice(needed.start, needed.stop)
            rows = slice(needed.start * self.head_dim, needed.stop * self.head_dim)
            self.v.rows = rows
            self.k.rows = None if self.norm_whole else rows
        if self.norm_whole:
            for norm in across:
                assert isinstance(norm, RMSNorm)
                norm.across = tp

    @property
    def splits_kv(self) -> bool:
        return self.num_heads % self.tp.size == 0 and self.num_kv_heads % self.tp.size == 0

    def splits(self) -> dict[str, Split]:
        heads = ["q", *(["k", "v"] if self.splits_kv else [])]
        table = {f"{name}.{kind}": Split("tp", 0, self.head_dim) for name in heads for kind in ("weight", "bias")}
        table["out.weight"] = Split("tp", 1, self.head_dim)
        if self.norm_whole:
            norms = ["q_norm", *(["k_norm"] if self.splits_kv else [])]
            table |= {f"{name}.weight": Split("tp", 0, self.head_dim) for name in norms}
        return table

    def forward(self, x_BTD: torch.Tensor, given: LayerInput) -> torch.Tensor:
        q_BTQ, k_BTN, v_BTN = of_whole(x_BTD, self.tp, self.q, self.k, self.v)
        q_BTHK = given.rope.rotate(self._heads(q_BTQ, self.q_norm))
        k_BTGK, v_BTGK = self._heads(k_BTN, self.k_norm), v_BTN.unflatten(-1, (-1, self.head_dim))
        if self.kv_heads is not None:
            k_BTGK = k_BTGK if self.k.rows else k_BTGK[:, :, self.kv_heads]
            v_BTGK = v_BTGK if self.v.rows else v_BTGK[:, :, self.kv_heads]
        q, k, v = (y.transpose(1, 2) for y in (q_BTHK, given.rope.rotate(k_BTGK), v_BTGK))
        if given.cache is not None:
            k, v = given.cache.append(self.layer, k, v)
        if self.kv_of_query is not None:
            k, v = k[:, self.kv_of_query], v[:, self.kv_of_query]
        mixed = self.core(q, k, v, given.mask, self.scale, self.softcap)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        if self.norm_whole:
            return norm(x).unflatten(-1, (-1, self.head_dim))
        return norm(x.unflatten(-1, (-1, self.head_dim)))


class GatedMLP(Parted):
    """down(act(gate x) · up x): SwiGLU or GeGLU (arXiv 2002.05202). Over the tensor axis inner features are split."""

    def __init__(self, section: ModelSection, inner: int | None = None):
        super().__init__()
        inner, bias = inner or section.intermediate_size, section.mlp_bias
        self.gate = Linear(section.hidden_size, inner, bias=bias)
        self.up = Linear(section.hidden_size, inner, bias=bias)
        self.down = Linear(inner, section.hidden_size, bias=bias)
        self.tanh = section.activation == "gelu_tanh"
        self.tp = Axis("tp")

    def place(self, axes: Axes) -> None:
        self.tp = tp = axes.tp
        if tp.size > 1:
            self.down.then_scatter(tp)

    def splits(self) -> dict[str, Split]:
        columns = {f"{name}.{kind}": Split("tp", 0) for name in ("gate", "up") for kind in ("weight", "bias")}
        return columns | {"down.weight": Split("tp", 1)}

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate, up = of_whole(x_BTD, self.tp, self.gate, self.up)
        active = gelu(gate, approximate="tanh") if self.tanh else silu(gate)
        return self.down(active * up)
