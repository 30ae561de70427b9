"""Known bugs of composed parallelism, each as a change to the real code while a test runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

MUTATIONS: dict[str, Callable[[], AbstractContextManager]] = {}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The code changed by the mutation of this name; as it is, without one."""
    if not name:
        yield
        return
    with MUTATIONS[name]():
        yield
