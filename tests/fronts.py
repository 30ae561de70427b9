"""A reverse proxy before a real S3 server that can be told what becomes of which request.

Signatures cover the Host header, which is passed on as it came, so the server behind accepts what was signed for here.
"""

import contextlib
import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.servers import S3Server

SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.'
    b"</Message></Error>"
)


@dataclass(frozen=True)
class Request:
    """One request: method, path with query, body."""

    method: str
    path: str
    body: bytes

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.path

    @property
    def completes_upload(self) -> bool:
        return self.method == "POST" and "uploadId=" in self.path

    @property
    def lists(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Rule:
    """For the first `times` requests that match: what to do instead of passing them on. None drops the connection."""

    matches: Callable[[Request], bool]
    act: Callable[["Front", Request, Callable[[], Answer]], Answer | None]
    times: int = 1
    used: int = 0


@dataclass
class Front:
    """A running front. `seen` holds every request in order of its arrival."""

    server: S3Server
    rules: list[Rule] = field(default_factory=list)
    over: list[Rule] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    kept: dict[str, Answer] = field(default_factory=dict)
    arrived: threading.Event = field(default_factory=threading.Event)
    freed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, matches: Callable[[Request], bool], act: Callable, times: int = 1) -> None:
        self.rules.append(Rule(matches, act, times))

    def forget(self) -> None:
        """No rule holds any longer."""
        self.over += self.rules
        self.rules = []

    def unused(self) -> list[Rule]:
        """Rules that no request ever met: a test that proves nothing."""
        return [rule for rule in [*self.over, *self.rules] if not rule.used]

    def chosen(self, request: Request) -> Rule | None:
        with self._lock:
            self.seen.append(request)
            for rule in self.rules:
                if rule.times > 0 and rule.matches(request):
                    rule.times -= 1
                    rule.used += 1
                    return rule
        return None


def path(pattern: str, method: str = "") -> Callable[[Request], bool]:
    """Requests of a method (any by default) whose path and query hold a pattern."""
    return lambda request: method in ("", request.method) and re.search(pattern, request.path) is not None


def slow_down(front: Front, request: Request, forward: Callable[[], Answer]) -> Answer:
    """503, and the server behind never hears of it."""
    return Answer(503, [("Content-Type", "application/xml")], SLOW_DOWN)


def reset(front: Front, request: Request, forward: Callable[[], Answer]) -> None:
    """The connection breaks before the request got through."""


def lose_answer(front: Front, request: Request, forward: Callable[[], Answer]) -> None:
    """The server does what it was asked for, and the connection breaks before the answer."""
    forward()


def twice(front: Front, request: Request, forward: Callable[[], Answer]) -> Answer:
    """The network repeats the request; the second answer is the one that comes."""
    forward()
    return forward()


def keep(front: Front, request: Request, forward: Callable[[], Answer]) -> Answer:
    """Answer truly, and remember the answer for `stale`."""
    answer = front.kept[request.path] = forward()
    return answer


def stale(front: Front, request: Request, forward: Callable[[], Answer]) -> Answer:
    """What `keep` remembers of the same question; the truth if it was never asked."""
    return front.kept.get(request.path) or forward()


def hold(front: Front, request: Request, forward: Callable[[], Answer]) -> Answer:
    """Nothing happens until `freed` is set."""
    front.arrived.set()
    assert front.freed.wait(60)
    return forward()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front: Front
    address: tuple[str, int]

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, body)
        rule = self.front.chosen(request)
        answer = rule.act(self.front, request, lambda: self._forward(body)) if rule else self._forward(body)
        if answer is None:
            # No orderly end: the client's next read or write fails.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = len(answer.body)
        if self.command == "HEAD":
            length = int(next((value for name, value in answer.headers if name.lower() == "content-length"), 0))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else answer.body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _forward(self, body: bytes) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            found = connection.getresponse()
            return Answer(found.status, found.getheaders(), found.read())
        finally:
            connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at `seen`."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # clients may leave as they like
            super().handle()


@contextmanager
def front_of(server: S3Server) -> Iterator[Front]:
    """A front before a server, until the block ends."""
    host, port = server.options["endpoint"].removeprefix("http://").split(":")
    front = Front(server)
    handler = type("Handler", (_Handler,), {"front": front, "address": (host, int(port))})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        listener.daemon_threads = True
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{listener.server_port}"
        front.server = replace(server, options={**server.options, "endpoint": endpoint})
        try:
            yield front
        finally:
            front.freed.set()
            listener.shutdown()
