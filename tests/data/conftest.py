"""Property tests write hundreds of stores: they do without waiting for the disk."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quick_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield
