"""Generation straight from a model directory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from truestep.data.tokenizer import load_tokenizer
from truestep.models.load import load_model
from truestep.rollout.generate import generate


def sample_from(
    directory: Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    own_module: str | None = None,
) -> list[str]:
    """Completions of `prompts` by the model and tokenizer that lie in `directory`, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(directory, device=device, own_module=own_module)
    return generate(model, load_tokenizer(directory), prompts, max_new_tokens, temperature, top_p, seed)
