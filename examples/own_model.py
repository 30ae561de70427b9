"""A model of your own: any torch module that takes token ids and returns logits. This one has no attention."""

import torch
from torch import nn
from torch.nn.functional import glu, pad


class Block(nn.Module):
    """A gated causal convolution (arXiv 1612.08083)."""

    def __init__(self, width: int, reach: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.convolution = nn.Conv1d(width, 2 * width, reach)
        self.past = reach - 1

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        y_BDT = pad(self.norm(x_BTD).transpose(1, 2), (self.past, 0))  # a token sees itself and those before it
        return x_BTD + glu(self.convolution(y_BDT), dim=1).transpose(1, 2)


class Convolutions(nn.Module):
    """`vocab_size` comes from the tokenizer, the rest from model.options. The list of blocks is what gets sharded."""

    def __init__(self, vocab_size: int, width: int = 64, depth: int = 3, reach: int = 8):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, reach) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x_BTD = self.table(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))
