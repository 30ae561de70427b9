"""Find out, on first use, whether a store can commit safely; many "S3-compatible" ones ignore preconditions.

The finding is stored once, create-only, as `probe/1.json`; later uses read it instead of probing again.
"""

import json
import urllib.error
import urllib.request
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta

import obstore
from obstore.store import S3Store

from truestep.errors import StorageError
from truestep.storage.interface import KeyExists, MissingKey, Store, remove
from truestep.storage.objects import ObjectStore

RECORD = "probe/1.json"
CONTENT = b"truestep looks at what this store can do"


@dataclass(frozen=True)
class Capabilities:
    """What the probe saw. `checksum_refused` is None where the kind of store offers no check of uploads to try."""

    create_only: bool
    range_read: bool
    list_after_put: bool
    checksum_refused: bool | None


def probe(store: Store) -> Capabilities:
    """Try the store out with small objects of its own names, all removed again."""
    key = f"probe/{uuid.uuid4().hex}"
    try:
        store.create(key, CONTENT)
        found = Capabilities(
            range_read=_reads_ranges(store, key),
            list_after_put=key in {entry.key for entry in store.list("probe")},
            create_only=_refuses_second_create(store, key),  # last, since it may spoil the object
            checksum_refused=_refuses_wrong_checksum(store, f"{key}-checksum"),
        )
    finally:
        remove(store, key)
    return found


def _reads_ranges(store: Store, key: str) -> bool:
    if store.get(key) != CONTENT:
        return False
    try:
        return store.get_range(key, 9, 14) == CONTENT[9:14]
    except StorageError:  # the whole object was read just now, so it is ranges that fail
        return False


def _refuses_second_create(store: Store, key: str) -> bool:
    try:
        store.create(key, b"second")
    except KeyExists:
        return store.get(key) == CONTENT
    return False


def _refuses_wrong_checksum(store: Store, key: str) -> bool | None:
    """Upload with the MD5 of other bytes through a signed request; only S3 has this."""
    if not isinstance(store, ObjectStore) or not isinstance(store.backend, S3Store):
        return None
    url = obstore.sign(store.backend, "PUT", key, timedelta(minutes=5))
    request = urllib.request.Request(
        url, data=CONTENT, method="PUT", headers={"Content-MD5": "AAAAAAAAAAAAAAAAAAAAAA=="}
    )
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        return error.code == 400
    remove(store, key)
    return False


def capabilities(store: Store) -> Capabilities:
    """The recorded finding, or a new probe whose finding is recorded."""
    try:
        return Capabilities(**json.loads(store.get(RECORD)))
    except MissingKey:
        found = probe(store)
    except (ValueError, TypeError):
        return probe(store)  # the record is damaged, and names are used only once: it stays, and is never believed
    if unsafe(found) is None:
        try:
            store.create(RECORD, json.dumps(asdict(found), sort_keys=True).encode())
        except KeyExists:
            return found  # another process probed at the same time
    return found


def unsafe(found: Capabilities) -> str | None:
    """Why checkpoints cannot be committed safely to such a store, or None."""
    if not found.create_only:
        return "it overwrites an object that a create-only put must leave alone"
    if not found.range_read:
        return "it returns the wrong bytes for a range"
    return None if found.list_after_put else "it does not list an object that was just stored"


def require_safe(store: Store) -> Capabilities:
    """The capabilities of a store that can commit safely; StorageError for any other."""
    found = capabilities(store)
    if reason := unsafe(found):
        raise StorageError(
            f"{store.url}: this store cannot commit a checkpoint safely, because {reason}; use another store"
        )
    return found
