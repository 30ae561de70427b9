"""Units of samples for tests, a store of them, and a source of rows."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st

from truestep.data.sample_store import SampleStore, SampleWriter
from truestep.data.samples import Sample, Unit
from truestep.data.sources.base import Document

VOCAB, EOD = 1000, 0


def sample(roles: Sequence[int], first: int = 1, side: int = 0, value: float | np.ndarray = 0.0) -> Sample:
    """Ids that count up from `first`."""
    return Sample(np.arange(first, first + len(roles)), np.array(roles, dtype=np.uint8), side, value)


def counted(units: Sequence[Sequence[Sequence[int]]]) -> list[list[Unit]]:
    """Documents of one unit each, from the roles of its samples, with ids that count up over all of them."""
    documents, first = [], 1
    for roles_of_samples in units:
        unit = []
        for number, roles in enumerate(roles_of_samples):
            unit.append(sample(roles, first, side=1 - 2 * number, value=first / 8))
            first += len(roles)
        documents.append([unit])
    return documents


def make_samples(
    path: Path, documents: Sequence[list[Unit]], vocab_size: int = VOCAB, *, by_token: bool = False
) -> SampleStore:
    """A store of these rows of a source, with small blocks."""
    with SampleWriter(path, vocab_size, EOD, by_token=by_token, block_bytes=64) as writer:
        writer.append_many(documents, 7 * len(documents))
        return writer.finish({})


roles = st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=9)
"""Of one sample."""


def units(size: int, most: int = 12) -> st.SearchStrategy[list[list[list[int]]]]:
    """Roles of the samples of units of `size` samples."""
    return st.lists(st.lists(roles, min_size=size, max_size=size), min_size=1, max_size=most)


@dataclass(frozen=True)
class Lines:
    """The lines of a JSON Lines file as rows: a shard."""

    path: Path
    size: int = 0

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def stamp(self) -> str:
        return str(self.path.stat().st_mtime_ns)

    def documents(self) -> Iterator[Document]:
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            yield Document(None, None, f"{self.path.name}, line {number}", json.loads(line))


class Rows:
    """A file of rows, or a folder of them, each a shard."""

    notes: ClassVar[dict[str, str]] = {}

    def __init__(self, path: str):
        self._files = sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)]

    def shards(self) -> list[Lines]:
        return [Lines(file) for file in self._files]


ROWS = "tests.data.sample_fakes:Rows"
