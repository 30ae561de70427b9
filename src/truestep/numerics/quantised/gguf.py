"""GGUF files, as llama.cpp reads them: names of tensors, and reading back what they stand for. Needs the package gguf.

Blocks of 32 neighbours share a float16 scale (and, of Q4_1, a least value)."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from truestep.errors import ModelError

FILE = "model.gguf"
BLOCK = 32
PERMUTED = ("llama", "mistral")
"""Families whose q and k llama.cpp rotates in neighbouring pairs, where Hugging Face rotates halves."""

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def package() -> ModuleType:
    """The package gguf; ModelError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ModelError(
            "GGUF files need the package gguf, which is not installed; pip install truestep[gguf]"
        ) from None
    return gguf


def gguf_name(name: str) -> str:
    """The name in GGUF of a Hugging Face tensor of a family without experts."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    return f"blk.{match[1]}.{_INNER[match[2]]}.{kind}" if match else f"{_OUTER[module]}.{kind}"


def hf_name(name: str) -> str:
    """The inverse."""
    module, _, kind = name.rpartition(".")
    outer, inner = ({ours: theirs for theirs, ours in names.items()} for names in (_OUTER, _INNER))
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
    return f"model.layers.{match[1]}.{inner[match[2]]}.{kind}" if match else f"{outer[module]}.{kind}"


def to_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k (or of their offsets) from halves of a head to neighbouring pairs."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


class OfFile:
    """A tensor of a GGUF file, decoded to float32 when it is read. `heads`: of q and k that lie in pairs, else 0."""

    def __init__(self, tensor: Any, heads: int):
        self._tensor, self._heads = tensor, heads

    def get_shape(self) -> list[int]:
        return [int(size) for size in reversed(self._tensor.shape)]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, region: Any) -> torch.Tensor:
        values = package().quants.dequantize(self._tensor.data, self._tensor.tensor_type)
        whole = torch.from_numpy(values.copy()).reshape(self.get_shape())
        return (to_halves(whole, self._heads) if self._heads else whole)[region]


def open_tensors(file: Path, family: str, heads: tuple[int, int]) -> dict[str, OfFile]:
    """The tensors of a file by their Hugging Face names. `heads`: of queries, and of keys."""
    gguf = package()
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{file} is damaged ({error}); fetch the model again.") from error
    found = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        name, turned = hf_name(tensor.name), 0
        if family in PERMUTED and ".self_attn.q_proj." in name:
            turned = heads[0]
        elif family in PERMUTED and ".self_attn.k_proj." in name:
            turned = heads[1]
        found[name] = OfFile(tensor, turned)
    return found
