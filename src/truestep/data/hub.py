"""Files of a Hugging Face hub repository at one commit, by the library `huggingface_hub`. Files are only read: no code
of a repository is run, and every file is checked against the hash that the hub states for it."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of whichever HTTP client the library uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from truestep.errors import DataError

Kind = Literal["dataset", "model"]
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFile:
    """One file of a repository at a commit: a File for the readers of `truestep.data.sources`. With `stream` it is
    fetched anew for each reading and not kept; else it stays in the cache."""

    repo: str
    kind: Kind
    commit: str
    name: str
    size: int
    digest: str  # sha256 of the content for large files, else git's sha1 of the blob
    cache: Path
    stream: bool = False

    @property
    def url(self) -> str:
        return f"hf://{self.kind}s/{self.repo}@{self.commit}/{self.name}"

    @property
    def stamp(self) -> str:
        return self.digest

    @contextmanager
    def here(self) -> Iterator[Path]:
        if not self.stream:
            yield self._fetch(self.cache / "hub", keep=True)
            return
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="hub-", dir=self.cache) as folder:
            yield self._fetch(Path(folder), keep=False)

    def _fetch(self, folder: Path, keep: bool) -> Path:
        """Into the library's cache at `folder`, or as a plain file there."""
        with asking(self.repo, self.commit):
            path = hf_hub_download(
                self.repo,
                self.name,
                repo_type=self.kind,
                revision=self.commit,
                endpoint=endpoint(),
                cache_dir=folder if keep else None,
                local_dir=None if keep else folder,
            )
        if _digest(Path(path), self.digest) != self.digest:
            raise DataError(f"{self.url}: the copy at {path} does not match the hub's hash; delete it and fetch again.")
        return Path(path)


@dataclass(frozen=True)
class HubRepo:
    """What a repository holds at a commit. `card` is the metadata at the top of its README."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]
    card: dict[str, Any]

    def file(self, name: str) -> HubFile | None:
        return next((f for f in self.files if f.name == name), None)


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def endpoint() -> str | None:
    """HF_ENDPOINT as it is now (the library reads it once, when it is imported); None is the public hub."""
    return os.environ.get("HF_ENDPOINT") or None


def look_up(repo: str, revision: str, kind: Kind, cache: Path, stream: bool = False) -> HubRepo:
    """Resolve a branch, tag or commit to a commit, and list its files. DataError where the hub says no."""
    with asking(repo, revision):
        api = HfApi(endpoint=endpoint())
        ask = api.dataset_info if kind == "dataset" else api.model_info
        info = ask(repo, revision=revision, files_metadata=True)
    commit = info.sha
    if commit is None or not is_commit(commit):
        raise DataError(f"hub repository {repo}: revision {revision!r} has no commit; name another revision.")
    files = []
    for item in info.siblings or []:
        digest = item.lfs.sha256 if item.lfs is not None else item.blob_id
        if item.size is None or not digest:
            raise DataError(f"hub repository {repo}@{commit}: the hub states no size or hash of {item.rfilename}.")
        files.append(HubFile(repo, kind, commit, item.rfilename, item.size, digest, cache, stream))
    card = info.card_data.to_dict() if info.card_data is not None else {}
    return HubRepo(repo, commit, tuple(sorted(files, key=lambda f: f.name)), card)


@contextmanager
def asking(repo: str, revision: str) -> Iterator[None]:
    """What the hub or the network answers becomes one sentence."""
    try:
        yield
    except GatedRepoError as error:
        raise DataError(f"hub repository {repo} is gated: accept its terms on the hub and set HF_TOKEN.") from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"hub repository {repo} does not exist or is private; correct the name or set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise DataError(
            f"hub repository {repo} has no revision {revision!r}; name a branch, tag or commit it has."
        ) from error
    except HFValidationError as error:
        raise DataError(f"{repo!r} is not the name of a hub repository; write it as owner/name.") from error
    except HfHubHTTPError as error:
        raise DataError(f"hub repository {repo}@{revision}: {_first_line(error)}; try again later.") from error
    except (HTTPError, OSError) as error:
        raise DataError(
            f"hub repository {repo}@{revision} cannot be read ({_first_line(error)}); check the network and free space."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _digest(path: Path, like: str) -> str:
    """Of the same kind as `like`: sha256 of the content, or git's sha1 of a blob."""
    git = len(like) == 40
    hasher = hashlib.sha1(f"blob {path.stat().st_size}\0".encode()) if git else hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            hasher.update(block)
    return hasher.hexdigest()
