"""A block of the decoder: which attention and which MLP a layer has."""

import torch
from torch import nn

from truestep.models.layers import Attention, GatedMLP, LayerInput, RMSNorm
from truestep.models.mla import LatentAttention
from truestep.models.moe import MoE
from truestep.recipe.model import ModelSection


class Block(nn.Module):
    """Attention (plain or latent) and MLP (dense or of experts), each added to the residual stream; norms stand before
    them (pre), after (post) or both."""

    def __init__(self, section: ModelSection, layer: int):
        super().__init__()
        before, after = section.norm_placement != "post", section.norm_placement != "pre"

        def norm(wanted: bool) -> nn.Module:
            size, eps, offset = section.hidden_size, section.norm_eps, bool(section.norm_offset)
            return RMSNorm(size, eps, offset) if wanted else nn.Identity()

        self.window = section.window_of(layer)
        self.attention_norm = norm(before)
        self.attention = Attention(section, layer) if section.mla is None else LatentAttention(section, layer)
        self.attention_post_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp = MoE(section) if section.has_experts(layer) else GatedMLP(section)
        self.mlp_post_norm = norm(after)

    def forward(self, x_BTD: torch.Tensor, given: LayerInput) -> torch.Tensor:
        x_BTD = x_BTD + self.attention_post_norm(self.attention(self.attention_norm(x_BTD), given))
        h_BTD = self.mlp_norm(x_BTD)
        h_BTD = self.mlp(h_BTD, given.real_BT) if isinstance(self.mlp, MoE) else self.mlp(h_BTD)
        return x_BTD + self.mlp_post_norm(h_BTD)
