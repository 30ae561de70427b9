"""Models of the Hugging Face hub, "org/name@revision": pinned to a commit, never with pickled weights."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from truestep.errors import ModelError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WANTED = ["*.json", "*.safetensors", "*.model", "merges.txt", "*.jinja"]


@dataclass(frozen=True)
class HubModel:
    """A downloaded model. `pinned` is its id with the commit, for the run's record."""

    directory: Path
    pinned: str


def is_hub_id(text: str) -> bool:
    """Whether `text` names a hub model; a folder of that name on disk goes first."""
    return _ID.fullmatch(text) is not None and not Path(text).exists()


def fetch(hub_id: str, cache: Path, *, token: str | None = None) -> HubModel:
    """Download "org/name", "org/name@branch" or "org/name@commit" into `cache` (a branch means its newest commit). One
    that is pinned by all 40 digits and complete in the cache needs no network."""
    name, _, revision = hub_id.partition("@")
    if _COMMIT.fullmatch(revision):
        commit = revision
        try:
            kept = snapshot_download(
                name, revision=commit, cache_dir=cache, allow_patterns=_WANTED, local_files_only=True
            )
            return HubModel(Path(kept), f"{name}@{commit}")
        except LocalEntryNotFoundError:
            pass  # not downloaded yet
    try:
        info = HfApi(token=token).model_info(name, revision=revision or None)
        files, commit = [s.rfilename for s in info.siblings or []], info.sha
        _check(hub_id, files)
        directory = snapshot_download(name, revision=commit, cache_dir=cache, allow_patterns=_WANTED, token=token)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{hub_id} cannot be fetched from the hub ({reason}); check the name, the revision, the network and, for a "
            f"gated model, your login."
        ) from error
    return HubModel(Path(directory), f"{name}@{commit}")


def _check(hub_id: str, files: list[str]) -> None:
    if any(file.endswith(".safetensors") for file in files):
        return
    pickles = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    found = f"only {pickles[0]}, a pickle, which is never loaded because it can run code" if pickles else "no weights"
    raise ModelError(f"{hub_id} has {found}; take a revision with safetensors, or convert it first.")
