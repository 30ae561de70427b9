"""Several hosts on one machine: network namespaces, each with process ids of its own, on cables to one switch.

A host is held by one process; when that ends, or the test does, everything on the host is killed and its network is
gone. Nothing of it can be seen outside, so tests may run side by side. Without root it all lies in a user namespace,
where the kernel allows that.
"""

import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

NOBODY = "02:00:00:00:de:ad"
"""A hardware address that no host has: what is sent there is lost on the way, and the sender hears nothing of it."""
PORT = 29400


class Refused(Exception):
    """This machine does not let us have a piece that is needed; the text names it."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class _Space:
    """Namespaces (network, processes, mounts) that live as long as the process that holds them. `outer`: whose user
    namespace it shares; None: it has one of its own, where that is needed."""

    def __init__(self, outer: "_Space | None" = None):
        own = os.geteuid() != 0
        command = outer.command() if outer else []
        command += ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
        command += ["--user", "--map-root-user"] if own and outer is None else []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._holder = subprocess.Popen([*command, "sh", "-c", "echo up; exec cat"], **pipes)
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            raise Refused(f"namespaces cannot be made: {self._holder.stderr.read().strip()}")
        self.pid = int(Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text())
        self._user = ["--user", "--preserve-credentials"] if own else []
        _run(*self.command("--net"), "ip", "link", "set", "lo", "up")

    def command(self, *spaces: str) -> list[str]:
        """In front of a command that is to run there; without a network of the space, the first is only its user's."""
        entered = [*self._user, *spaces]
        return ["nsenter", f"--target={self.pid}", *entered] if entered else []

    def close(self) -> None:
        self._holder.kill()  # and the kernel kills who is left there
        self._holder.communicate()


@dataclass
class Host:
    """`cable`: its end at the switch."""

    name: str
    address: str
    cable: str
    _lan: "Lan"
    _space: _Space
    _deaf: set[str] = field(default_factory=set)

    def command(self, *command: str) -> list[str]:
        """`command`, on this host."""
        return [*self._space.command("--net", "--pid", "--mount"), *command]

    def pull(self) -> None:
        """Pull the cable: nothing comes in and nothing goes out."""
        self._lan.switch("ip", "link", "set", self.cable, "down")

    def plug(self) -> None:
        self._lan.switch("ip", "link", "set", self.cable, "up")

    def lose(self, other: "Host") -> None:
        """From now on what this host sends to the other is lost. What the other sends arrives."""
        self._ip("neigh", "replace", other.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def find(self, other: "Host") -> None:
        """What is sent to the other arrives again."""
        self._ip("neigh", "del", other.address, "dev", "eth0")

    def pids(self) -> set[int]:
        """The processes that live on this host, as they are numbered there."""
        living = ["sh", "-c", "grep --files-without-match '^State:.Z' /proc/[0-9]*/status"]
        found = subprocess.run(self.command(*living), capture_output=True, text=True).stdout  # some end meanwhile
        return {int(line.split("/")[2]) for line in found.splitlines()}

    def kill(self, pid: int) -> None:
        _run(*self.command("kill", "-KILL", str(pid)))

    def hears(self, other: "Host") -> bool:
        """Whether a packet comes back from the other at this moment."""
        asked = [sys.executable, "-c", _ASK, other.address, str(PORT + 1)]
        return subprocess.run(self.command(*asked), capture_output=True).returncode == 0

    def _ip(self, *arguments: str) -> None:
        _run(*self._space.command("--net"), "ip", *arguments)

    def plug_in(self, end: str) -> None:
        """Take one end of a cable, and an address."""
        self._lan.switch("ip", "link", "set", end, "netns", str(self._space.pid))
        self._ip("link", "set", end, "name", "eth0")
        self._ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        self._ip("link", "set", "eth0", "up")

    def close(self) -> None:
        """Power off."""
        self._space.close()


# A refused connection is an answer too.
_ASK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)
except ConnectionRefusedError:
    pass
"""


class Lan:
    """A switch and the hosts on it. `delay_ms`: how long each cable takes, each way."""

    def __init__(self, *names: str, delay_ms: int = 0):
        self._switch, self.hosts, self._relay = _Space(), dict[str, Host](), None
        self._delay_ms = delay_ms
        try:
            self._piece("a bridge", "ip", "link", "add", "name", "switch", "type", "bridge")
            self.switch("ip", "link", "set", "switch", "up")
            for number, name in enumerate(names, start=1):
                self.hosts[name] = Host(name, f"10.77.0.{number}", f"port{number}", self, _Space(self._switch))
            self._lay_cables()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def switch(self, *command: str) -> str:
        """Run a command at the switch."""
        return _run(*self._switch.command("--net"), *command)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        self._switch.close()

    def _piece(self, name: str, *command: str) -> None:
        try:
            self.switch(*command)
        except Refused as error:
            raise Refused(f"{name} cannot be made here ({error})") from None

    def _lay_cables(self) -> None:
        if self._delay_ms and (lacks := _lacks_netem()):
            _say(f"{lacks}: cables of {self._delay_ms} ms are a process that holds every packet back for as long")
            self._relay = self._slow_cables()
        for number, host in enumerate(self.hosts.values(), start=1):
            if self._relay is None:
                ends = ("name", host.cable, "type", "veth", "peer", "name", f"end{number}")
                self._piece("a veth pair", "ip", "link", "add", *ends)
                self._delay(host.cable)
                self._delay(f"end{number}")
            host.plug_in(f"end{number}")
            self.switch("ip", "link", "set", host.cable, "master", "switch", "up")

    def _delay(self, end: str) -> None:
        if self._delay_ms:
            self.switch("tc", "qdisc", "add", "dev", end, "root", "netem", "delay", f"{self._delay_ms}ms")

    def _slow_cables(self) -> subprocess.Popen:
        """Cables without netem: a process takes in what comes at one end, and puts it out at the other one later."""
        pairs = [f"{host.cable}:end{number}" for number, host in enumerate(self.hosts.values(), start=1)]
        here = [*self._switch.command("--net"), sys.executable, "-m", "tests.slow_cable", str(self._delay_ms), *pairs]
        relay = subprocess.Popen(here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert relay.stdout is not None and relay.stderr is not None
        if relay.stdout.readline() != "up\n":
            raise Refused(f"neither netem nor tap devices can be had: {relay.stderr.read().strip()}")
        return relay


@cache
def lacks() -> str | None:
    """What of this machine keeps us from having hosts; None: nothing. Says at once why tests will be skipped."""
    without = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    found = f"{', '.join(without)} not installed (iproute2, util-linux)" if without else None
    try:
        if not found:
            with Lan("a", "b") as lan:
                found = None if lan["a"].hears(lan["b"]) else "two namespaces on one bridge do not hear each other"
    except Refused as error:
        found = str(error)
    if found:
        _say(f"SEVERAL HOSTS ARE NOT TESTED: {found}")
    return found


@cache
def _lacks_netem() -> str | None:
    if shutil.which("tc") is None:
        return "tc is not installed"
    space = _Space()
    try:
        _run(*space.command("--net"), "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except Refused as error:
        return f"this kernel has no netem ({error})"
    finally:
        space.close()
    return None


def _say(text: str) -> None:
    warnings.warn(text, stacklevel=2)  # pytest shows it below the results, whatever was skipped


@pytest.fixture(scope="session")
def hosts_are_there() -> None:
    """Skips where this machine does not let us have several hosts."""
    if why := lacks():
        pytest.skip(f"several hosts are not tested: {why}")
