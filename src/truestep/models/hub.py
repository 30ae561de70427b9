"""Models of the Hugging Face hub, "org/name@revision": pinned to a commit, checked by hash, never with pickles."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.errors import HTTPError as NetworkError  # pyright: ignore[reportPrivateImportUsage]
from huggingface_hub.hf_api import RepoSibling

from truestep.errors import ModelError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WANTED = re.compile(r"[^/]+\.(json|safetensors|model|jinja)|merges\.txt")


@dataclass(frozen=True)
class HubModel:
    """A downloaded model. `pinned` is its id with the commit, for the run's record."""

    directory: Path
    pinned: str


def is_hub_id(text: str) -> bool:
    """Whether `text` names a hub model; a folder of that name on disk goes first."""
    return _ID.fullmatch(text) is not None and not Path(text).exists()


def fetch(hub_id: str, cache: Path) -> HubModel:
    """Download "org/name", "org/name@branch" or "org/name@commit" into `cache` (a branch: its newest commit) and check
    every file against the hub's hash. Without a network, a full commit that was downloaded before is taken as it is."""
    name, _, revision = hub_id.partition("@")
    endpoint = os.environ.get("HF_ENDPOINT") or None  # the library reads it only once, when it is imported
    try:
        info = HfApi(endpoint=endpoint).model_info(name, revision=revision or None, files_metadata=True)
        _check_list(hub_id, [file.rfilename for file in info.siblings or []])
        files = [file for file in info.siblings or [] if _WANTED.fullmatch(file.rfilename)]
        places = {
            file.rfilename: hf_hub_download(name, file.rfilename, revision=info.sha, cache_dir=cache, endpoint=endpoint)
            for file in files
        }
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelError(_sentence(hub_id, error)) from error
    except (NetworkError, OSError) as error:
        kept = _kept(name, revision, cache)
        if kept is None:
            raise ModelError(_sentence(hub_id, error)) from error
        return HubModel(kept, f"{name}@{revision}")
    for file in files:
        _verify(hub_id, Path(places[file.rfilename]), file)
    return HubModel(Path(places["config.json"]).parent, f"{name}@{info.sha}")


def _kept(name: str, revision: str, cache: Path) -> Path | None:
    if _COMMIT.fullmatch(revision) is None:
        return None
    try:
        config = hf_hub_download(name, "config.json", revision=revision, cache_dir=cache, local_files_only=True)
        return Path(config).parent
    except LocalEntryNotFoundError:
        return None


def _check_list(hub_id: str, files: list[str]) -> None:
    if "config.json" not in files:
        raise ModelError(f"{hub_id} has no config.json; name a repository that holds a model.")
    if any(file.endswith(".safetensors") for file in files):
        return
    pickles = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    found = f"only {pickles[0]}, a pickle, which is never loaded because it can run code" if pickles else "no weights"
    raise ModelError(f"{hub_id} has {found}; take a revision with safetensors, or convert it first.")


def _verify(hub_id: str, path: Path, file: RepoSibling) -> None:
    """Large files are named by the sha256 of their content, others by git's sha1 of a blob."""
    if file.lfs is not None:
        hasher, wanted = hashlib.sha256(), file.lfs.sha256
    else:
        hasher, wanted = hashlib.sha1(f"blob {path.stat().st_size}\0".encode()), file.blob_id
    with open(path, "rb") as stream:
        while block := stream.read(2**20):
            hasher.update(block)
    if hasher.hexdigest() != wanted:
        raise ModelError(f"{path} is not the file {file.rfilename} of {hub_id} by its hash; delete it and fetch again.")


def _sentence(hub_id: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"{hub_id} cannot be fetched from the hub ({reason}); check the name, the revision, the network and, for a "
        f"gated model, HF_TOKEN."
    )
