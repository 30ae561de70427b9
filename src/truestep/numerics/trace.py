"""What a step does on one rank, operator by operator: who looks on sees every operator on plain tensors.

The same code looks at real tensors and at fake ones (which have shapes and no memory), so that a dry run can be
compared with a real one. Operators on DTensors are seen as the operators on local tensors that they become.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Observer(Protocol):
    """Someone who looks on: called after every operator with what went in and what came out."""

    def see(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> None: ...


class Trace(TorchDispatchMode):
    """A context in which observers see what this thread and its backward passes do."""

    def __init__(self, *observers: Observer):
        super().__init__()
        self.observers = observers

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's own dispatch comes next, and its local operators come here
        out = func(*args, **(kwargs or {}))
        for observer in self.observers:
            observer.see(func, args, kwargs or {}, out)
        return out


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def in_backward() -> int:
    """The number of the backward pass that this thread is in, -1 outside of one."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]


KINDS = ("parameters", "optimizer", "gathered", "gradients", "activations", "temporaries", "other")
"""gathered: whole weights that FSDP2 holds for a while. activations: made outside a backward pass and alive in one.
gradients: made in a backward pass and alive after it (those that travel between pipeline stages included).
other: from before the step and none of these, such as rotary tables."""


@dataclass
class _Storage:
    """Life of one storage. A time counts operators; `passes` counts backward passes begun so far."""

    made_in_backward: bool
    made_passes: int
    before: bool
    kind: str | None = None
    crossed: bool = False


class Memory:
    """Bytes of live storages over time, each counted once however many tensors look at it, by what it is for.

    Kinds go by life: they are known when a storage has ended or the trace has, so the peak is found afterwards. What
    kernels, and the backends of collectives, allocate for themselves within one operator is not seen."""

    def __init__(self):
        self._storages: list[_Storage] = []
        self._live: dict[int, tuple[int, int, weakref.ref]] = {}  # address -> (number, bytes, reference)
        self._events: list[tuple[int, int]] = []  # (number, change in bytes)
        self._pass, self._passes, self._begun = -1, 0, 0

    def see(self, op: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        self._look()
        if any(result.alias_info is None for result in op._schema.returns):  # others look at a storage that was there
            for tensor in tensors_in(out):
                self.hold(tensor)

    def hold(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        """Count the storage of `tensor` from now on, if it has one that is not counted yet, and say what it is for."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():  # with a graph, to_local would be an operator
                tensor = tensor.to_local()
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            made = _Storage(in_backward() >= 0, self._passes, self._begun == 0)
            self._storages.append(made)
            number, size = len(self._storages) - 1, storage.nbytes()
            self._live[address] = (number, size, weakref.ref(storage, lambda _: self._end(address)))
            self._events.append((number, size))
        if kind is not None:
            self._storages[self._live[address][0]].kind = kind

    def begin(self) -> None:
        """The step begins: peaks count from here, and what is alive now comes from before."""
        for number, _, _ in self._live.values():
            self._storages[number].before = True
        self._begun = len(self._events)

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """See storages that change their size, which is how FSDP2 frees and regains gathered weights. No operator tells
        of it, so torch's own method is replaced for as long as this lasts."""
        memory, original = self, torch.UntypedStorage.resize_

        def resize_(self: torch.UntypedStorage, size: int) -> Any:
            result = original(self, size)
            memory._resized(self)
            return result

        torch.UntypedStorage.resize_ = resize_
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original

    def peak(self) -> dict[str, int]:
        """Bytes by kind at the moment of the step when most bytes were live. Keys: KINDS."""
        self._close()
        live: Counter[str] = Counter()
        total, best, found = 0, -1, live.copy()
        for time, (number, change) in enumerate(self._events):
            live[self._kind(number)] += change
            total += change
            if time + 1 >= self._begun and total > best:
                best, found = total, live.copy()
        return {kind: found[kind] for kind in KINDS}

    def _look(self) -> None:
        task = in_backward()
        if task >= 0 and task != self._pass:
            self._passes += 1
        self._pass = task

    def _end(self, address: int) -> None:
        self._look()
        number, size, _ = self._live.pop(address)
        self._crossed(number)
        self._events.append((number, -size))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            number, size, reference = self._live[storage._cdata]
            self._events.append((number, storage.nbytes() - size))
            self._live[storage._cdata] = (number, storage.nbytes(), reference)
            if storage.nbytes() == 0:
                self._storages[number].kind = "gathered"

    def _crossed(self, number: int) -> None:
        """Note whether a storage outlived what it was made in: into a backward pass, or out of its own."""
        made = self._storages[number]
        made.crossed = self._passes > made.made_passes or (made.made_in_backward and self._pass < 0)

    def _close(self) -> None:
        self._pass = in_backward()
        for number, _, _ in self._live.values():
            self._crossed(number)

    def _kind(self, number: int) -> str:
        made = self._storages[number]
        if made.kind is not None:
            return made.kind
        if made.before:
            return "other"
        if not made.crossed:
            return "temporaries"
        return "gradients" if made.made_in_backward else "activations"
