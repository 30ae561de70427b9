"""Completions by a model that lies in a directory."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from truestep.data.chat.chat import Chat as ChatFormat
from truestep.data.chat.encoding import TemplateEncoder
from truestep.data.chat.template import ChatTemplate
from truestep.data.tokenizer import Tokenizer, check_vocab, load_tokenizer
from truestep.errors import DataError, ModelError
from truestep.models.decoder import Decoder
from truestep.models.foreign import ForeignModel
from truestep.models.hf import read_generation
from truestep.models.load import load_model
from truestep.rollout.adapted import load_adapters
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
    """Load a model, a low-rank adapter for it if one is named, and its tokenizer. `device` "auto" is a GPU where there
    is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(directory, device=device, own_module=own_module)
    if adapter is not None:
        load_adapters(model, directory, {"adapter": adapter})
    tokenizer = load_tokenizer(directory)
    check_vocab(tokenizer, model.section.vocab_size)
    return Opened(model, tokenizer, stop_ids(directory, tokenizer))


def stop_ids(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """What ends a text: the ids that the model's generation settings name, the end of a document, that of a turn."""
    named = read_generation(directory).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(id) is int for id in ids):
        raise ModelError(f"{directory} names eos_token_id = {named!r}, which is no token id; correct its settings.")
    return frozenset({*ids, *end_ids(tokenizer)})


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The end of a document and, where the chat template ends turns with another token, that one. A template with which
    no conversation can be had has none."""
    ends = [tokenizer.eod_id]
    if tokenizer.chat_template is not None:
        with suppress(DataError):
            ends.append(template_of(tokenizer).turn_end())
    return list(dict.fromkeys(ends))


def token_ids(tokenizer: Tokenizer) -> dict[str, int | list[int]]:
    """What a model directory's settings say of tokens: what ends a text and, of a chat model, a turn, after it; what
    begins a text and what pads, which is the end of a document where the tokenizer names nothing else."""
    ends, named = end_ids(tokenizer), tokenizer.template_variables
    begin, pad = (tokenizer.id_of(named.get(name, tokenizer.eod)) for name in ("bos_token", "pad_token"))
    return {"eos_token_id": ends if len(ends) > 1 else ends[0], "bos_token_id": begin, "pad_token_id": pad}


def template_of(tokenizer: Tokenizer) -> ChatFormat:
    """The tokenizer's chat template, for which today is today. DataError where there is none."""
    source = tokenizer.chat_template
    if source is None:
        raise DataError(
            f"the tokenizer ({tokenizer.origin}) has no chat template; take a model that was trained on conversations, "
            f"or complete texts with `sample`."
        )
    template = ChatTemplate(source, tokenizer.template_variables, date.today())
    return ChatFormat(template, TemplateEncoder(tokenizer))
