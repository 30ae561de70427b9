"""Datasets on the Hugging Face hub: Parquet and JSON Lines files of a repository at one commit."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from truestep.data.hub import HubFile, HubRepo, look_up
from truestep.data.sources.base import Shard
from truestep.data.sources.jsonl import JsonlShard
from truestep.data.sources.parquet import ParquetShard
from truestep.data.sources.text import TextShard
from truestep.errors import DataError

_JSON = (".jsonl", ".ndjson", ".json")
_COMPRESSED = ("", ".gz", ".zst")
_DEFAULT = ("*.parquet", "*.json.gz", "*.json.zst", *(f"*{s}{c}" for s in (".jsonl", ".ndjson") for c in _COMPRESSED))
_SPLIT = re.compile(r"(?:^|[/_.\-])(train|training|test|testing|eval|evaluation|valid|validation|val|dev)(?=[/_.\-]|$)")
_SAME_SPLIT = {"training": "train", "testing": "test", "eval": "test", "evaluation": "test"}
_SAME_SPLIT |= {"valid": "validation", "val": "validation", "dev": "validation"}


@dataclass(frozen=True)
class HfHubSource:
    """options:
    repo: owner/name. revision: a commit; a branch or tag is resolved to one and recorded.
    config: a configuration of the dataset card, or a top-level folder. files: patterns instead of config (`*` matches
    across folders). split: by the card or else by the names of the files; "train" by default so that a test split is
    never trained on by accident, "all" takes everything. stream: fetch files one by one without keeping them."""

    cache: Path
    text_field: str | None
    repo: str
    revision: str | None = None
    config: str | None = None
    files: Sequence[str] | None = None
    split: str = "train"
    stream: bool = False

    @cached_property
    def _found(self) -> HubRepo:
        if self.revision is None:
            raise DataError(
                f"hub repository {self.repo} has no revision; set options.revision to a commit, or to a branch such as "
                f'"main" (the commit it stands for is recorded).'
            )
        return look_up(self.repo, self.revision, "dataset", self.cache, self.stream)

    @property
    def notes(self) -> dict[str, str]:
        found = self._found
        licence = str(found.card.get("license") or "not stated")
        return {"repo": found.repo, "commit": found.commit, "asked_for": str(self.revision), "licence": licence}

    def shards(self) -> list[Shard]:
        found = self._found
        chosen = self._chosen(found)
        if not chosen:
            raise DataError(
                f"hub repository {self.repo}@{found.commit} has no Parquet or JSON Lines for config={self.config}, "
                f"files={self.files}, split={self.split!r}; it has {_some(f.name for f in found.files)}."
            )
        return [_shard(file, self.text_field) for file in chosen]

    def _chosen(self, found: HubRepo) -> list[HubFile]:
        names = [f.name for f in found.files]
        wanted = self._by_card(found, names) if self.files is None else None
        if wanted is None:
            below = f"{self.config}/" if self.config else ""
            patterns = self.files or _DEFAULT
            candidates = [n for n in names if n.startswith(below) and any(fnmatchcase(n, p) for p in patterns)]
            wanted = _of_split(candidates, self.split)
        return [f for f in found.files if f.name in set(wanted)]

    def _by_card(self, found: HubRepo, names: list[str]) -> list[str] | None:
        """The files that the dataset card lists for the config and split; None where the card lists none."""
        configs: list[dict[str, Any]] = found.card.get("configs") or []
        if self.config is not None:
            configs = [c for c in configs if c.get("config_name") == self.config]
        configs = [c for c in configs if c.get("data_files")]
        if not configs:
            return None
        if len(configs) > 1 and self.config is None:
            known = [str(c.get("config_name")) for c in configs]
            configs = [c for c in configs if c.get("default") or c.get("config_name") == "default"]
            if len(configs) != 1:
                raise DataError(f"hub repository {self.repo} has the configs {_some(known)}; set options.config.")
        patterns = [p for split, p in _data_files(configs[0]["data_files"]) if self.split in ("all", split)]
        return [n for n in names if any(fnmatchcase(n, p.replace("**", "*")) for p in patterns)]


def _data_files(entry: Any) -> Iterator[tuple[str, str]]:
    """(split, pattern) of `data_files` in a dataset card: a pattern, a list of them, or a list of {split, path}."""
    for item in entry if isinstance(entry, list) else [entry]:
        if isinstance(item, str):
            yield "train", item
        else:
            paths = item["path"]
            for path in paths if isinstance(paths, list) else [paths]:
                yield str(item.get("split", "train")), path


def _of_split(names: list[str], split: str) -> list[str]:
    """By the words train, validation, test in the names; where no name has one, everything is train."""
    if split == "all":
        return names
    splits = {name: _split_of(name) for name in names}
    if not any(splits.values()):
        return names if split == "train" else []
    return [name for name in names if splits[name] == split]


def _split_of(name: str) -> str | None:
    match = _SPLIT.search(name.lower())
    return _SAME_SPLIT.get(match[1], match[1]) if match else None


def _shard(file: HubFile, text_field: str | None) -> Shard:
    name = file.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        return ParquetShard(file, text_field, size=file.size)
    return JsonlShard(file, text_field) if name.endswith(_JSON) else TextShard((file,))


def _some(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"
