"""Directories in Hugging Face layout: ranks read their own slices, writes go tensor by tensor, published as a whole."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.distributed.tensor import DTensor

from truestep.errors import ModelError
from truestep.models.hf_config import config_from_section, section_from_config
from truestep.models.hf_names import hf_name
from truestep.models.shards import local_region
from truestep.recipe.model import ModelSection

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 2**30
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
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


def read_generation(directory: Path) -> dict[str, Any]:
    """generation_config.json, or the token ids of config.json where there is none."""
    file = directory / "generation_config.json"
    if file.exists():
        return read_json(file)
    return {key: value for key, value in read_json(directory / "config.json").items() if key in _TOKEN_IDS}


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
def load_hf(directory: Path, want: Mapping[str, torch.Tensor]) -> None:
    """Fill our parameters `want` (tensors or DTensors, cast to their dtypes) from a directory's safetensors, in place.

    Each rank reads only its own slices. Names and shapes of everything are checked before the first element changes: a
    missing shard or tensor, one too many, or a wrong shape is a ModelError.
    """
    section = read_section(directory)
    with _open_shards(directory) as found:
        names = {name: hf_name(name, section) for name in want}
        _check_names(directory, set(found), set(names.values()), section)
        for name, theirs in names.items():
            shape = tuple(found[theirs].get_slice(theirs).get_shape())
            if shape != tuple(want[name].shape):
                raise ModelError(
                    f"{theirs} in {directory} has the shape {list(shape)}, but config.json makes it "
                    f"{list(want[name].shape)}; the weights belong to another configuration."
                )
        if section.tie_embeddings and "lm_head.weight" in found:
            _check_tie(directory, found)
        for name, theirs in names.items():
            local, region = local_region(want[name])
            if local.numel():
                local.copy_(found[theirs].get_slice(theirs)[region])


@contextmanager
def _open_shards(directory: Path) -> Iterator[dict[str, Any]]:
    """Tensor name to the open file that holds it."""
    index = directory / INDEX
    files = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in files:
            path = directory / file
            if not path.exists():
                raise ModelError(_missing(directory, file, index.exists()))
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged ({error}); fetch the model again.") from error
            found |= dict.fromkeys(handle.keys(), handle)
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
    allowed = wanted | ({"lm_head.weight"} if section.tie_embeddings else set())
    if extra := sorted(name for name in found - allowed if not name.endswith(_DERIVED)):
        raise ModelError(
            f"{directory} holds the tensor {extra[0]} ({len(extra)} in all) that config.json has no place for; "
            f"the weights belong to another configuration."
        )


def _check_tie(directory: Path, found: dict[str, Any]) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    table, head = (found[name].get_slice(name) for name in names)
    rows = table.get_shape()[0]
    for start in range(0, rows, 4096):
        if not torch.equal(table[start : start + 4096], head[start : start + 4096]):
            raise ModelError(
                f"{directory} says tie_word_embeddings, but {names[1]} differs from {names[0]}; "
                f"set tie_word_embeddings to false in config.json."
            )


def save_hf(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    section: ModelSection,
    *,
    dtype: torch.dtype | None = None,
    tokenizer_dir: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write our parameters by name, the resolved section, and the tokenizer as a directory that must not exist yet.

    Every rank calls this with the same names (DTensors are gathered one by one); rank 0 writes, with at most one
    shard's tensors in memory, to a hidden sibling that gets its name once everything is on disk. Tensors are cast to
    `dtype` where given. `generation` becomes generation_config.json; its token ids also go into config.json.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    names = {hf_name(name, section): tensor for name, tensor in tensors.items()}
    files = _plan(names, dtype, shard_bytes)
    partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}.partial"
    problem: str | None = None
    try:
        if writes:
            _start(directory, partial)
    except ModelError as error:
        problem = str(error)
    for file, held in files.items():
        whole: dict[str, torch.Tensor] = {}
        for name in held:
            tensor = names[name].detach()
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # collective: also after a problem
            if writes and problem is None:
                whole[name] = full.to("cpu", dtype or full.dtype).contiguous()
        if writes and problem is None:
            problem = _attempt(
                directory, lambda file=file, whole=whole: save_file(whole, partial / file, {"format": "pt"})
            )
    if writes and problem is None:
        kept = dtype or next(iter(names.values())).dtype
        problem = _attempt(
            directory, lambda: _finish(directory, partial, files, names, section, kept, tokenizer_dir, generation or {})
        )
    if writes and problem is not None:
        shutil.rmtree(partial, ignore_errors=True)
    if (problem := _agree(problem)) is not None:
        raise ModelError(problem)


def _plan(names: Mapping[str, torch.Tensor], dtype: torch.dtype | None, shard_bytes: int) -> dict[str, list[str]]:
    """File name to the tensors it will hold, in order; a tensor larger than `shard_bytes` has a file of its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in names.items():
        size = tensor.numel() * (dtype or tensor.dtype).itemsize
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups)}


def _start(directory: Path, partial: Path) -> None:
    if directory.exists():
        raise ModelError(f"{directory} exists already; export to a new name, nothing is overwritten.")
    problem = _attempt(directory, lambda: partial.mkdir(parents=True))
    if problem is not None:
        raise ModelError(problem)


def _attempt(directory: Path, action: Any) -> str | None:
    """Run `action`; a failed write comes back as its sentence."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        return f"{directory} cannot be written: {error}; give a folder with room and permission."
    return None


def _finish(
    directory: Path,
    partial: Path,
    files: dict[str, list[str]],
    names: Mapping[str, torch.Tensor],
    section: ModelSection,
    dtype: torch.dtype,
    tokenizer_dir: Path | None,
    generation: Mapping[str, Any],
) -> None:
    ids = {key: generation[key] for key in _TOKEN_IDS if key in generation}
    config = config_from_section(section) | ids | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(partial / "config.json", config)
    if generation:
        _write_json(partial / "generation_config.json", dict(generation))
    if len(files) > 1:
        total = sum(t.numel() * dtype.itemsize for t in names.values())
        weight_map = {name: file for file, held in files.items() for name in held}
        _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file in TOKENIZER_FILES:
        if tokenizer_dir is not None and (tokenizer_dir / file).exists():
            shutil.copyfile(tokenizer_dir / file, partial / file)
    for path in [*partial.iterdir(), partial]:
        _sync(path)
    os.rename(partial, directory)
    _sync(directory.parent)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _agree(problem: str | None) -> str | None:
    """Rank 0's problem, known to every rank."""
    if not dist.is_initialized():
        return problem
    said = [problem]
    dist.broadcast_object_list(said, src=0)
    return said[0]
