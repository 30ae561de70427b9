"""The parts of a block: normalisation, attention with its projections, gated MLP."""

import torch
from torch import nn
from torch.nn.functional import gelu, rms_norm, silu

from truestep.models.attention import Mask, attend
from truestep.models.cache import KVCache
from truestep.models.rope import RopeTables
from truestep.recipe.model import ModelSection


class LayerInput:
    """What layers of one kind share for one microbatch. Neither a dataclass nor a pytree: FSDP2's mixed precision casts
    the tensors that it finds in those, and rotary tables must stay fp32."""

    def __init__(self, rope: RopeTables, mask: Mask, cache: KVCache | None):
        self.rope = rope
        self.mask = mask
        self.cache = cache


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · (offset + weight), at least in fp32, back in the dtype of x (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, offset: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = self.weight.to(wide)
        scale = scale + 1.0 if self.offset else scale
        return rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions, and RMSNorm of q and k where asked for."""

    def __init__(self, section: ModelSection, layer: int):
        super().__init__()
        s = section
        self.layer = layer
        self.head_dim = s.head_dim
        self.scale = (s.query_scale or s.head_dim) ** -0.5
        self.softcap = s.attention_softcap
        queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.q = nn.Linear(s.hidden_size, queries, bias=bool(s.attention_bias))
        self.k = nn.Linear(s.hidden_size, keys, bias=bool(s.attention_bias))
        self.v = nn.Linear(s.hidden_size, keys, bias=bool(s.attention_bias))
        self.out = nn.Linear(queries, s.hidden_size, bias=s.attention_out_bias)
        self.norm_whole = s.qk_norm == "full"
        sizes = {"none": None, "head": (s.head_dim, s.head_dim), "full": (queries, keys)}[s.qk_norm or "none"]
        self.q_norm = RMSNorm(sizes[0], s.norm_eps, bool(s.norm_offset)) if sizes else nn.Identity()
        self.k_norm = RMSNorm(sizes[1], s.norm_eps, bool(s.norm_offset)) if sizes else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, given: LayerInput) -> torch.Tensor:
        q_BTHK = given.rope.rotate(self._heads(self.q(x_BTD), self.q_norm))
        k_BTGK = given.rope.rotate(self._heads(self.k(x_BTD), self.k_norm))
        q, k, v = (y.transpose(1, 2) for y in (q_BTHK, k_BTGK, self.v(x_BTD).unflatten(-1, (-1, self.head_dim))))
        if given.cache is not None:
            k, v = given.cache.append(self.layer, k, v)
        mixed = attend(q, k, v, given.mask, self.scale, self.softcap)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        if self.norm_whole:
            return norm(x).unflatten(-1, (-1, self.head_dim))
        return norm(x.unflatten(-1, (-1, self.head_dim)))


class GatedMLP(nn.Module):
    """down(act(gate x) · up x): SwiGLU or GeGLU (arXiv 2002.05202)."""

    def __init__(self, section: ModelSection):
        super().__init__()
        inner, bias = section.intermediate_size, section.mlp_bias
        self.gate = nn.Linear(section.hidden_size, inner, bias=bias)
        self.up = nn.Linear(section.hidden_size, inner, bias=bias)
        self.down = nn.Linear(inner, section.hidden_size, bias=bias)
        self.tanh = section.activation == "gelu_tanh"

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x_BTD)
        active = gelu(gate, approximate="tanh") if self.tanh else silu(gate)
        return self.down(active * self.up(x_BTD))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream; norms stand before them (pre), after (post) or both."""

    def __init__(self, section: ModelSection, layer: int):
        super().__init__()
        before, after = section.norm_placement != "post", section.norm_placement != "pre"

        def norm(wanted: bool) -> nn.Module:
            size, eps, offset = section.hidden_size, section.norm_eps, bool(section.norm_offset)
            return RMSNorm(size, eps, offset) if wanted else nn.Identity()

        self.window = section.window_of(layer)
        self.attention_norm = norm(before)
        self.attention = Attention(section, layer)
        self.attention_post_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp = GatedMLP(section)
        self.mlp_post_norm = norm(after)

    def forward(self, x_BTD: torch.Tensor, given: LayerInput) -> torch.Tensor:
        x_BTD = x_BTD + self.attention_post_norm(self.attention(self.attention_norm(x_BTD), given))
        return x_BTD + self.mlp_post_norm(self.mlp(self.mlp_norm(x_BTD)))
