"""A store in the memory of a keeper, the process of a host that outlives the workers (truestep.elastic.keeper).

A message is a length (4 bytes, big-endian), so many bytes of JSON, and `size` raw bytes where the JSON has a size. The
server first sends a nonce; the client proves with HMAC-SHA256 that it has the token, which never travels.
"""

import hashlib
import hmac
import json
import queue
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, Protocol

from truestep.errors import StorageError
from truestep.storage.interface import Data, Entry, Event, KeyExists, MissingKey, Store, silent

ADDRESS, TOKEN = "TRUESTEP_KEEPER", "TRUESTEP_KEEPER_TOKEN"
"""Variables of the environment: host:port of this host's keeper, and the secret of all keepers of the run."""

CONNECT_S, ANSWER_S = 2.0, 30.0
LONGEST_HEADER_BYTES = 64 << 20  # a list of many keys
_ERRORS: dict[str, type[StorageError]] = {"missing": MissingKey, "exists": KeyExists}


class _Sink(Protocol):
    def write(self, data: Data, /) -> Any: ...


def send(out: _Sink, header: dict[str, Any]) -> None:
    """Write one header; raw bytes follow it from elsewhere."""
    text = json.dumps(header).encode()
    out.write(struct.pack(">I", len(text)) + text)


def receive(source: BinaryIO) -> dict[str, Any]:
    """Read one header; EOFError if the other side has gone, ValueError if what comes is none."""
    size = struct.unpack(">I", exactly(source, 4))[0]
    if size > LONGEST_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(exactly(source, size))
    if not isinstance(header, dict):
        raise ValueError(f"a header that is a {type(header).__name__}")
    return header


def exactly(source: BinaryIO, size: int) -> bytes:
    data = bytearray(size)
    fill(source, memoryview(data))
    return bytes(data)


def fill(source: BinaryIO, out: memoryview) -> None:
    """Fill `out`; EOFError if the other side goes before that."""
    done = 0
    while done < len(out):
        count = source.readinto(out[done:])  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise EOFError
        done += count


def proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


class _Connection:
    """One connection, on which one request is made at a time."""

    def __init__(self, address: str, token: str):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), CONNECT_S)
        self.socket.settimeout(ANSWER_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.source, self.sink = self.socket.makefile("rb"), self.socket.makefile("wb", buffering=0)
        send(self.sink, {"proof": proof(token, receive(self.source)["nonce"])})
        if not receive(self.source).get("ok"):
            raise PermissionError("it does not know this token")

    def close(self) -> None:
        self.source.close()
        self.sink.close()
        self.socket.close()


class KeeperStore(Store):
    """What a keeper holds under `prefix` (run and stage), as a store. Nothing is contacted before the first use."""

    request_bytes = 16 << 20
    requests_at_once = 4

    def __init__(self, address: str, token: str, prefix: str, event: Event = silent):
        self.address, self.token, self.prefix = address, token, prefix.strip("/")
        self.url, self.event = f"memory://{address}/{self.prefix}", event
        self.idle: queue.LifoQueue[_Connection] = queue.LifoQueue()

    def put_parts(self, key: str, parts: Iterable[Data], size: int) -> int:
        written = 0

        def body(connection: _Connection) -> None:
            nonlocal written
            for part in parts:
                written += len(part)
                if written > size:
                    break
                connection.socket.sendall(part)
            if written != size:
                raise StorageError(f"{self.url}/{key}: {written} bytes came, but {size} were announced")

        self._ask("write it", key, {"op": "put", "size": size}, body)
        return written

    def create(self, key: str, data: Data) -> None:
        self.put(key, data)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if len(out):
            self._ask("read it", key, {"op": "get", "start": start, "stop": start + len(out)}, into=out)

    def list(self, prefix: str = "") -> list[Entry]:
        answer = self._ask("list it", prefix.strip("/"), {"op": "list"})
        below = len(self.prefix) + 1
        return [Entry(key[below:], size) for key, size in answer["entries"]]

    def head(self, key: str) -> Entry:
        return Entry(key, self._ask("look at it", key, {"op": "head"})["bytes"])

    def delete(self, key: str) -> None:
        self._ask("delete it", key, {"op": "delete"})

    def _ask(
        self,
        doing: str,
        key: str,
        header: dict[str, Any],
        body: Callable[[_Connection], None] | None = None,
        into: memoryview | None = None,
    ) -> dict[str, Any]:
        """One request and its answer. A connection that anything went wrong on is not used again."""
        place = f"{self.url}/{key}" if key else self.url
        try:
            connection = self._connection()
            try:
                send(connection.sink, header | {"key": f"{self.prefix}/{key}" if key else self.prefix})
                if body:
                    body(connection)
                answer = receive(connection.source)
                if into is not None and "error" not in answer:
                    fill(connection.source, into)
            except BaseException:
                connection.close()
                raise
        except (OSError, EOFError, ValueError, KeyError) as error:
            reason = str(error) or "the connection broke"
            raise StorageError(f"{place}: cannot {doing}: the keeper does not answer ({reason})") from None
        self.idle.put(connection)
        if "error" in answer:
            raise _ERRORS.get(answer.get("kind", ""), StorageError)(f"{place}: cannot {doing}: {answer['error']}")
        return answer

    def _connection(self) -> _Connection:
        try:
            return self.idle.get_nowait()
        except queue.Empty:
            return _Connection(self.address, self.token)
