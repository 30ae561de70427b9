"""Tokenizers: one wrapper over the library `tokenizers` for trained, loaded and raw-byte vocabularies. Torch-free.

Text is only ever text: what spells a special token (`<|endoftext|>`, `<|im_end|>`) is encoded as ordinary characters,
and no special token is added by itself. Added tokens that a file marks as *not* special are part of its ordinary
vocabulary and are used, as in Hugging Face with `split_special_tokens=True`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from truestep.data.token_bytes import byte_alphabet, token_byte_lengths
from truestep.errors import DataError
from truestep.files import canonical, publish, writing

END = "<|endoftext|>"
_UNREACHABLE = "\ufdd0"  # a code point that is no character: no text can spell what follows it
TEMPLATE_FILE = "chat_template.jinja"
FILES = ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json", TEMPLATE_FILE)  # later ones win
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ORIGIN = "truestep_origin"
_KEPT_CONFIG = (*_NAMED_TOKENS, "chat_template", "model_max_length", "padding_side")


class Tokenizer:
    """Text to ids and back. `vocab_size` is the largest id + 1; `eod_id` ends a document; `fingerprint` covers all that
    decides ids. `special` are the ids of special tokens, and `unknown` the one for what the vocabulary lacks.
    `origin` says where it came from (a hub id with its commit, a path, or how it was made)."""

    def __init__(self, spec: dict[str, Any], eod: str, *, config: dict[str, Any] | None = None, origin: str = ""):
        """`spec` is the content of a tokenizer.json; `eod` a token in it; `config` that of tokenizer_config.json."""
        spec = spec | {"truncation": None, "padding": None}
        spec["model"] = _model_without_chance(spec)
        self.origin, self._config = origin, config or {}
        self._tokenizer = _from_spec(spec, origin)
        found = self._tokenizer.token_to_id(eod)
        if found is None:
            raise DataError(f"{origin}: has no token {eod!r} to end documents with; set tokenizer.eod to one it has.")
        self._tokenizer.add_special_tokens([AddedToken(eod, special=True, normalized=False)])
        self.eod, self.eod_id = eod, found
        self._spec: dict[str, Any] = json.loads(self._tokenizer.to_str())
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.special = {t["content"]: int(t["id"]) for t in self._spec["added_tokens"] if t["special"]}
        self.unknown = _unknown_token(self._spec)
        self._forbidden = np.zeros(self.vocab_size, dtype=bool)  # ids that no text may become
        self._forbidden[[i for t, i in self.special.items() if t != self.unknown]] = True
        spec = _without_reachable_specials(self._spec)
        self._encoder = self._tokenizer if spec is self._spec else _from_spec(spec, origin)
        self._encoder.encode_special_tokens = True
        self._raw_bytes = _is_raw_bytes(self._spec)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int64, without any special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for many texts at once, in parallel where the library may."""
        if self._raw_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]
        encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        all_ids = [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
        for ids, text in zip(all_ids, texts):
            if self._forbidden[ids].any():
                self._refuse(ids, text)
        return all_ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    @property
    def spec(self) -> dict[str, Any]:
        """The content of its tokenizer.json."""
        return self._spec

    def id_of(self, token: str) -> int:
        """The id of a token of the vocabulary, special or not."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise DataError(f"the tokenizer ({self.origin}) has no token {token!r}; name one that it has.")
        return found

    @cached_property
    def first_ids(self) -> np.ndarray:
        """int64: what the tokenizer puts before a text that a model goes on from: its BOS, or nothing."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        count = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
        return np.array(whole[:count], dtype=np.int64)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of conversations; None where the tokenizer has none."""
        found = self._config.get("chat_template")
        if isinstance(found, list):  # named ones, as some tokenizers have for tools
            named = {one["name"]: one["template"] for one in found}
            return named.get("default")
        return found

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same tokenizer with another template."""
        return Tokenizer(self._spec, self.eod, config=self._config | {"chat_template": template}, origin=self.origin)

    @cached_property
    def template_variables(self) -> dict[str, str]:
        """What chat templates may name: bos_token and its like, as far as the tokenizer has them."""
        named = {name: _content(self._config.get(name)) for name in _NAMED_TOKENS}
        return {name: token for name, token in named.items() if token is not None} | {"eos_token": self.eod}

    def byte_lengths(self) -> np.ndarray:
        """int64 [vocab_size]: bytes of UTF-8 text that each id stands for, from the vocabulary itself and not from
        decoded text, in which a part of a character would count as three; 0 for special tokens and unused ids."""
        return self._byte_lengths.copy()

    @cached_property
    def _byte_lengths(self) -> np.ndarray:
        return token_byte_lengths(self._spec, self._tokenizer.get_vocab(), self.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical content of tokenizer.json and the end-of-document token, and of the chat template and
        the tokens it names where there is one."""
        chat = [self.chat_template, self.template_variables] if self.chat_template is not None else []
        return hashlib.sha256(canonical([self._spec, self.eod, *chat])).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, where there is a template, chat_template.jinja; from these
        Hugging Face's AutoTokenizer makes the same ids. Settings that would run code from elsewhere (`auto_map`) are
        not carried over."""
        folder = Path(folder)
        config = {name: self._config[name] for name in _KEPT_CONFIG if self._config.get(name) is not None}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eod}
        config |= {"clean_up_tokenization_spaces": False, _ORIGIN: self._origin_to_tell()}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            publish(folder / "tokenizer.json", json.dumps(self._spec, ensure_ascii=False).encode())
            publish(folder / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=1).encode())
            if isinstance(config.get("chat_template"), str):
                publish(folder / TEMPLATE_FILE, config["chat_template"].encode())

    def _origin_to_tell(self) -> str:
        """A path of this machine is nobody else's business; its last part is."""
        return Path(self.origin).name if Path(self.origin).exists() else self.origin

    def _refuse(self, ids: np.ndarray, text: str) -> None:
        bad = int(ids[self._forbidden[ids]][0])
        token = next(t for t, i in self.special.items() if i == bad)
        at = max(0, text.find(token))
        raise DataError(
            f"the text {text[at : at + 40]!r} spells the special token {token!r} (id {bad}), which this tokenizer "
            f"cannot encode as ordinary text; remove it from the text or use a byte-level tokenizer."
        )


