"""The one door to storage: a folder or a URL in, a store out."""

from collections.abc import Mapping

from truestep.errors import StorageError
from truestep.storage.interface import Store
from truestep.storage.local import LocalStore
from truestep.storage.objects import ObjectStore

SCHEMES = {"s3", "gs", "az", "abfs", "abfss", "azure", "http", "https", "memory"}


def is_remote(url: str) -> bool:
    """Whether the text is a URL of an object store, not a local path."""
    return "://" in url and not url.startswith("file://")


def open_store(url: str, options: Mapping[str, str] | None = None) -> Store:
    """Open a local folder (path or file://) or an object store (s3://bucket/prefix, gs://, az://, https://, memory://).

    Nothing is contacted or created yet. Options are those of the store (endpoint, region, allow_http, ...); an option
    for a local folder is an error, since nothing would use it.
    """
    if is_remote(url):
        scheme = url.split("://", 1)[0]
        if scheme not in SCHEMES:
            raise StorageError(
                f"{url}: '{scheme}' is not a known kind of store; use one of {', '.join(sorted(SCHEMES))}"
            )
        return ObjectStore(url, dict(options or {}))
    if options:
        raise StorageError(f"{url}: a local folder takes no storage options, but {', '.join(sorted(options))} is set")
    return LocalStore(url.removeprefix("file://"))
