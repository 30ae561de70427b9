"""Reading directories in Hugging Face layout: everything is checked first, then each rank reads its own slices."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn

from truestep.errors import ModelError
from truestep.models.hf_config import section_from_config
from truestep.models.hf_names import hf_parts
from truestep.models.hf_pieces import hf_pieces
from truestep.models.hf_quantised import cast_inputs, dequantised
from truestep.models.roles import SCORE
from truestep.numerics.pieces import Piece, find_aliases, piece_of
from truestep.numerics.quantised.gguf import FILE as GGUF
from truestep.numerics.quantised.gguf import open_tensors
from truestep.numerics.quantised.scheme import Scheme, from_config
from truestep.recipe.model import ModelSection

INDEX = "model.safetensors.index.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ALIASES = "truestep.aliases"
HEAD = "lm_head.weight"
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
_DERIVED = ".rotary_emb.inv_freq"  # tables that old files carry; they follow from the configuration


def read_section(directory: Path) -> ModelSection:
    """The resolved [model] section of a directory; its tokenizer must fit its embedding."""
    section = section_from_config(read_json(directory / "config.json"), str(directory / "config.json"))
    file = directory / "tokenizer.json"
    if file.exists():
        largest = max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= section.vocab_size:
            raise ModelError(
                f"{file} has the id {largest}, but vocab_size in config.json is {section.vocab_size}; "
                f"take the tokenizer that belongs to the model."
            )
    return section


def check_directory(directory: Path, context: int) -> ModelSection:
    """Its section, after a look at what can be seen without reading weights: every file of weights is there and whole,
    stored as can be read, and rows of `context` tokens are not longer than the model takes."""
    section = read_section(directory)
    read_scheme(directory)
    with _open_shards(directory):
        pass
    if section.module is None and context > section.max_context:
        raise ModelError(
            f"{directory / 'config.json'} says that the model takes {section.max_context} tokens, but the stage's "
            f"context is {context}; shorten the rows."
        )
    return section


def read_scheme(directory: Path) -> Scheme | None:
    """How the weights of a directory are quantised; None: not at all."""
    file = directory / "config.json"
    given = read_json(file).get("quantization_config")
    return None if given is None else from_config(given, str(file))


def cast_as_stored(directory: Path, model: nn.Module) -> None:
    """Let a model on one device cast inputs of products where the quantised one of the directory does."""
    scheme = read_scheme(directory)
    if scheme is not None and scheme.inputs != "high":
        with _open_shards(directory, as_stored=True) as found:
            slices = {name: stored.slices for name, stored in found.items()}
            cast_inputs(model, read_section(directory), scheme, slices)


def read_generation(directory: Path) -> dict[str, Any]:
    """generation_config.json, or the token ids of config.json where there is none."""
    file = directory / "generation_config.json"
    if file.exists():
        return read_json(file)
    return {key: value for key, value in read_json(directory / "config.json").items() if key in TOKEN_IDS}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or a ModelError that names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist; a model directory needs it.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, not an object; fetch the model again.")
    return value


@torch.no_grad()
def load_hf(directory: Path, want: Mapping[str, torch.Tensor | Piece], names: Collection[str] | None = None) -> None:
    """Fill our parameters `want` (tensors, DTensors or pieces, cast to their dtypes) from a directory's safetensors, in
    place. `names`: those of the whole model, where `want` is a part of one.

    Each rank reads only its own slices, and none waits for another. Names and shapes of everything are checked before
    the first element changes: a missing shard or tensor, one too many, or a wrong shape is a ModelError. A score head
    that the directory lacks starts at 0, and the directory's head of the vocabulary is left out.
    """
    section = read_section(directory)
    begins = not section.scores and SCORE in {*want, *(names or ())}
    if begins:
        if SCORE in want:
            piece_of(want[SCORE]).local.zero_()
        want, names = _without(SCORE, want), [name for name in names or () if name != SCORE]
    pieces = hf_pieces(want, section)
    wanted = {theirs for name in {*want, *(names or ())} for theirs, _ in hf_parts(name, section)}
    with _open_shards(directory) as found:
        _check_names(directory, set(found) - ({HEAD} if begins else set()), wanted, section)
        for theirs, piece in pieces.items():
            _check_tensor(directory, theirs, found[theirs], piece)
        _check_ties(directory, found, pieces, section)
        for theirs, piece in pieces.items():
            if piece.local.numel():
                piece.local.copy_(found[theirs].slices[piece.region])
    for name, tensor in want.items():
        if not hf_parts(name, section):
            piece_of(tensor).local.zero_()


def _without(name: str, want: Mapping[str, torch.Tensor | Piece]) -> dict[str, torch.Tensor | Piece]:
    return {other: tensor for other, tensor in want.items() if other != name}


@dataclass(frozen=True)
class _Stored:
    """A tensor in an open file: `slices[region]` reads a part of it. `alias_of`: the name it is stored under."""

    slices: Any
    alias_of: str | None = None


@contextmanager
def _open_shards(directory: Path, as_stored: bool = False) -> Iterator[dict[str, _Stored]]:
    """Every tensor of the directory by its name; quantised weights decoded, unless `as_stored`."""
    if (directory / GGUF).exists():
        section = read_section(directory)
        heads = int(section.num_heads or 0), int(section.num_kv_heads or 0)
        opened = open_tensors(directory / GGUF, str(section.family), heads)
        yield {name: _Stored(tensor) for name, tensor in opened.items()}
        return
    index = directory / INDEX
    files = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    with ExitStack() as stack:
        found: dict[str, _Stored] = {}
        aliases: dict[str, str] = {}
        for file in files:
            path = directory / file
            if not path.exists():
                raise ModelError(_missing(directory, file, index.exists()))
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged ({error}); fetch the model again.") from error
            found |= {name: _Stored(handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118
            aliases |= json.loads((handle.metadata() or {}).get(ALIASES, "{}"))
        for name, target in aliases.items():
            if target not in found:
                raise ModelError(f"{directory} says that {name} is {target}, which it lacks; fetch the model again.")
            found[name] = _Stored(found[target].slices, target)
        scheme = None if as_stored else read_scheme(directory)
        if scheme is not None:
            slices = {name: stored.slices for name, stored in found.items()}
            found = {name: _Stored(one) for name, one in dequantised(slices, scheme, directory).items()}
        yield found


def _missing(directory: Path, file: str, indexed: bool) -> str:
    pickles = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if indexed:
        return f"{directory / file} is missing, though {INDEX} names it; fetch the model again."
    if pickles:
        return (
            f"{directory} has its weights in {pickles[0]}, a pickle, which is never loaded because it can run code; "
            f"convert it to safetensors first."
        )
    return f"{directory / file} does not exist and there is no {INDEX}; give a directory with safetensors weights."


def _check_names(directory: Path, found: set[str], wanted: set[str], section: ModelSection) -> None:
    if missing := sorted(wanted - found):
        raise ModelError(
            f"{directory} lacks the tensor {missing[0]} ({len(missing)} in all); its configuration needs it, "
            f"so fetch the model again or correct config.json."
        )
    allowed = wanted | ({HEAD} if section.tie_embeddings else set())
    if extra := sorted(name for name in found - allowed if not name.endswith(_DERIVED)):
        raise ModelError(
            f"{directory} holds the tensor {extra[0]} ({len(extra)} in all) that config.json has no place for; "
            f"the weights belong to another configuration."
        )


def _check_tensor(directory: Path, name: str, stored: _Stored, wanted: Piece) -> None:
    shape = stored.slices.get_shape()
    if shape != list(wanted.shape):
        raise ModelError(
            f"{name} in {directory} has the shape {shape}, but config.json makes it {list(wanted.shape)}; "
            f"the weights belong to another configuration."
        )
    if stored.slices.get_dtype() not in _DTYPES:
        raise ModelError(
            f"{name} in {directory} has the dtype {stored.slices.get_dtype()}; "
            f"supported are {', '.join(_DTYPES)}, so convert the weights first."
        )


def _check_ties(directory: Path, found: dict[str, _Stored], wanted: dict[str, Piece], section: ModelSection) -> None:
    """What is stored as one tensor must be one in the model; what the model holds as one must be stored as equal, in
    the rows that this rank holds."""
    tied = find_aliases(wanted)
    for name, stored in found.items():
        target = stored.alias_of
        apart = target in wanted and name in wanted and tied.get(name, name) != tied.get(target, target)
        if apart and wanted[name].local.numel():
            raise ModelError(
                f"{directory} stores {name} and {target} as one tensor, but the model holds two; tie them first."
            )
    names = ("model.embed_tokens.weight", HEAD)
    if not section.tie_embeddings or names[0] not in wanted or names[1] not in found:
        return
    table, head = (found[name].slices for name in names)
    rows, columns = wanted[names[0]].region
    for start in range(rows.start, rows.stop, 4096):
        some = (slice(start, min(start + 4096, rows.stop)), columns)
        if not torch.equal(table[some], head[some]):
            raise ModelError(
                f"{directory} says tie_word_embeddings, but {names[1]} differs from {names[0]}; "
                f"set tie_word_embeddings to false in config.json."
            )
