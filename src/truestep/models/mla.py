"""Multi-head latent attention (arXiv 2405.04434, section 2.1).

D hidden_size, H heads, Q q_rank, C kv_rank, R rope_dim, P nope_dim, K = P + R the size of a query or key, V v_dim.
"""

import torch

from truestep.models.attention import attend
from truestep.models.context import Core, core_of
from truestep.models.layers import LayerInput, Linear, Parted, RMSNorm
from truestep.models.rope import score_factor
from truestep.numerics.axis import Axes, Axis
from truestep.numerics.pieces import Split
from truestep.recipe.model import ModelSection

_LATENT_EPS = 1e-6  # of the latent vectors' norms, whatever norm_eps is: so it is in DeepSeek-V3


class LatentAttention(Parted):
    """Latent vectors are projected on each rank's part of the sequence and gathered over the tensor axis, being smaller
    than hidden states; what comes from them is split by heads, as evenly as they go."""

    def __init__(self, section: ModelSection, layer: int):
        super().__init__()
        s, m = section, section.mla
        assert m is not None
        self.layer, self.mla, self.head_dim = layer, m, s.head_dim
        self.scale = (s.query_scale or s.head_dim) ** -0.5 * score_factor(s.rope_scaling)
        self.softcap = s.attention_softcap
        queries, bias = s.num_heads * s.head_dim, bool(s.attention_bias)
        if m.q_rank:
            self.q_a = Linear(s.hidden_size, m.q_rank, bias=bias)
            self.q_a_norm = RMSNorm(m.q_rank, _LATENT_EPS, False)
            self.q_b = Linear(m.q_rank, queries, bias=False)
        else:
            self.q = Linear(s.hidden_size, queries, bias=False)
        self.kv_a = Linear(s.hidden_size, m.kv_rank + m.rope_dim, bias=bias)
        self.kv_a_norm = RMSNorm(m.kv_rank, _LATENT_EPS, False)
        self.kv_b = Linear(m.kv_rank, s.num_heads * (m.nope_dim + m.v_dim), bias=False)
        self.out = Linear(s.num_heads * m.v_dim, s.hidden_size, bias=s.attention_out_bias)
        self.core: Core = attend
        self.tp = Axis("tp")

    def place(self, axes: Axes) -> None:
        self.tp = tp = axes.tp
        self.core = core_of(axes)
        if tp.size > 1:
            self.out.then_scatter(tp)

    def splits(self) -> dict[str, Split]:
        m = self.mla
        by_head = {name: Split("tp", 0, self.head_dim) for name in ("q.weight", "q_b.weight")}
        by_head["kv_b.weight"] = Split("tp", 0, m.nope_dim + m.v_dim)
        return by_head | {"out.weight": Split("tp", 1, m.v_dim)}

    def forward(self, x_BTD: torch.Tensor, given: LayerInput) -> torch.Tensor:
        m = self.mla
        q_BTHK, latent_BTC, turned_BTR = self._projected(x_BTD)
        q_plain, q_turned = q_BTHK.split((m.nope_dim, m.rope_dim), dim=-1)
        q_BTHK = torch.cat((q_plain, self._rotate(q_turned, given)), dim=-1)
        k_plain, v_BTHV = (
            self.kv_b(latent_BTC).unflatten(-1, (-1, m.nope_dim + m.v_dim)).split((m.nope_dim, m.v_dim), dim=-1)
        )
        k_turned = self._rotate(turned_BTR[:, :, None], given).expand(-1, -1, k_plain.shape[2], -1)
        k_BTHK = torch.cat((k_plain, k_turned), dim=-1)
        q, k, v = (y.transpose(1, 2) for y in (q_BTHK, k_BTHK, v_BTHV))
        if given.cache is not None:
            k, v = given.cache.append(self.layer, k, v)
        mixed = self.core(q, k, v, given.mask, self.scale, self.softcap)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _projected(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of this rank's heads, the latent vectors of keys and values, and the part of keys to be rotated, all
        of the whole sequence."""
        m = self.mla
        latent_BTC, turned_BTR = self.kv_a(x_BTD).split((m.kv_rank, m.rope_dim), dim=-1)
        latent_BTC = self.kv_a_norm(latent_BTC)
        first = self.q_a_norm(self.q_a(x_BTD)) if m.q_rank else x_BTD
        parts = self.tp.gather(torch.cat((first, latent_BTC, turned_BTR), dim=-1), 1) if self.tp.size > 1 else None
        if parts is not None:
            first, latent_BTC, turned_BTR = parts.split((first.shape[-1], m.kv_rank, m.rope_dim), dim=-1)
        q = self.q_b(first) if m.q_rank else self.q(first)
        return q.unflatten(-1, (-1, self.head_dim)), latent_BTC, turned_BTR

    def _rotate(self, x_BTHR: torch.Tensor, given: LayerInput) -> torch.Tensor:
        if self.mla.interleave:  # the pairs (2i, 2i + 1) become (i, i + R / 2), for queries and keys alike
            x_BTHR = x_BTHR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return given.rope.rotate(x_BTHR)
