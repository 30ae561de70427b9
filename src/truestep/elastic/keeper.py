"""Keeps the newest checkpoint of a host, and of its neighbour, in memory, in a process outside the workers. Torch-free.

    python -m truestep.elastic.keeper [host]     token and limit from the environment

It holds the objects of the two step folders that came last (the newest checkpoint, and the one that is being written),
never more bytes than its limit, and says so if a folder does not fit. An object is there whole or not at all. The
process prints its port and ends when its standard input does: with whoever started it, not with a worker.
"""

import os
import secrets
import socketserver
import subprocess
import sys
import threading
from typing import Any, BinaryIO, cast

from truestep.elastic.ports import LOOPBACK
from truestep.errors import UserError
from truestep.storage.keeper import TOKEN, fill, proof, receive, send

LIMIT = "TRUESTEP_KEEPER_BYTES"
FOLDERS = 2
START_S = 20.0
FORGOTTEN = 1000
"""Names of dropped folders that are remembered, so that a late writer does not bring one back."""


class Refused(Exception):
    """A request that cannot be granted; `kind` is what the client raises."""

    def __init__(self, text: str, kind: str = ""):
        self.kind = kind
        super().__init__(text)


class Memory:
    """The objects, by key, in folders (all of a key but its last part) in the order in which these came."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self.folders: dict[str, dict[str, bytearray]] = {}
        self.dropped: dict[str, None] = {}
        self.lock = threading.Lock()

    def reserve(self, key: str, size: int) -> bytearray:
        """Room for an object, made by dropping older folders if need be."""
        folder = key.rpartition("/")[0]
        with self.lock:
            if folder in self.dropped:
                raise Refused("newer checkpoints took its place")
            if key in self.folders.get(folder, {}):
                raise Refused("there is such an object already", "exists")
            self.folders.setdefault(folder, {})
            others = [name for name in self.folders if name != folder]
            while others and (len(self.folders) > FOLDERS or self.used_bytes + size > self.limit_bytes):
                self._drop(others.pop(0))
            if self.used_bytes + size > self.limit_bytes:
                raise Refused(f"{size} bytes do not fit: {self.used_bytes} of {self.limit_bytes} are in use")
            self.used_bytes += size
        return bytearray(size)

    def give_up(self, size: int) -> None:
        """The object for which room was reserved did not come whole."""
        with self.lock:
            self.used_bytes -= size

    def keep(self, key: str, data: bytearray) -> None:
        folder = key.rpartition("/")[0]
        with self.lock:
            held = self.folders.get(folder)
            if held is None or key in held:  # dropped, or stored by another, while this one came in
                self.used_bytes -= len(data)
                kind = "" if held is None else "exists"
                raise Refused("there is such an object already" if kind else "newer checkpoints took its place", kind)
            held[key] = data

    def find(self, key: str) -> bytearray:
        with self.lock:
            try:
                return self.folders[key.rpartition("/")[0]][key]
            except KeyError:
                raise Refused("there is no such object", "missing") from None

    def entries(self, prefix: str) -> list[tuple[str, int]]:
        with self.lock:
            found = [(key, len(data)) for held in self.folders.values() for key, data in held.items()]
        return sorted(pair for pair in found if pair[0].startswith(f"{prefix}/"))

    def delete(self, key: str) -> None:
        self.find(key)
        with self.lock:
            self.used_bytes -= len(self.folders[key.rpartition("/")[0]].pop(key, b""))

    def _drop(self, folder: str) -> None:
        self.used_bytes -= sum(len(data) for data in self.folders.pop(folder).values())
        self.dropped[folder] = None
        if len(self.dropped) > FORGOTTEN:
            self.dropped.pop(next(iter(self.dropped)))


class _Handler(socketserver.StreamRequestHandler):
    """One connection: proof of the token, then requests until the other side goes."""

    rbufsize = 1 << 20
    disable_nagle_algorithm = True

    def handle(self) -> None:
        server = cast("KeeperServer", self.server)
        source = cast(BinaryIO, self.rfile)
        try:
            nonce = secrets.token_hex(16)
            send(self.wfile, {"nonce": nonce})
            told = str(receive(source).get("proof"))
            good = secrets.compare_digest(told, proof(server.token, nonce))
            send(self.wfile, {"ok": good})
            while good:
                self._serve(server.memory, source, receive(source))
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            return  # gone, or no client of ours; what it was sending is forgotten

    def _serve(self, memory: Memory, source: BinaryIO, request: dict[str, Any]) -> None:
        op, key = request["op"], str(request["key"])
        payload: memoryview | None = None
        try:
            answer: dict[str, Any] = {}
            if op == "put":
                self._put(memory, source, key, int(request["size"]))
            elif op == "get":
                payload = memoryview(memory.find(key))[int(request["start"]) : int(request["stop"])]
                if len(payload) != request["stop"] - request["start"]:
                    raise Refused(f"ends before byte {request['stop']}, which is needed")
            elif op == "list":
                answer["entries"] = memory.entries(key)
            elif op == "head":
                answer["bytes"] = len(memory.find(key))
            elif op == "delete":
                memory.delete(key)
            else:
                raise Refused(f"the keeper does not know how to {op!r}")
        except Refused as error:
            answer, payload = {"error": str(error), "kind": error.kind}, None
        send(self.wfile, answer)
        if payload is not None:
            self.wfile.write(payload)

    def _put(self, memory: Memory, source: BinaryIO, key: str, size: int) -> None:
        try:
            room = memory.reserve(key, size)
        except Refused:
            _skip(source, size)
            raise
        try:
            fill(source, memoryview(room))
        except BaseException:
            memory.give_up(size)
            raise
        memory.keep(key, room)


def _skip(source: BinaryIO, size: int) -> None:
    """Take in what is refused, so that the client hears why."""
    waste = memoryview(bytearray(min(size, 1 << 20)))
    while size:
        fill(source, waste[: min(size, len(waste))])
        size -= min(size, len(waste))


class KeeperServer(socketserver.ThreadingTCPServer):
    """Serves a Memory to those who have the token."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, host: str, token: str, limit_bytes: int):
        self.token, self.memory = token, Memory(limit_bytes)
        super().__init__((host, 0), _Handler)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"{host!s}:{port}"


def half_of_memory() -> int:
    """Half of the bytes of memory that are available now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class Keeper:
    """A keeper's process, for whoever starts the workers. It listens at `host` of this machine ("": everywhere)."""

    def __init__(self, token: str, host: str = LOOPBACK, limit_bytes: int | None = None):
        mine = {TOKEN: token, LIMIT: str(limit_bytes or half_of_memory())}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "truestep.elastic.keeper", host],
            env=os.environ | mine,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is for the launcher
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise UserError("the keeper of memory checkpoints did not start; set checkpoint.memory = false")
        self.port = int(line)

    @property
    def address(self) -> str:
        """Where this machine reaches it."""
        return f"{LOOPBACK}:{self.port}"

    def close(self) -> None:
        """End the process; what it holds is gone."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        try:
            self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    host = sys.argv[1] if len(sys.argv) > 1 else LOOPBACK
    token, limit_bytes = os.environ.pop(TOKEN), int(os.environ.pop(LIMIT))
    with KeeperServer(host, token, limit_bytes) as server:
        threading.Thread(target=server.serve_forever, name="serve", daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.buffer.read()  # until whoever started this is gone
        server.shutdown()


if __name__ == "__main__":
    main()
