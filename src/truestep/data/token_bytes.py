"""How many bytes of text each id of a tokenizer stands for, read from the vocabulary (for bits per byte)."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@cache
def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table): a printable Latin-1 character
    stands for itself, and the other bytes, in order, for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def token_byte_lengths(spec: dict[str, Any], vocab: dict[str, int], size: int) -> np.ndarray:
    """int64 [size]; `spec` is the content of a tokenizer.json, `vocab` all its tokens. Special and unknown ones: 0."""
    lengths = np.zeros(size, dtype=np.int64)
    added = {token["content"]: token["special"] for token in spec["added_tokens"]}
    parts = list(_parts(spec))
    byte_level = set(byte_alphabet()) if any(p["type"] == "ByteLevel" for p in parts) else None
    for token, index in vocab.items():
        if token in added:  # written in plain text, whatever the model's alphabet
            lengths[index] = 0 if added[token] else len(token.encode())
        elif byte_level is not None and byte_level.issuperset(token):
            lengths[index] = len(token)
        elif spec["model"].get("byte_fallback") and _BYTE_PIECE.fullmatch(token):
            lengths[index] = 1
        elif token != spec["model"].get("unk_token"):
            lengths[index] = len(_written(token, spec["model"], parts).encode())
    return lengths


def _parts(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Normalizers, pre-tokenizers and decoders, those inside sequences too."""
    todo = [spec.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    while todo:
        part = todo.pop()
        if part is not None:
            yield part
            for name in ("normalizers", "pretokenizers", "decoders"):
                todo.extend(part.get(name, []))


def _written(token: str, model: dict[str, Any], parts: list[dict[str, Any]]) -> str:
    """The text of a piece: "▁" stands for a space, a prefix like "##" for nothing, a suffix like "</w>" for a space."""
    token = token.removeprefix(model.get("continuing_subword_prefix") or "")
    if (suffix := model.get("end_of_word_suffix")) and token.endswith(suffix):
        token = token.removesuffix(suffix) + " "
    for part in parts:
        if part["type"] == "Metaspace":
            token = token.replace(part["replacement"], " ")
        if part["type"] == "Replace" and part["content"] == "▁" and part["pattern"].get("String"):
            token = token.replace("▁", part["pattern"]["String"])
    return token
