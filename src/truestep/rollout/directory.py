"""Completions by a model that lies in a directory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from truestep.data.tokenizer import check_vocab, load_tokenizer
from truestep.models.load import load_model
from truestep.rollout.generate import generate


def sample_from(
    directory: Path,
    prompts: Sequence[str],
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    *,
    own_module: str | None = None,
    device: str = "auto",
) -> list[str]:
    """Load the model and its tokenizer (`device` "auto" is a GPU where there is one) and complete the prompts."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(directory, device=device, own_module=own_module)
    tokenizer = load_tokenizer(directory)
    check_vocab(tokenizer, model.section.vocab_size)
    return generate(model, tokenizer, prompts, max_new_tokens, temperature, top_p, seed)
