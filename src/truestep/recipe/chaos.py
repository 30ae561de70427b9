"""A plan of faults for `truestep chaos`: what breaks, where and when, and what is expected of the run. TOML, typed."""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from truestep.errors import RecipeError
from truestep.recipe.problems import problems_in
from truestep.recipe.section import Section, field
from truestep.recipe.units import Bytes, Seconds

Kind = Literal["kill", "stop", "slow", "flip", "corrupt", "fill", "partition"]
Expect = Literal["located", "detected", "tolerated"]
OF_KIND: dict[str, dict[str, bool]] = {
    "kill": {"rank": True},
    "stop": {"rank": True, "seconds": True},
    "slow": {"rank": True, "factor": False, "steps": False},
    "flip": dict.fromkeys(("rank", "host", "tensor", "element", "bit", "sticky", "microbatch"), False)
    | {"site": True},
    "corrupt": {"element": False, "bit": False},
    "fill": {"rank": False, "seconds": True, "bytes": False},
    "partition": {"host": True, "seconds": True},
}  # fmt: skip
"""Fields of each kind of fault, besides `kind`, `step` and `expect`: whether they must be given."""


class Fault(Section):
    """One fault. It strikes when the run gets to `step` for the first time, as the log counts steps."""

    kind: Kind = field(
        help="kill, stop (SIGSTOP), slow a process; flip a bit in memory; corrupt the newest checkpoint; fill: files "
        "cannot grow; partition: a machine is cut off from the supervisor"
    )
    step: int = field(help="the step at whose beginning it strikes; corrupt: the first one with a checkpoint", ge=1)
    rank: int | None = field(None, help="which process; fill: all by default", ge=0)
    host: str | None = field(None, help="flip: the host that it sits on, wherever its ranks are; partition: the host")
    seconds: Seconds = field("0s", help="how long a stop, a full disk or a partition lasts")
    factor: float = field(3.0, help="slow: a step takes so many times as long", gt=1)
    steps: int = field(10, help="slow: for so many steps", ge=1)
    bytes: Bytes = field("64KiB", help="fill: files cannot grow beyond this", ge=0)
    site: Literal["state", "optimizer", "activation", "gradient", "reduced", "collective"] | None = field(
        None, help="flip: where (weights and optimizer state at rest, or within the step)"
    )
    tensor: str | int = field(0, help="flip: its name, or a number")
    element: int = field(0, help="flip, corrupt: which element or byte, modulo how many there are", ge=0)
    bit: int = field(30, help="flip, corrupt: which bit of it", ge=0)
    sticky: bool = field(False, help="flip: at every step from then on, instead of once")
    microbatch: int | None = field(None, help="flip: in this microbatch only", ge=0)
    expect: Literal["auto"] | Expect = field(
        "auto",
        help="located: the right rank or host is named; detected: something is said; tolerated: the run only goes on",
    )

    @property
    def words(self) -> str:
        """What was done, for people."""
        rank = "all ranks" if self.rank is None else f"rank {self.rank}"
        match self.kind:
            case "kill":
                return f"SIGKILL of {rank}"
            case "stop":
                return f"SIGSTOP of {rank} for {self.seconds:g} s"
            case "slow":
                return f"{rank} {self.factor:g} times as slow for {self.steps} steps"
            case "flip":
                where = f"host {self.host}" if self.host else rank
                return f"bit {self.bit} flipped in {self.site} of {where}" + (", again and again" * self.sticky)
            case "corrupt":
                return "a bit flipped in the newest checkpoint"
            case "fill":
                return f"no file of {rank} can grow beyond {self.bytes:,} bytes for {self.seconds:g} s"
            case _:
                return f"host {self.host} cut off from the supervisor for {self.seconds:g} s"

    def expected(self, hang_s: float) -> Expect:
        """What `auto` stands for. `hang_s`: machine.elastic.hang, after which a silent rank is named."""
        if self.expect != "auto":
            return self.expect
        if self.kind == "stop":
            return "located" if self.seconds > hang_s else "tolerated"
        return "located" if self.kind in ("kill", "slow", "partition") else "detected"


class Chaos(Section):
    """Faults, the machines that they happen on, and how long all may take."""

    hosts: list[str] = field(
        [], help="names of the hosts that this machine stands for; by default each process is a host of its own"
    )
    joining: dict[str, int] = field(
        {}, help="further machines, each an agent of its own on this one that joins over TCP: name -> processes"
    )
    deadline: Seconds = field("30m", help="the run is ended after this long", gt=0)
    faults: list[Fault] = field(help="what breaks")


def load_plan(file: str | os.PathLike[str]) -> Chaos:
    """The plan in a TOML file. Raises RecipeError with a sentence for each problem."""
    path = Path(file)
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise RecipeError([f"{path} cannot be read: {error.strerror}; give the path of a plan of faults."]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError([f"{path} is not TOML: {error}; correct it there."]) from None
    found = [f"{path}: {problem.path} {problem.text}" for problem in problems_in(Chaos, raw)]
    if not found:
        plan = Chaos.model_validate(raw)
        found = [f"{path}: {sentence}" for sentence in _checks(plan, raw)]
        if not found:
            return plan
    raise RecipeError(found)


def _checks(plan: Chaos, raw: dict[str, Any]) -> Iterator[str]:
    if not plan.faults:
        yield "faults is empty; write at least one [[faults]]."
    for number, (fault, given) in enumerate(zip(plan.faults, raw["faults"], strict=True)):
        known = OF_KIND[fault.kind]
        for name in sorted(given.keys() - known.keys() - {"kind", "step", "expect"}):
            yield f'faults.{number}.{name} has no effect on kind = "{fault.kind}"; take it out.'
        for name, needed in known.items():
            if needed and name not in given:
                yield f'faults.{number}.{name} is missing, which kind = "{fault.kind}" needs.'
        if fault.kind == "partition" and fault.host is not None and fault.host not in plan.joining:
            names = ", ".join(plan.joining) or "none"
            yield f"faults.{number}.host is {fault.host!r}, which does not join over TCP (joining: {names}); name one."
