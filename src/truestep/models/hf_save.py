"""Writing directories in Hugging Face layout: tensor by tensor, published as a whole or not at all."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from truestep.errors import ModelError
from truestep.files import sync
from truestep.models.hf import ALIASES, INDEX, TOKEN_IDS
from truestep.models.hf_config import config_from_section
from truestep.models.hf_pieces import hf_pieces
from truestep.numerics.pieces import Piece, find_aliases, stream_whole
from truestep.recipe.model import ModelSection

SHARD_BYTES = 4 * 2**30
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")

ALWAYS_AS_IT_IS = ".e_score_correction_bias"
"""DeepSeek-V3's selection bias is small steps added up; `transformers` keeps it in float32 as well."""


def save_hf(
    directory: Path,
    tensors: Mapping[str, torch.Tensor | Piece],
    section: ModelSection,
    *,
    dtype: torch.dtype | None = None,
    tokenizer_dir: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write our parameters by name, the resolved section, and the tokenizer as a directory that must not exist yet.

    Every rank calls this with what it holds; the tensors come to rank 0 one by one, which writes, with at most one
    shard's tensors in memory, to a hidden sibling that gets its name once everything is on disk. The files are the same
    from every mesh. Tensors are cast to `dtype` where given. `generation` becomes generation_config.json; its token ids
    also go into config.json. Returns the bytes of all tensors as they were written, on every rank.
    """
    pieces = hf_pieces(tensors, section)
    aliases = _aliases(pieces)
    stream = stream_whole({name: piece for name, piece in pieces.items() if name not in aliases})
    if dist.is_initialized() and dist.get_rank() > 0:
        for _ in stream:
            pass
        said = _hear((0, None))
    else:
        writer = _Writer(directory, aliases, dtype, shard_bytes)
        try:
            for name, whole in stream:  # to its end, also after a problem: the other ranks send
                assert whole is not None
                writer.add(name, whole)
            writer.finish(section, tokenizer_dir, generation or {})
        finally:
            writer.clear()
        said = _hear((writer.num_bytes, writer.problem))
    num_bytes, problem = said
    if problem is not None:
        raise ModelError(problem)
    return num_bytes


def save_stored(
    directory: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    section: ModelSection,
    *,
    dtype: torch.dtype,
    config: Mapping[str, Any],
    tokenizer_dir: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """The same of tensors under the names and in the dtypes that the files are to have. One process calls this.
    `config` is added to config.json, and `dtype` the one that it names: that of the weights once they are decoded."""
    writer = _Writer(directory, {}, None, shard_bytes, config)
    try:
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.kept = dtype
        writer.finish(section, tokenizer_dir, generation or {})
    finally:
        writer.clear()
    if writer.problem is not None:
        raise ModelError(writer.problem)
    return writer.num_bytes


def clear(directory: Path) -> None:
    """Remove a model directory, and what a process that was killed has left of one under the names of unfinished ones.
    Nobody else may be writing it."""
    for path in (directory, *directory.parent.glob(f".{directory.name}.*.partial")):
        shutil.rmtree(path, ignore_errors=True)


class _Writer:
    """Rank 0's side: groups tensors into files, each as large as `shard_bytes` allows (a larger tensor has one of its
    own). After the first failed write, whose sentence is `problem`, it takes everything and does nothing."""

    def __init__(
        self,
        directory: Path,
        aliases: dict[str, str],
        dtype: torch.dtype | None,
        shard_bytes: int,
        config: Mapping[str, Any] | None = None,
    ):
        self.directory, self.dtype, self.shard_bytes, self.config = directory, dtype, shard_bytes, config or {}
        self.partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}.partial"
        self.metadata = {"format": "pt"} | ({ALIASES: json.dumps(aliases)} if aliases else {})
        self.held: dict[str, torch.Tensor] = {}
        self.files: list[list[str]] = []
        self.num_bytes = 0
        self.kept = dtype
        self.problem: str | None = None
        if directory.exists():
            self.problem = f"{directory} exists already; export to a new name, nothing is overwritten."
        else:
            self._attempt(lambda: self.partial.mkdir(parents=True))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.problem is not None:
            return
        if tensor.is_floating_point() and not name.endswith(ALWAYS_AS_IT_IS):
            tensor = tensor.to(self.dtype or tensor.dtype)
            self.kept = self.kept or tensor.dtype
        if self.held and sum(t.nbytes for t in self.held.values()) + tensor.nbytes > self.shard_bytes:
            self._write()
        self.held[name] = _own_memory(tensor)
        self.num_bytes += tensor.nbytes

    def finish(self, section: ModelSection, tokenizer_dir: Path | None, generation: Mapping[str, Any]) -> None:
        """Write the rest and publish the directory."""
        if self.held or not self.files:
            self._write()
        self._attempt(lambda: self._publish(section, tokenizer_dir, generation))

    def clear(self) -> None:
        """Take away what was not published."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.problem is None:
            try:
                action()
            except (OSError, SafetensorError) as error:
                self.problem = f"{self.directory} cannot be written: {error}; give a folder with room and permission."

    def _write(self) -> None:
        """The tensors held, in a file whose final name is not known before the last one."""
        self._attempt(lambda: save_file(self.held, self.partial / f"{len(self.files)}", self.metadata))
        self.files.append(list(self.held))
        self.held = {}

    def _publish(self, section: ModelSection, tokenizer_dir: Path | None, generation: Mapping[str, Any]) -> None:
        partial, count = self.partial, len(self.files)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self.files):
            file = "model.safetensors" if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"
            os.rename(partial / f"{i}", partial / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            _write_json(partial / INDEX, {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map})
        dtype = str(self.kept or torch.float32).removeprefix("torch.")
        _describe(partial, section, tokenizer_dir, generation, {"torch_dtype": dtype} | dict(self.config))
        _settle(partial, self.directory)


def save_beside(
    directory: Path,
    file: str,
    write: Callable[[Path], None],
    section: ModelSection,
    *,
    tokenizer_dir: Path | None = None,
    generation: Mapping[str, Any] | None = None,
) -> int:
    """A directory whose weights lie in one file of another layout, which `write` makes; as `save_stored` otherwise.
    Returns the bytes of that file."""
    if directory.exists():
        raise ModelError(f"{directory} exists already; export to a new name, nothing is overwritten.")
    partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
        write(partial / file)
        _describe(partial, section, tokenizer_dir, generation or {}, {"torch_dtype": "float32"})
        _settle(partial, directory)
        return (directory / file).stat().st_size
    except OSError as error:
        sentence = f"{directory} cannot be written: {error}; give a folder with room and permission."
        raise ModelError(sentence) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _describe(
    partial: Path,
    section: ModelSection,
    tokenizer_dir: Path | None,
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Everything of a directory but its weights."""
    ids = {key: generation[key] for key in TOKEN_IDS if key in generation}
    _write_json(partial / "config.json", config_from_section(section) | ids | dict(config))
    if generation:
        _write_json(partial / "generation_config.json", dict(generation))
    for file in TOKENIZER_FILES:
        if tokenizer_dir is not None and (tokenizer_dir / file).exists():
            shutil.copyfile(tokenizer_dir / file, partial / file)


def _settle(partial: Path, directory: Path) -> None:
    """Give what is written its name, once it is on disk."""
    for path in [*partial.iterdir(), partial]:
        sync(path)
    os.rename(partial, directory)
    sync(directory.parent)


def _aliases(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """Later names of a tensor to its first name, as some rank sees it; these are recorded instead of stored."""
    seen = [find_aliases(pieces)]
    if dist.is_initialized():
        seen = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(seen, find_aliases(pieces))
    return {name: target for aliases in seen for name, target in aliases.items()}


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and not a view of anything larger: overlapping views are stored as separate copies."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _hear(ours: tuple[int, str | None]) -> tuple[int, str | None]:
    """Rank 0's size and problem, known to every rank."""
    if not dist.is_initialized():
        return ours
    said = [ours]
    dist.broadcast_object_list(said, src=0)
    return said[0]