def bytes_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    """ids 0-255 are bytes, 256 ends a document, and the `special` tokens come after it."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())} | {END: 256}
    return _byte_level(models.BPE(vocab=vocab, merges=[]), "bytes", special)


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE with `vocab_size` ids: <|endoftext|> is 0, then the `special` tokens, the 256 bytes, and merges.
    The same texts give the same tokenizer. DataError if they hold too few different words for so many merges."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.train_from_iterator(texts, trainer)
    if learner.get_vocab_size() < vocab_size:
        raise DataError(
            f"tokenizer: the text is too small for vocab_size {vocab_size} (only {learner.get_vocab_size()} tokens "
            f"were found); lower tokenizer.vocab_size or give more text."
        )
    return _byte_level(learner.model, f"byte-level BPE of {vocab_size} trained on the data", special)


def load_tokenizer(path: str | Path, *, eod: str | None = None, origin: str | None = None) -> Tokenizer:
    """A tokenizer.json, or a folder that holds one. `eod` is by default the eos token named beside it; `origin` says
    where it came from, by default what was saved with it, or the path. Only JSON is read: code and pickles in the
    folder are left alone."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(f"{file} does not exist; give a tokenizer.json or a folder with one.")
    beside = [_read_json(p) for name in FILES[1:-1] if (p := file.with_name(name)).is_file()]
    config = {name: value for one in beside for name, value in one.items()}
    if (template := file.with_name(TEMPLATE_FILE)).is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    named = eod or _content(config.get("eos_token"))
    if not named:
        raise DataError(f"{path}: names no eos token; set tokenizer.eod to the token that ends a document.")
    tokenizer = Tokenizer(_read_json(file), named, config=config, origin=str(path))
    tokenizer.origin = origin or config.get(_ORIGIN) or str(path)
    return tokenizer


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """DataError if the tokenizer has ids that a model with `vocab_size` rows of embedding lacks."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer ({tokenizer.origin}) has {tokenizer.vocab_size} ids but model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer.vocab_size}."
        )


def _byte_level(model: Any, origin: str, special: Sequence[str]) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in (END, *special)])
    return Tokenizer(json.loads(tokenizer.to_str()), END, origin=origin)


def _content(token: Any) -> str | None:
    """A named token of tokenizer_config.json: its text, or an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check that it may be read.") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}; fetch or save the tokenizer again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not an object; fetch or save the tokenizer again.")
    return value


def _from_spec(spec: dict[str, Any], origin: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{origin}: is not a tokenizer.json ({error}); fetch or save the tokenizer again.") from error


def _model_without_chance(spec: dict[str, Any]) -> dict[str, Any]:
    model = dict(spec.get("model") or {})
    return model | {"dropout": None} if "dropout" in model else model


def _unknown_token(spec: dict[str, Any]) -> str | None:
    model = spec["model"]
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def _without_reachable_specials(spec: dict[str, Any]) -> dict[str, Any]:
    """Models that look whole pieces up in their vocabulary would give a special token for its spelling even where the
    library does not search for it; here those pieces get names that no text has. (BPE gets there by merges only.)"""
    model = spec["model"]
    if model.get("type") == "BPE":
        return spec
    hidden = {t["content"] for t in spec["added_tokens"] if t["special"]} - {_unknown_token(spec)}
    rename = {token: _UNREACHABLE + token for token in hidden}
    if isinstance(model["vocab"], dict):
        vocab: Any = {rename.get(token, token): i for token, i in model["vocab"].items()}
        renamed = hidden & model["vocab"].keys()
    else:
        vocab = [[rename.get(token, token), score] for token, score in model["vocab"]]
        renamed = hidden & {token for token, _ in model["vocab"]}
    added = [t for t in spec["added_tokens"] if t["content"] not in renamed]
    return spec | {"model": model | {"vocab": vocab}, "added_tokens": added}


def _is_raw_bytes(spec: dict[str, Any]) -> bool:
    """Whether ids are simply the bytes of the text: the vocabulary of `bytes_tokenizer`."""
    model, split = spec["model"], spec["pre_tokenizer"] or {}
    plain = split.get("type") == "ByteLevel" and not split.get("add_prefix_space") and spec["normalizer"] is None
    vocab = model.get("vocab")
    return (
        plain
        and model.get("merges") == []
        and all(vocab.get(character) == byte for byte, character in enumerate(byte_alphabet()))
        and all(token["special"] for token in spec["added_tokens"])
    )
