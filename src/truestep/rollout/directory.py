"""Completions by a model that lies in a directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from truestep.data.tokenizer import Tokenizer, check_vocab, load_tokenizer
from truestep.errors import ModelError
from truestep.models.decoder import Decoder
from truestep.models.foreign import ForeignModel
from truestep.models.hf import read_generation
from truestep.models.load import load_model
from truestep.rollout.generate import generate


@dataclass(frozen=True)
class Opened:
    """A model that is ready to generate. Its texts end at any of `stop_ids`."""

    model: Decoder | ForeignModel
    tokenizer: Tokenizer
    stop_ids: frozenset[int]


def sample_from(
    directory: Path,
    prompts: Sequence[str],
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    *,
    adapter: Path | None = None,
    own_module: str | None = None,
    device: str = "auto",
) -> list[str]:
    """Open a model directory and complete the prompts."""
    opened = open_model(directory, adapter, own_module=own_module, device=device)
    settings = max_new_tokens, temperature, top_p, seed, opened.stop_ids
    return generate(opened.model, opened.tokenizer, prompts, *settings)


def open_model(
    directory: Path, adapter: Path | None = None, *, own_module: str | None = None, device: str = "auto"
) -> Opened:
    """Load a model, with a low-rank adapter on it if one is named, and its tokenizer. `device` "auto" is a GPU where
    there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(directory, device=device, own_module=own_module)
    tokenizer = load_tokenizer(directory)
    check_vocab(tokenizer, model.section.vocab_size)
    return Opened(model, tokenizer, stop_ids(directory, tokenizer))


def stop_ids(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """What ends a text: the ids that the model's generation settings name, and the end of a document."""
    named = read_generation(directory).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(id) is int for id in ids):
        raise ModelError(f"{directory} names eos_token_id = {named!r}, which is no token id; correct its settings.")
    return frozenset({*ids, tokenizer.eod_id})
