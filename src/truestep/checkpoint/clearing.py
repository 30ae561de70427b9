"""Removing objects, where another process may be at the same. Torch-free."""

from truestep.errors import StorageError
from truestep.storage.interface import Store, remove
from truestep.storage.local import LocalStore


def clear_folder(store: Store, folder: str) -> int:
    """Delete every object below a folder; bytes freed."""
    freed = 0
    for entry in store.list(folder):
        store.event(f"{entry.key}: to be deleted")
        remove(store, entry.key)
        freed += entry.size
    remove_empty(store, folder)
    return freed


def remove_empty(store: Store, folder: str) -> None:
    """Object stores have no folders; a local one should not keep thousands of empty ones."""
    if not isinstance(store, LocalStore):
        return
    path = store.root / folder
    try:
        path.rmdir()
    except OSError as error:
        if path.is_dir() and not any(path.iterdir()):
            raise StorageError(f"{path}: the empty folder cannot be removed ({error.strerror})") from None
