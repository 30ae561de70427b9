"""A run that is made to fail by a plan: starts it as a person would, and strikes when it gets where the plan says.
Torch-free.

The run is a process of its own with its supervisor and its workers; what is known of it is the counters of its ranks,
which it keeps in files that are named to it, and in the end its log.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from truestep.checkpoint.of_run import checkpoint_place
from truestep.elastic.lifeline import PIPE
from truestep.elastic.places import HOSTS
from truestep.elastic.ports import LOOPBACK, free_port
from truestep.elastic.proxy import Line
from truestep.elastic.strikes import STRIKES, Flip, Ground, Row, Strike
from truestep.elastic.wire import address
from truestep.errors import UserError
from truestep.ledger.outcomes import Injection
from truestep.recipe.chaos import Chaos, Fault
from truestep.recipe.elastic import Elastic
from truestep.recipe.recipe import Recipe
from truestep.runlog import counters

FLIPS = "TRUESTEP_CHAOS"
POLL_S = 0.005
GRACE_S = 15.0
_FLIP_FIELDS = ("site", "step", "rank", "host", "tensor", "element", "bit", "sticky", "microbatch")


@dataclass(frozen=True)
class Ended:
    """`code` of the run; `late`: it was ended because the plan's deadline had passed."""

    code: int
    late: bool
    injections: list[Injection]


@dataclass
class _Planned:
    """A fault of the plan on its way: waiting, lasting, over."""

    fault: Fault
    strike: Strike
    injection: Injection
    lasting: bool = False

    @property
    def waiting(self) -> bool:
        return self.injection.at_s is None


