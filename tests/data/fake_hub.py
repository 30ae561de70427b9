"""A small Hugging Face hub on loopback: repositories with branches and commits, their file lists and their files."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeRepo:
    """Files by commit; `branches` map to commits; files named in `large` are stored as large files (sha256)."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    card: dict = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    gated: bool = False


def commit_id(number: int) -> str:
    return hashlib.sha1(str(number).encode()).hexdigest()


class FakeHub:
    """`with FakeHub({"datasets/owner/name": FakeRepo(...)}) as hub:` serves at hub.url; `hub.requests` lists what was
    asked, `hub.corrupt` names files whose content is served with its last byte flipped."""

    def __init__(self, repos: dict[str, FakeRepo]):
        self.repos, self.requests, self.corrupt = repos, list[str](), set[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self, body=True)

            def do_HEAD(self):
                hub.answer(self, body=False)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        self.requests.append(f"{request.command} {path}")
        if path.startswith("api/"):
            kind, owner, name, *rest = path.removeprefix("api/").split("/")
            key = f"{kind}/{owner}/{name}"
            revision = "/".join(rest[1:]) if rest[:1] == ["revision"] else "main"
            self._info(request, key, revision)
        else:
            key, _, tail = path.partition("/resolve/")
            revision, _, file = tail.partition("/")
            self._file(request, key if key.startswith("datasets/") else f"models/{key}", revision, file, body)

    def _find(self, request, key: str, revision: str) -> tuple[FakeRepo, str] | None:
        repo = self.repos.get(key)
        if repo is None:
            self._refuse(request, 404, "RepoNotFound")
        elif repo.gated:
            self._refuse(request, 403, "GatedRepo")
        elif (commit := repo.branches.get(revision, revision)) not in repo.commits:
            self._refuse(request, 404, "RevisionNotFound")
        else:
            return repo, commit
        return None

    def _info(self, request, key: str, revision: str) -> None:
        if not (found := self._find(request, key, revision)):
            return
        repo, commit = found
        siblings = []
        for name, data in repo.commits[commit].items():
            entry = {"rfilename": name, "size": len(data), "blobId": git_digest(data)}
            if name in repo.large:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        info = {"id": key.partition("/")[2], "sha": commit, "siblings": siblings, "cardData": repo.card, "tags": []}
        self._send(request, 200, json.dumps(info).encode(), {"Content-Type": "application/json"}, True)

    def _file(self, request, key: str, revision: str, name: str, body: bool) -> None:
        if not (found := self._find(request, key, revision)):
            return
        repo, commit = found
        data = repo.commits[commit].get(name)
        if data is None:
            self._refuse(request, 404, "EntryNotFound")
            return
        etag = hashlib.sha256(data).hexdigest() if name in repo.large else git_digest(data)
        if name in self.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._send(request, 200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, body)

    def _refuse(self, request, status: int, code: str) -> None:
        self._send(request, status, b"{}", {"X-Error-Code": code, "X-Error-Message": code}, True)

    def _send(self, request, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        request.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            request.send_header(name, value)
        request.end_headers()
        if body and request.command != "HEAD":
            request.wfile.write(data)


def git_digest(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
