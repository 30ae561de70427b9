"""Files of object stores, kept in a local folder and verified again on every use. Local paths pass through.

<cache>/<digest of the URL>/<name>       the bytes
<cache>/<digest of the URL>/<name>.json  size, ETag and xxh3-128 of what was fetched
<cache>/<digest of the URL>/<name>.lock  held while one process fetches
"""

import fcntl
import fnmatch
import glob
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xxhash

from truestep.errors import StorageError
from truestep.files import sync
from truestep.storage.interface import Entry, Store
from truestep.storage.store import is_remote, open_store

_WILD = re.compile(r"[*?\[]")
READ_BYTES = 8 << 20


def expand(url_or_glob: str, options: Mapping[str, str] | None = None) -> list[str]:
    """The paths or URLs that a pattern (`*`, `?`, `[...]`; in a bucket `*` also matches `/`) names, sorted.

    A text without wildcards is returned as it is. StorageError if a pattern matches nothing.
    """
    if not _WILD.search(url_or_glob):
        return [url_or_glob]
    if is_remote(url_or_glob):
        scheme, rest = url_or_glob.split("://", 1)
        bucket, _, pattern = rest.partition("/")
        root = f"{scheme}://{bucket}"
        folder = _WILD.split(pattern, maxsplit=1)[0].rpartition("/")[0]
        keys = (entry.key for entry in open_store(root, options).list(folder))
        found = [f"{root}/{key}" for key in keys if fnmatch.fnmatchcase(key, pattern)]
    else:
        found = glob.glob(os.path.expanduser(url_or_glob.removeprefix("file://")), recursive=True)
    if not found:
        raise StorageError(f"{url_or_glob}: no file matches; correct the pattern")
    return sorted(found)


def fetch(url: str, options: Mapping[str, str] | None, cache_dir: str | Path) -> Path:
    """A local file with the bytes of `url`, fetched once and again if the remote or the local copy has changed.

    Several processes may ask at once: one fetches, the others wait. The file appears whole or not at all.
    """
    if not is_remote(url):
        return Path(url.removeprefix("file://")).expanduser()
    parent, _, name = url.rpartition("/")
    store = open_store(parent, options)
    entry = store.head(name)
    folder = Path(cache_dir).expanduser() / hashlib.sha256(url.encode()).hexdigest()[:32]
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if not _is_good(path, entry):
                _download(store, entry, path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot cache {url}: {error.strerror or error}; free space or set machine.cache"
        ) from None
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_good(path: Path, entry: Entry) -> bool:
    """Whether the copy is of the remote object as it is now, and still has the bytes that were fetched."""
    if not path.exists() or not _record(path).exists():
        return False
    record = json.loads(_record(path).read_text())
    if (record["size"], record["etag"]) != (entry.size, entry.etag):
        return False
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return record["xxh3"] == digest.hexdigest()


def _download(store: Store, entry: Entry, path: Path) -> None:
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
    digest, size = xxhash.xxh3_128(), 0
    try:
        with open(temporary, "xb") as file:
            for piece in store.stream(entry.key):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
        if size != entry.size:
            raise StorageError(f"{store.url}/{entry.key}: {size} bytes came, but it holds {entry.size}; try again")
        _record(path).unlink(missing_ok=True)  # a crash from here on leaves bytes without a record: fetched again
        os.replace(temporary, path)
        record = {"size": entry.size, "etag": entry.etag, "xxh3": digest.hexdigest()}
        record_temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
        record_temporary.write_text(json.dumps(record))
        os.replace(record_temporary, _record(path))
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
