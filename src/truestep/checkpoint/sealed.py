"""Small records that carry the SHA-256 of themselves, and how commits and their folders are named. Torch-free."""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from truestep.errors import CheckpointError
from truestep.files import canonical

_COMMIT = re.compile(r"commits/(\d{12})-(\d{6})")
_FOLDER = re.compile(r"steps/(\d{12})-(\d{6})-(\d{4,})")


@dataclass(frozen=True, order=True)
class Committed:
    """A commit. Ordered by step, then by epoch, as numbers."""

    step: int
    epoch: int

    @property
    def name(self) -> str:
        return f"{self.step:012d}-{self.epoch:06d}"

    @property
    def key(self) -> str:
        return f"commits/{self.name}"

    def folder(self, serial: int) -> str:
        """Where the objects of this commit lie; of the saves of an attempt each has a serial number of its own."""
        return f"steps/{self.name}-{serial:04d}"

    @staticmethod
    def parse(key: str) -> "Committed | None":
        """The commit of a key; None if that is no commit's."""
        match = _COMMIT.fullmatch(key)
        return Committed(int(match[1]), int(match[2])) if match else None


def parse_folder(folder: str) -> tuple[Committed, int] | None:
    """Of which save a folder is: what it would commit, and its serial number; None if it is no save's."""
    match = _FOLDER.fullmatch(folder)
    return (Committed(int(match[1]), int(match[2])), int(match[3])) if match else None


def seal(body: dict[str, Any]) -> bytes:
    """A small record that carries the SHA-256 of itself."""
    return canonical({"body": body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """The record's body; CheckpointError if a single byte differs from what was sealed."""
    try:
        body = json.loads(data)["body"]
        intact = isinstance(body, dict) and seal(body) == data
    except (ValueError, KeyError, TypeError):
        intact, body = False, {}
    if not intact:
        raise CheckpointError(
            f"{where}: the record is damaged; restore it from a copy, or move it away if no attempt runs"
        )
    return body
