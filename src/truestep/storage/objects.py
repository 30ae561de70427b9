"""Stores behind obstore: S3, Google Cloud Storage, Azure, HTTP, and memory for tests."""

import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from truestep.errors import StorageError
from truestep.storage.interface import Data, Entry, Event, KeyExists, MissingKey, Store, silent

PART_BYTES = 16 << 20
MAX_PARTS = 9_000  # S3 takes 10,000 parts an upload
UPLOADS_AT_ONCE = 4
CLIENT_OPTIONS = {
    "allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "proxy_url", "user_agent",
    "pool_max_idle_per_host", "pool_idle_timeout", "http1_only", "http2_only",
}  # fmt: skip
TIMEOUTS = {"connect_timeout": "5s", "timeout": "120s"}
# Refused connections come back at once, so the number of retries must not run out before the time does.
RETRIES = {
    "max_retries": 40,
    "retry_timeout": timedelta(seconds=90),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}

_CREDENTIALS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthenticationFailed")


def _code(text: str) -> str:
    """The server's own error code, where the answer carries one."""
    found = re.search(r"<Code>(\w+)</Code>", text)
    return f" (server says {found.group(1)})" if found else ""


def _said(error: Exception, url: str, key: str, doing: str) -> StorageError:
    text, place = str(error), f"{url}/{key}" if key else url
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return StorageError(f"{place}: cannot {doing}: there is no such bucket; create it or correct the URL")
    if isinstance(error, FileNotFoundError):
        return MissingKey(f"{place}: cannot {doing}: there is no such object")
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return KeyExists(f"{place}: exists already and was left as it is; committed objects are never replaced")
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return StorageError(f"{place}: cannot {doing}: no credentials found; set them in the environment")
    if isinstance(error, UnauthenticatedError) or any(word in text for word in _CREDENTIALS):
        return StorageError(
            f"{place}: cannot {doing}: wrong credentials{_code(text)}; correct those in the environment"
        )
    if isinstance(error, PermissionDeniedError):
        return StorageError(
            f"{place}: cannot {doing}: no permission{_code(text)}; check the credentials' rights and region"
        )
    if "kind: Connect" in text or "dns error" in text or "kind: Timeout" in text:
        return StorageError(
            f"{place}: cannot {doing}: the server cannot be reached; check the endpoint and the network"
        )
    return StorageError(f"{place}: cannot {doing}: {text.splitlines()[0]}{_code(text)}")


_FAILURES = (BaseError, FileNotFoundError, ValueError, OSError)


class ObjectStore(Store):
    """Objects in a bucket. `put` uploads big objects in parts; `create` is one conditional request."""

    request_bytes = 16 << 20
    requests_at_once = 8  # a single connection is far slower than the network

    def __init__(self, url: str, options: dict[str, str] | None = None, event: Event = silent):
        self.url = url.rstrip("/")
        self.event = event
        client: dict[str, Any] = dict(TIMEOUTS)
        config: dict[str, Any] = {}
        for name, value in (options or {}).items():
            flag = {"true": True, "false": False}.get(str(value).lower(), value)
            (client if name in CLIENT_OPTIONS else config)[name] = flag
        try:
            extra = {"config": config, "client_options": client, "retry_config": RETRIES}
            self.backend = from_url(url, **({} if url.startswith("memory:") else extra))  # pyright: ignore
        except UnknownConfigurationKeyError as error:
            raise StorageError(f"{url}: {str(error).splitlines()[0]}; correct storage_options") from None
        except _FAILURES as error:
            raise _said(error, self.url, "", "open it") from None

    def put_parts(self, key: str, parts: Iterable[Data], size: int) -> int:
        written = 0

        def counted() -> Iterator[Data]:
            nonlocal written
            for number, part in enumerate(parts, 1):
                written += len(part)
                self.event(f"{key}: part {number}")
                yield part

        try:
            self.event(f"{key}: upload starts")
            obstore.put(
                self.backend,
                key,
                b"".join(counted()) if size <= PART_BYTES else counted(),
                chunk_size=max(PART_BYTES, -(-size // MAX_PARTS)),
                max_concurrency=UPLOADS_AT_ONCE,
            )
        except _FAILURES as error:
            raise _said(error, self.url, key, "write it") from None
        self.event(f"{key}: uploaded")
        return written

    def create(self, key: str, data: Data) -> None:
        try:
            self.event(f"{key}: create starts")
            obstore.put(self.backend, key, bytes(data), mode="create")
        except _FAILURES as error:
            raise _said(error, self.url, key, "create it") from None
        self.event(f"{key}: created")

    def get(self, key: str) -> bytes:
        try:
            return obstore.get(self.backend, key).bytes().to_bytes()
        except _FAILURES as error:
            raise _said(error, self.url, key, "read it") from None

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if not len(out):
            return
        try:
            piece = obstore.get_range(self.backend, key, start=start, end=start + len(out))
        except _FAILURES as error:
            raise _said(error, self.url, key, "read it") from None
        if len(piece) != len(out):
            ends, needed = start + len(piece), start + len(out)
            raise StorageError(f"{self.url}/{key}: ends at byte {ends}, but byte {needed} is needed")
        out[:] = memoryview(piece)

    def stream(self, key: str) -> Iterator[Data]:
        try:
            for piece in obstore.get(self.backend, key).stream(min_chunk_size=8 << 20):
                yield memoryview(piece)
        except _FAILURES as error:
            raise _said(error, self.url, key, "read it") from None

    def list(self, prefix: str = "") -> list[Entry]:
        try:
            batches = obstore.list(self.backend, prefix=prefix.rstrip("/") or None)
            found = [Entry(meta["path"], meta["size"], meta["e_tag"]) for batch in batches for meta in batch]
        except _FAILURES as error:
            raise _said(error, self.url, prefix, "list it") from None
        return sorted(found, key=lambda entry: entry.key)

    def head(self, key: str) -> Entry:
        try:
            meta = obstore.head(self.backend, key)
        except _FAILURES as error:
            raise _said(error, self.url, key, "look at it") from None
        return Entry(key, meta["size"], meta["e_tag"])

    def delete(self, key: str) -> None:
        try:
            self.event(f"{key}: delete starts")
            obstore.delete(self.backend, key)
        except _FAILURES as error:
            raise _said(error, self.url, key, "delete it") from None
        self.event(f"{key}: deleted")
