"""Writing directories in Hugging Face layout: tensor by tensor, published as a whole or not at all."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from truestep.errors import ModelError
from truestep.files import sync
from truestep.models.hf import ALIASES, INDEX, TOKEN_IDS
from truestep.models.hf_config import config_from_section
from truestep.models.hf_names import hf_name
from truestep.models.shards import place
from truestep.recipe.model import ModelSection

SHARD_BYTES = 4 * 2**30
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")


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
    aliases = _aliases(names)
    files = _plan({name: tensor for name, tensor in names.items() if name not in aliases}, dtype, shard_bytes)
    metadata = {"format": "pt"} | ({ALIASES: json.dumps(aliases)} if aliases else {})
    partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}.partial"
    problem = _start(directory, partial) if writes else None
    for file, held in files.items():
        whole: dict[str, torch.Tensor] = {}
        for name in held:
            tensor = names[name].detach()
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # collective: also after a problem
            if writes and problem is None:
                whole[name] = _own_memory(full.to("cpu", _kept(full, dtype)))
        if writes and problem is None:
            problem = _attempt(directory, lambda file=file, whole=whole: save_file(whole, partial / file, metadata))
    if writes and problem is None:
        kept = dtype or next(iter(names.values())).dtype
        problem = _attempt(
            directory, lambda: _finish(directory, partial, files, names, section, kept, tokenizer_dir, generation or {})
        )
    if writes and problem is not None:
        shutil.rmtree(partial, ignore_errors=True)
    if (problem := _agree(problem)) is not None:
        raise ModelError(problem)


def _aliases(names: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Later names of a tensor to its first name; these are recorded instead of stored."""
    first: dict[tuple, str] = {}
    pairs = [(name, first.setdefault(place(tensor), name)) for name, tensor in names.items() if tensor.numel()]
    return {name: target for name, target in pairs if name != target}


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and not a view of anything larger: overlapping views are stored as separate copies."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _kept(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that is written: only floating-point tensors are cast."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _plan(names: Mapping[str, torch.Tensor], dtype: torch.dtype | None, shard_bytes: int) -> dict[str, list[str]]:
    """File name to the tensors it will hold, in order; a tensor larger than `shard_bytes` has a file of its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in names.items():
        size = tensor.numel() * _kept(tensor, dtype).itemsize
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups)}


def _start(directory: Path, partial: Path) -> str | None:
    if directory.exists():
        return f"{directory} exists already; export to a new name, nothing is overwritten."
    return _attempt(directory, lambda: partial.mkdir(parents=True))


def _attempt(directory: Path, action: Callable[[], object]) -> str | None:
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
    ids = {key: generation[key] for key in TOKEN_IDS if key in generation}
    config = config_from_section(section) | ids | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(partial / "config.json", config)
    if generation:
        _write_json(partial / "generation_config.json", dict(generation))
    if len(files) > 1:
        weight_map = {name: file for file, held in files.items() for name in held}
        total = sum(names[name].numel() * _kept(names[name], dtype).itemsize for name in weight_map)
        _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file in TOKENIZER_FILES:
        if tokenizer_dir is not None and (tokenizer_dir / file).exists():
            shutil.copyfile(tokenizer_dir / file, partial / file)
    for path in [*partial.iterdir(), partial]:
        sync(path)
    os.rename(partial, directory)
    sync(directory.parent)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _agree(problem: str | None) -> str | None:
    """Rank 0's problem, known to every rank."""
    if not dist.is_initialized():
        return problem
    said = [problem]
    dist.broadcast_object_list(said, src=0)
    return said[0]
