"""One decoder-only transformer for every family: the section's options choose norms, attention and MLP.

Shapes: B rows, T tokens, D hidden_size, V vocab_size, H query heads, G key/value heads, K head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from truestep.models.attention import mask
from truestep.models.cache import KVCache, numbered
from truestep.models.layers import Block, LayerInput, RMSNorm
from truestep.models.roles import infer_roles
from truestep.models.rope import Rope
from truestep.numerics.head import HeadInput
from truestep.numerics.roles import Role
from truestep.recipe.model import ModelSection


class Decoder(nn.Module):
    """`section` is resolved (every option filled in). `blocks` are the units of sharding, recomputation, compilation.

    A tied head has no parameter of its own: it is the embedding's weight, one Parameter under one name."""

    def __init__(self, section: ModelSection):
        super().__init__()
        self.section = section
        self.embed = nn.Embedding(section.vocab_size, section.hidden_size)
        self.blocks = nn.ModuleList(Block(section, layer) for layer in range(section.num_layers))
        self.norm = RMSNorm(section.hidden_size, section.norm_eps, bool(section.norm_offset))
        if not section.tie_embeddings:
            self.head = nn.Linear(section.hidden_size, section.vocab_size, bias=False)
        rope = Rope(section.head_dim, section.rope_theta, section.rope_scaling)
        # gemma3: layers with a window have a rotary base of their own, which is never scaled
        local = (
            Rope(section.head_dim, section.rope_local_theta or 10000.0, None) if section.family == "gemma3" else rope
        )
        windows = [section.window_of(layer) for layer in range(section.num_layers)]
        self._ropes = {window: rope if window is None else local for window in windows}

    def forward(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        head: Callable[[HeadInput], Any] | None = None,
        labels_BT: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """head(HeadInput), or without a head logits_BTV. Without positions they count from 0 (behind the cache);
        without documents every row is one. Labels are for modules with a loss of their own; this one reads none."""
        x_BTD = self.embed(tokens_BT)
        if torch.is_autocast_enabled(x_BTD.device.type):  # the residual stream is what FSDP2's mixed precision makes it
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        if self.section.embed_scale:
            x_BTD = x_BTD * torch.tensor(self.section.hidden_size**0.5, dtype=x_BTD.dtype)
        given = self._layer_inputs(tokens_BT, positions_BT, documents_BT, x_BTD.dtype, cache)
        for block in self.blocks:
            x_BTD = block(x_BTD, given[block.window])  # pyright: ignore[reportArgumentType, reportCallIssue]
        if cache is not None:
            cache.advance(tokens_BT, documents_BT)
        weight_VD = self.embed.weight if self.section.tie_embeddings else self.head.weight
        out = HeadInput(self.norm(x_BTD), weight_VD, self.section.logit_softcap)
        return out.logits() if head is None else head(out)

    def roles(self) -> dict[str, Role]:
        """What each parameter is for, by name."""
        return infer_roles(self, self.section.vocab_size)

    def _layer_inputs(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None,
        documents_BT: torch.Tensor | None,
        dtype: torch.dtype,
        cache: KVCache | None,
    ) -> dict[int | None, LayerInput]:
        """Rotary tables and mask of the layers with each window (None: full attention), made once for all of them."""
        start, length = (0 if cache is None else cache.length), tokens_BT.shape[1]
        if positions_BT is None:
            positions_BT = torch.arange(start, start + length, device=tokens_BT.device)[None]
        queries_BT = numbered(tokens_BT, documents_BT)
        keys_BS = queries_BT if cache is None else cache.documents_with(queries_BT)
        given: dict[int | None, LayerInput] = {}
        options = {"softcap": self.section.attention_softcap is not None, "head_dim": self.section.head_dim}
        tables = {rope: rope.tables(positions_BT, dtype) for rope in set(self._ropes.values())}
        for window, rope in self._ropes.items():
            plain = documents_BT is None and cache is None and (window is None or window >= length)
            dense = None if plain else mask(queries_BT, keys_BS, window, dtype=dtype, **options)
            given[window] = LayerInput(tables[rope], dense, cache)
        return given