@dataclass
class Storm:
    """Carries out `arguments` (of `python -m truestep`) under the faults of `plan`. `say` is told of each."""

    recipe: Recipe
    arguments: list[str]
    plan: Chaos
    say: Callable[[str], None] = print
    _joining: list[subprocess.Popen] = field(default_factory=list)
    _lines: dict[str, Line] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.recipe.directory

    def carry_out(self) -> Ended:
        """Until the run is over. UserError where the plan cannot be carried out on this recipe."""
        check(self.plan, self.recipe)
        with tempfile.TemporaryDirectory(prefix="truestep-chaos-") as folder:
            self._folder = Path(folder)
            self._held, self._lifeline = os.pipe()  # its other end closes when this process is gone
            planned = self._prepare()
            try:
                return self._drive(planned)
            finally:
                for one in planned:
                    if one.lasting:
                        one.strike.end()
                for process in self._joining:
                    _end(process)
                for line in self._lines.values():
                    line.close()
                os.close(self._held)
                os.close(self._lifeline)

    def _prepare(self) -> list[_Planned]:
        """What is needed before the run starts: lines to cut, the injector's plan, files for counters."""
        listen = self.recipe.machine.elastic.listen
        if self.plan.joining:
            host, port = address(listen or f"{LOOPBACK}:{free_port()}")
            if listen is None:
                self.arguments = [*self.arguments, "--set", f"machine.elastic.listen={host}:{port}"]
            self._lines = {name: Line((host or LOOPBACK, port)) for name in self.plan.joining}
        flips = self._folder / "flips.json"
        notes = flips.with_name(flips.name + ".struck")
        ground = Ground(checkpoint_folders(self.recipe), self._lines)
        planned = [_Planned(f, STRIKES[f.kind](f, ground), Injection(f)) for f in self.plan.faults]
        struck_within = [one for one in planned if isinstance(one.strike, Flip)]
        for number, one in enumerate(struck_within):
            assert isinstance(one.strike, Flip)
            everybody = one.fault.rank is None and one.fault.host is None
            one.strike.note = notes / (f"{number}-0" if everybody else f"{number}")
        if struck_within:
            body = [{name: dict(one.fault)[name] for name in _FLIP_FIELDS} for one in struck_within]
            flips.write_text(json.dumps({"faults": body}))
        return planned

    def _drive(self, planned: list[_Planned]) -> Ended:
        """Start the run and watch it. Where nothing starts it again after a failure, this does, as a person would."""
        deadline, late, left = time.monotonic() + self.plan.deadline, False, len(planned) + 1
        while True:
            process = self._start(planned)
            try:
                while process.poll() is None and not late:
                    self._poll(planned)
                    late = time.monotonic() > deadline
                    time.sleep(POLL_S)
            finally:
                _end(process)
            left -= 1
            failed = process.returncode not in (0, 1, 2)
            if late or not left or not failed or self._supervised:
                self._poll(planned, [])
                return Ended(process.returncode, late, [self._told(one) for one in planned])
            self.say("the run was ended by a fault; starting it again")

    @property
    def _supervised(self) -> bool:
        machine = self.recipe.machine
        return bool(self.plan.joining) or machine.processes > 1 or machine.elastic != Elastic()

    def _start(self, planned: Sequence[_Planned]) -> subprocess.Popen:
        processes = self.recipe.machine.processes + self.recipe.machine.elastic.spares
        own = self.plan.hosts or [f"host{number}" for number in range(processes)]
        variables = {counters.VARIABLE: str(counters.make(self._folder / "counters", processes)), HOSTS: ",".join(own)}
        if any(isinstance(one.strike, Flip) for one in planned):
            variables[FLIPS] = str(self._folder / "flips.json")
        process = self._popen(self.arguments, variables)
        token = self.run_dir.parent / f".{self.recipe.run.name}.token"
        if self.plan.joining and not self._joining:
            while process.poll() is None and not (token.exists() and token.stat().st_size):
                time.sleep(POLL_S)
            if process.poll() is None:
                self._joining = [self._join(name, n, token, variables) for name, n in self.plan.joining.items()]
        return process

    def _join(self, name: str, processes: int, token: Path, variables: dict[str, str]) -> subprocess.Popen:
        mine = {counters.VARIABLE: str(counters.make(self._folder / f"counters-{name}", processes)), HOSTS: name}
        place = f"{LOOPBACK}:{self._lines[name].port}"
        arguments = ["node", place, "--token-file", str(token), "--processes", str(processes)]
        return self._popen(arguments, variables | mine)

    def _popen(self, arguments: list[str], variables: dict[str, str]) -> subprocess.Popen:
        """In a session of its own, so that Ctrl-C reaches this process only; it dies with this one."""
        environment = {**os.environ, **variables, PIPE: str(self._held)}
        command = [sys.executable, "-m", "truestep", *arguments]
        return subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=[self._held])

    def _rows(self) -> list[Row]:
        found = [row for file in self._folder.glob("counters*") for row in counters.read(file) if row["pid"]]
        return [Row(row["pid"], row["rank"], _step(row)) for row in found if not counters.is_gone(row["pid"])]

    def _poll(self, planned: Sequence[_Planned], rows: Sequence[Row] | None = None) -> None:
        rows = self._rows() if rows is None else rows
        for one in planned:
            if one.lasting:
                one.lasting = one.strike.go_on(rows)
                if not one.lasting:
                    one.strike.end()
                    self.say(f"over: {one.fault.words}")
            elif one.waiting and (isinstance(one.strike, Flip) or self._due(one, rows)):
                self._strike(one, rows)

    def _due(self, one: _Planned, rows: Sequence[Row]) -> bool:
        """Whether the ranks that are meant have begun the step."""
        mine = one.strike.mine(rows)
        return bool(mine) and max(row.step for row in mine) >= one.fault.step

    def _strike(self, one: _Planned, rows: Sequence[Row]) -> None:
        step = max((row.step for row in rows), default=0)
        why_not = one.strike.begin(rows)
        if why_not is not None:
            one.injection = Injection(one.fault, why_not=why_not)
            return
        host = None
        if isinstance(one.strike, Flip):
            step, host = one.fault.step, one.strike.host
        one.injection = Injection(one.fault, one.strike.at_s(), step, host)
        one.lasting = one.strike.lasts
        self.say(f"step {step}: {one.fault.words}")

    def _told(self, one: _Planned) -> Injection:
        never = f"no rank that is meant has begun step {one.fault.step}"
        missed = one.waiting and not one.injection.why_not
        return Injection(one.fault, why_not=never) if missed else one.injection


def check(plan: Chaos, recipe: Recipe) -> None:
    """UserError where faults of the plan cannot be made on this recipe."""
    processes = recipe.machine.processes + sum(plan.joining.values())
    for number, fault in enumerate(plan.faults):
        if fault.rank is not None and fault.rank >= processes:
            raise UserError(
                f"faults.{number}.rank is {fault.rank}, and the run has {processes} processes (machine.processes); "
                f"name one from 0 to {processes - 1}"
            )
        if fault.kind == "corrupt" and "://" in (recipe.checkpoint.url or ""):
            raise UserError(
                f'faults.{number}: kind = "corrupt" needs checkpoints in a folder, and checkpoint.url is '
                f"{recipe.checkpoint.url}; leave that out for this"
            )


def checkpoint_folders(recipe: Recipe) -> list[Path]:
    """Where each stage's checkpoints lie, where that is a folder."""
    places = [checkpoint_place(recipe, recipe.directory, stage.name) for stage in recipe.stages]
    return [Path(place).expanduser() for place in places]


def _step(row: dict[str, int]) -> int:
    """The step that a rank is at, as the log counts (the counters hold those that are done); 0 before its first."""
    return 0 if row["section"] == counters.SectionOf.START else row["step"] + 1


def _end(process: subprocess.Popen) -> None:
    """End a process of ours and what it has started: politely, then not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
