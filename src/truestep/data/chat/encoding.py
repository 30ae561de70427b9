"""Text of a chat template to ids: special tokens that the template writes are special, those in a message are text.

The two are told apart before the text is put together. In every string of a row that spells a special token, a code
point that is no character is set inside the spelling (`guard`). In the rendered text, what still spells a special token
comes from the template; it gets a private name, the guards go, and a copy of the tokenizer that knows special tokens by
their private names alone encodes the whole text at once. So no text of a row can become a special id, and places,
spaces and normalisation are those of one call of the tokenizer.

A template may still build a spelling out of pieces of a row (`<|im_` and `end|>` in two fields, or a word taken out
between them). `specials` of the same conversation with every text blanked tells what the template writes by itself.
"""

import json
import re
from typing import Any

import numpy as np
import tokenizers

from truestep.data.chat.units import RowError
from truestep.data.tokenizer import Tokenizer
from truestep.errors import DataError

_GUARD, _BLANK = "\ufdd1", "\ufdd4"
_PRIVATE = re.compile("[\ufdd0-\ufdef]")
_ESCAPED = re.compile(r"\\ufdd[0-9a-f]", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z_$]+")
_KEPT_VALUES = ("role", "type")


class TemplateEncoder:
    """Encodes rendered templates for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._known = tokenizer.special
        longest_first = sorted(self._known, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, longest_first)))
        self._names_in_order = [token for token in longest_first if token != tokenizer.unknown]
        self._names = {token: f"\ufdd2{number}\ufdd3" for number, token in enumerate(longest_first)}
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(_renamed(tokenizer.spec, self._names)))
        self._ids = self._true_ids(tokenizer)
        flags = ("lstrip", "rstrip", "single_word")
        of_special = [token for token in tokenizer.spec["added_tokens"] if token["special"]]
        self._apart = bool(self._names_in_order) and not any(token[flag] for token in of_special for flag in flags)
        self.special_ids = np.array(sorted(i for t, i in self._known.items() if t != tokenizer.unknown), dtype=np.int64)
        self._unknown = tokenizer.unknown

    def _true_ids(self, tokenizer: Tokenizer) -> np.ndarray:
        """The tokenizer's id for each id of the copy."""
        true = {name: self._known[token] for token, name in self._names.items()}
        copied = self._encoder.get_vocab(with_added_tokens=True)
        ids = np.zeros(max(copied.values()) + 1, dtype=np.int64)
        for token, number in copied.items():
            ids[number] = true[token] if token in true else tokenizer.id_of(token)
        return ids

    def guard(self, value: Any) -> Any:
        """A row's value in which no string, nor key, spells a special token. RowError for code points that no text
        has."""
        if isinstance(value, str):
            return self._guarded(value)
        if isinstance(value, dict):
            return {self.guard(key): self.guard(one) for key, one in value.items()}
        return [self.guard(one) for one in value] if isinstance(value, list) else value

    def _guarded(self, text: str) -> str:
        if found := _PRIVATE.search(text):
            code = f"U+{ord(found[0]):04X}"
            raise RowError("no text", f"holds {code}, which Unicode has set apart as no character; remove it.")
        while self._spelling.search(text):
            text = self._spelling.sub(lambda found: f"{found[0][0]}{_GUARD}{found[0][1:]}", text)
        return text

    def specials(self, text: str) -> list[str]:
        """The special tokens that a rendered text spells, in order."""
        return self._spelling.findall(text)

    def encode_known(self, text: str, known: dict[tuple[bool, str], np.ndarray]) -> np.ndarray:
        """As `encode`, for one of many texts that have much in common. The library cuts a text at special tokens before
        anything else, so that what lies between two of them has the same ids in every text (but for the beginning of
        a text, and for special tokens that take spaces from beside them); `known` keeps these ids."""
        if not self._apart:
            return self.encode([text])[0]
        parts, at, first = [], 0, self._names_in_order[0]
        for found in [*self._spelling.finditer(text), None]:
            between = text[at : found.start() if found else len(text)]
            key = (at == 0, between)
            if between and key not in known:
                # special tokens before it, as in the whole text, unless it is the beginning
                known[key] = self.encode([between])[0] if at == 0 else self.encode([first + between])[0][1:]
            parts += [known[key]] if between else []
            if found:
                parts.append(np.array([self._known[found[0]]], dtype=np.int64))
                at = found.end()
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids, int64, of texts rendered from guarded values."""
        named = [self._spelling.sub(lambda found: self._names[found[0]], text) for text in texts]
        encodings = self._encoder.encode_batch_fast([n.replace(_GUARD, "") for n in named], add_special_tokens=False)
        all_ids = [self._ids[np.array(one.ids, dtype=np.int64)] for one in encodings]
        for ids, text in zip(all_ids, texts):
            wanted = sum(token != self._unknown for token in self.specials(text))
            if np.isin(ids, self.special_ids).sum() != wanted:
                raise DataError(
                    "the tokenizer does not find every special token that the chat template writes (some may stand "
                    "beside letters only as words of their own); use a tokenizer.json without such rules."
                )
            if _GUARD in text and _ESCAPED.search(text):
                raise RowError("special token", "spells a special token where the template escapes it; remove it.")
        return all_ids


def blanked(value: Any, key: str = "") -> Any:
    """A value of the same shape and lengths in which every text is blank, so that whatever special token its rendering
    has was written by the template. Roles, types and the names of fields stay."""
    if isinstance(value, str):
        return value if key in _KEPT_VALUES and _WORD.fullmatch(value) else re.sub(r"\S", _BLANK, value)
    if isinstance(value, dict):
        return {_blanked_key(one, n, key): blanked(inner, one) for n, (one, inner) in enumerate(value.items())}
    return [blanked(one, key) for one in value] if isinstance(value, list) else value


def _blanked_key(key: str, number: int, above: str) -> str:
    free = above in ("arguments", "properties") or not _WORD.fullmatch(key)
    return f"{_BLANK}{number}" if free else key


def _renamed(spec: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A tokenizer.json in which special tokens have other names, and no merge leads to them."""
    model = dict(spec["model"])
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("merges"):
        model["merges"] = [one for one in model["merges"] if _result(one).isdisjoint(names)]
    added = [
        token | {"content": names[token["content"]], "normalized": False} if token["content"] in names else token
        for token in spec["added_tokens"]
    ]
    return spec | {"model": model, "added_tokens": added}


def _result(merge: str | list[str]) -> set[str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {left, right, left + right}
