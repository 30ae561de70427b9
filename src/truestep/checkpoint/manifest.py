"""What a checkpoint holds, as canonical JSON: tensors cut in chunks, chunks in blocks with a digest each. Torch-free.

A chunk is a box of a tensor, stored as raw little-endian bytes in row order. Chunks lie in an object one after the
other with nothing between, wider elements first, so every byte belongs to a block and every chunk is aligned.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import xxhash

from truestep.errors import CheckpointError
from truestep.files import canonical
from truestep.numerics.boxes import Box, cover_problem

FORMAT = 1
MODEL = "model."
OPTIM = "optim."
TRAINING = (OPTIM, "exact.")  # begin the names of what is no weight
DIGEST_CHARS = 16  # of one block: xxh3-64 in hex
FINGERPRINTS = "fingerprints"
"""Name among the facts: of every tensor the fingerprint, of parameters and optimizer state as they were in memory."""


def plain(value: Any, what: str) -> Any:
    """A deep copy of plain JSON data; CheckpointError if anything in it would not come back as it was."""
    try:
        copy = json.loads(canonical(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} cannot be stored: {error}; use plain JSON (finite numbers, text, lists, dicts)"
        ) from None
    if copy != value:
        raise CheckpointError(
            f"{what} would not come back as it was (a tuple, or a key that is no text); use plain JSON"
        )
    return copy


def block_digest(data: memoryview | bytes) -> str:
    """xxh3-64 of a block, in hex."""
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where its bytes lie: object, byte offset in it, and the digests of its blocks, joined."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    object: str
    start: int
    num_bytes: int
    block_bytes: int
    blocks: str

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)

    def block_range(self, block: int) -> tuple[int, int]:
        """Byte range of a block within the object."""
        first = block * self.block_bytes
        return self.start + first, self.start + min(first + self.block_bytes, self.num_bytes)

    def digest(self, block: int) -> str:
        return self.blocks[block * DIGEST_CHARS : (block + 1) * DIGEST_CHARS]

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // self.block_bytes)

    def to_json(self) -> list[Any]:
        return [
            list(self.offsets),
            list(self.sizes),
            self.object,
            self.start,
            self.num_bytes,
            self.block_bytes,
            self.blocks,
        ]

    @staticmethod
    def from_json(row: list[Any]) -> "Chunk":
        offsets, sizes, key, start, num_bytes, block_bytes, blocks = row
        return Chunk(tuple(offsets), tuple(sizes), key, start, num_bytes, block_bytes, blocks)


@dataclass(frozen=True)
class TensorEntry:
    """Global shape, dtype (torch's name without "torch.") and the chunks that make up the tensor."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ObjectEntry:
    """A data object: its size in bytes and the SHA-256 over its block digests in order."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All of one checkpoint. `aliases` maps a name to the stored name whose storage it shares; `extra` is the caller's
    state (loader cursor, RNG by logical stream, ...); `facts` describe the run (what digest, mesh, versions)."""

    step: int
    epoch: int
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.objects.values())

    def to_bytes(self) -> bytes:
        tensors = {
            name: {"shape": entry.shape, "dtype": entry.dtype, "chunks": [chunk.to_json() for chunk in entry.chunks]}
            for name, entry in self.tensors.items()
        }
        objects = {key: [entry.size, entry.sha256] for key, entry in self.objects.items()}
        return canonical(
            {
                "format": FORMAT,
                "step": self.step,
                "epoch": self.epoch,
                "tensors": tensors,
                "aliases": self.aliases,
                "objects": objects,
                "extra": self.extra,
                "facts": self.facts,
            }
        )

    @staticmethod
    def from_bytes(data: bytes, where: str) -> "Manifest":
        """Parse and check; CheckpointError names `where`."""
        try:
            body = json.loads(data)
            if body["format"] != FORMAT:
                raise CheckpointError(
                    f"{where}: format {body['format']}, but this version reads {FORMAT}; update truestep"
                )
            tensors = {
                name: TensorEntry(
                    tuple(entry["shape"]), entry["dtype"], tuple(Chunk.from_json(row) for row in entry["chunks"])
                )
                for name, entry in body["tensors"].items()
            }
            objects = {key: ObjectEntry(size, sha256) for key, (size, sha256) in body["objects"].items()}
            manifest = Manifest(
                body["step"], body["epoch"], tensors, body["aliases"], objects, body["extra"], body["facts"]
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}: not a checkpoint manifest ({error}); the file is damaged") from None
        manifest.check(where)
        return manifest

    def check(self, where: str) -> None:
        """The chunks cover every tensor exactly, and the blocks every object; aliases have a target."""
        for name, entry in self.tensors.items():
            if problem := cover_problem(entry.shape, [chunk.box for chunk in entry.chunks]):
                raise CheckpointError(f"{where}: tensor {name} {problem}")
            for chunk in entry.chunks:
                if len(chunk.blocks) != DIGEST_CHARS * chunk.num_blocks:
                    raise CheckpointError(f"{where}: tensor {name} lacks block digests; it cannot be verified")
        for name, target in self.aliases.items():
            if target not in self.tensors:
                raise CheckpointError(f"{where}: {name} shares the storage of {target}, which is missing")
        by_object = self.chunks_by_object()
        for key in by_object.keys() | self.objects.keys():
            chunks = [chunk for _, chunk in by_object.get(key, [])]
            if key not in self.objects or self.objects[key] != describe_object(chunks):
                raise CheckpointError(f"{where}: object {key} does not agree with its chunks")

    def chunks_by_object(self) -> dict[str, list[tuple[str, Chunk]]]:
        """(tensor name, chunk) of every object, in order of their bytes."""
        found: dict[str, list[tuple[str, Chunk]]] = {}
        for name, entry in self.tensors.items():
            for chunk in entry.chunks:
                found.setdefault(chunk.object, []).append((name, chunk))
        for chunks in found.values():
            chunks.sort(key=lambda pair: pair[1].start)
        return found


def describe_object(chunks: list[Chunk]) -> ObjectEntry | None:
    """Size and digest of the object made of these chunks; None if they leave a gap or overlap."""
    digest, stop = hashlib.sha256(), 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        if chunk.start != stop:
            return None
        stop += chunk.num_bytes
        digest.update(chunk.blocks.encode())
    return ObjectEntry(stop, digest.hexdigest())
