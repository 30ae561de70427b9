"""Lines between the supervisor and the agents of other machines: JSON over TCP, sealed by a shared token. Torch-free.

Both sides prove that they know the token before anything else is said (HMAC-SHA256 of both nonces), and every line
after that carries a MAC over direction, number and text under a key of this connection, so that nobody can say, change,
repeat or leave out a line. The lines are not secret: what a recipe holds can be read on the way.
"""

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from truestep.errors import UserError

HELLO_S = 10.0
"""How long the other side may take to prove itself."""
FINISH_S = 2.0
MAX_LINE_BYTES = 2**24
TOKEN_BYTES = 16
"""A token is at least that long."""


class WireError(Exception):
    """The connection cannot be used (any more)."""


def read_token(file: Path) -> bytes:
    """The shared token in a file. UserError where there is none that is worth the name."""
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise UserError(
            f"the token file {str(file)!r} cannot be read ({error.strerror}); "
            f"make one that all machines share: openssl rand -hex 32 > {file}"
        ) from None
    if len(token) < TOKEN_BYTES:
        raise UserError(
            f"the token in {str(file)!r} has {len(token)} characters, fewer than {TOKEN_BYTES}; "
            f"make one that nobody guesses: openssl rand -hex 32 > {file}"
        )
    return token


def address(text: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UserError(f'{text!r} is not host:port; write for instance "10.0.0.1:29400"')
    return host.strip("[]"), int(port)


class Wire:
    """A proven connection. A thread receives; `received` never waits. `silent_s`: since the last line."""

    def __init__(self, line: socket.socket, token: bytes, *, server: bool):
        self._line, self._file = line, line.makefile("rb")
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(HELLO_S)
        self._mine, self._theirs = (b"S", b"C") if server else (b"C", b"S")
        try:
            self._key = self._prove(token)
        except (OSError, ValueError) as error:
            line.close()
            raise WireError(f"the other side did not prove that it knows the token ({error})") from None
        line.settimeout(None)
        self.peer, self.here = line.getpeername()[0], line.getsockname()[0]
        self._sent = self._heard = 0
        self._heard_at = time.monotonic()
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._sending = threading.Lock()
        self.broken: str | None = None
        self._receiver = threading.Thread(target=self._receive, name="wire", daemon=True)
        self._receiver.start()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def send(self, message: dict[str, Any]) -> None:
        """Say something; that the connection is broken shows in `broken`, not here."""
        with self._sending:
            text = json.dumps(message).encode()
            try:
                self._line.sendall(self._seal(self._mine, self._sent, text) + b" " + text + b"\n")
            except OSError as error:
                self.broken = self.broken or f"cannot be reached ({error})"
            self._sent += 1

    def received(self) -> list[dict[str, Any]]:
        """What came since the last call."""
        found = []
        while not self._inbox.empty():
            found.append(self._inbox.get())
        return found

    def finish(self) -> None:
        """Close after the last word, which the other side is given time to hear: it hangs up then."""
        with contextlib.suppress(OSError):  # it was faster
            self._line.shutdown(socket.SHUT_WR)
        self._receiver.join(FINISH_S)
        self.close()

    def close(self) -> None:
        self.broken = self.broken or "was closed"
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the other side was faster
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()

    def _prove(self, token: bytes) -> bytes:
        """Exchange nonces and proofs; the key of this connection. The client proves itself first."""
        nonce = secrets.token_hex(32).encode()
        self._line.sendall(nonce + b"\n")
        other = self._line_of_hello()
        pair = nonce + other if self._mine == b"S" else other + nonce
        if self._mine == b"S":
            self._check(self._line_of_hello(), _mac(token, b"proof C", pair))
            self._line.sendall(_mac(token, b"proof S", pair) + b"\n")
        else:
            self._line.sendall(_mac(token, b"proof C", pair) + b"\n")
            self._check(self._line_of_hello(), _mac(token, b"proof S", pair))
        return hmac.digest(token, b"key " + pair, "sha256")

    def _line_of_hello(self) -> bytes:
        text = self._file.readline(200)
        if len(text) != 65 or not text.endswith(b"\n"):
            raise ValueError("it hung up" if not text else "it does not speak this protocol")
        return text[:-1]

    @staticmethod
    def _check(given: bytes, right: bytes) -> None:
        if not hmac.compare_digest(given, right):
            raise ValueError("its proof is wrong: the tokens differ")

    def _seal(self, direction: bytes, number: int, text: bytes) -> bytes:
        return _mac(self._key, b"%s %d" % (direction, number), text)

    def _receive(self) -> None:
        try:
            while True:
                text = self._file.readline(MAX_LINE_BYTES)
                if not text.endswith(b"\n"):
                    return self._break("hung up")
                seal, _, body = text[:-1].partition(b" ")
                if not hmac.compare_digest(seal, self._seal(self._theirs, self._heard, body)):
                    return self._break("sent a line with a wrong seal")
                self._heard, self._heard_at = self._heard + 1, time.monotonic()
                self._inbox.put(json.loads(body))
        except (OSError, ValueError) as error:
            self._break(f"cannot be heard ({error})")

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        self._hang_up()


def _mac(key: bytes, purpose: bytes, text: bytes) -> bytes:
    return hmac.new(key, purpose + b"\n" + text, hashlib.sha256).hexdigest().encode()
