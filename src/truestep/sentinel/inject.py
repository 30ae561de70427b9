"""Fault injection: single bits flipped on purpose, at named places of a step, as a plan says.

A plan is JSON, its path in TRUESTEP_CHAOS:

    {"faults": [{"site": "gradient", "step": 12, "rank": 2, "tensor": "embed.weight", "element": 5, "bit": 30}]}

Without a plan there is no injector, and nothing asks for one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from truestep.errors import UserError

VARIABLE = "TRUESTEP_CHAOS"
SITES = ("state", "optimizer", "activation", "gradient", "reduced", "collective")
"""At rest before a step: weights, optimizer state. Within it: the output of a block, a gradient of one microbatch
before it is reduced, a complete gradient that was handed to the optimizer, what a collective delivered."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Flip:
    """One fault. `step`: as the log counts; `rank`: None is all of them; `host`: in place of a rank, wherever that host
    is after a restart. `tensor`: its name, or a number that is taken modulo their count, as `element` is of its
    elements and `bit` of its bits. `sticky`: at every occasion from `step` on, whatever the microbatch; otherwise
    once."""

    site: str
    step: int
    rank: int | None = None
    host: str | None = None
    tensor: str | int = 0
    element: int = 0
    bit: int = 0
    sticky: bool = False
    microbatch: int | None = None


@dataclass
class Injector:
    """What is left to do of a plan, on one rank. `folder` remembers across restarts which flips are spent and which
    host a sticky one sits on. `struck`: flips that were carried out, with the name of what they hit."""

    flips: Sequence[Flip]
    rank: int
    host: str = ""
    folder: Path | None = None
    step: int = 0
    struck: list[tuple[Flip, str]] = field(default_factory=list)
    _spent: set[int] = field(default_factory=set)
    _names: dict[str, Sequence[str]] = field(default_factory=dict)

    def wants(self, site: str) -> bool:
        """Whether any flip is of this place, so that someone has to stand there."""
        return any(flip.site == site for flip in self.flips)

    def aim(self, site: str, names: Sequence[str]) -> None:
        """Say what there is to hit at a place."""
        self._names[site] = names

    def load(self, flips: Sequence[Flip]) -> None:
        """Take up another plan, at the same places."""
        self.flips = flips
        self._spent.clear()
        self.struck.clear()

    def begin(self, step: int) -> None:
        """Step `step` comes next, as the log counts."""
        self.step = step

    def strike(self, site: str, name: str, tensor: Callable[[], torch.Tensor], microbatch: int | None = None) -> None:
        """Flip what is due in the tensor `name` of this place, which is asked for only then."""
        for number, flip in enumerate(self.flips):
            if self._due(number, flip, site, name, microbatch):
                self._mark(number, flip)
                flip_bit_(tensor(), flip.element, flip.bit)
                self.struck.append((flip, name))

    def strike_all(self, site: str, named: Mapping[str, torch.Tensor]) -> None:
        """The same for all tensors of a place."""
        self.aim(site, list(named))
        for name, tensor in named.items():
            self.strike(site, name, lambda tensor=tensor: tensor)

    def _due(self, number: int, flip: Flip, site: str, name: str, microbatch: int | None) -> bool:
        if flip.site != site or self._aimed(flip) != name or not self._here(number, flip):
            return False
        if flip.sticky:
            return self.step >= flip.step
        fits = flip.microbatch is None or microbatch is None or flip.microbatch == microbatch
        return self.step == flip.step and fits and not self._is_spent(number)

    def _aimed(self, flip: Flip) -> str | int:
        names = self._names.get(flip.site)
        return names[flip.tensor % len(names)] if isinstance(flip.tensor, int) and names else flip.tensor

    def _here(self, number: int, flip: Flip) -> bool:
        if flip.host is not None:
            return flip.host == self.host
        note = self._note(number)
        if flip.sticky and self.host and note is not None and note.exists():
            return note.read_text() == self.host  # ranks are numbered anew after a restart; the fault is in the host
        return flip.rank is None or flip.rank == self.rank

    def _is_spent(self, number: int) -> bool:
        note = self._note(number)
        return number in self._spent or (note is not None and note.exists())

    def _mark(self, number: int, flip: Flip) -> None:
        self._spent.add(number)
        note = self._note(number)
        if note is not None and not note.exists():
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(self.host)

    def _note(self, number: int) -> Path | None:
        if self.folder is None:
            return None
        everybody = self.flips[number].rank is None and self.flips[number].host is None
        return self.folder / (f"{number}-{self.rank}" if everybody else f"{number}")


def flip_bit_(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element in place; both are taken modulo what there is. Any dtype, any strides."""
    if tensor.numel() == 0:
        return
    place = []
    rest = element % tensor.numel()
    for size in reversed(tensor.shape):
        rest, index = divmod(rest, size)
        place.append(index)
    cell = tensor.detach()[tuple(reversed(place))]
    size = cell.element_size()
    cell.view(_INTEGERS[size]).bitwise_xor_(_mask(bit % (8 * size), 8 * size))


def _mask(bit: int, width: int) -> int:
    """One bit as a number of the integers of that width, of which those of 8 bits are unsigned."""
    return (1 << bit) - (1 << width) if bit == width - 1 and width > 8 else 1 << bit


def read_plan(file: Path) -> list[Flip]:
    """The flips of a plan. UserError where it is not one."""
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{VARIABLE} names {file}, which is no readable JSON ({error}); unset it or mend the plan"
        ) from None
    if not isinstance(body, dict) or not isinstance(body.get("faults"), list):
        raise UserError(f"{file}: a plan is an object with a list named `faults`, see truestep.sentinel.inject")
    return [_flip(file, number, given) for number, given in enumerate(body["faults"])]


def _flip(file: Path, number: int, given: Any) -> Flip:
    known = {f.name for f in fields(Flip)}
    if not isinstance(given, dict) or not {"site", "step"} <= given.keys() <= known:
        raise UserError(f"{file}: fault {number} is {given!r}; it has `site` and `step`, and may have {sorted(known)}")
    if given["site"] not in SITES:
        raise UserError(f"{file}: fault {number} has site {given['site']!r}; write one of {', '.join(SITES)}")
    whole = {
        name: given[name] for name in ("step", "element", "bit", "rank", "microbatch") if given.get(name) is not None
    }
    for name, value in whole.items():
        if not isinstance(value, int) or value < 0:
            raise UserError(f"{file}: fault {number} has {name} = {value!r}; write a whole number from 0 on")
    return Flip(**given)


def injector(environ: Mapping[str, str], rank: int, host: str) -> Injector | None:
    """The injector of this process, if TRUESTEP_CHAOS names a plan."""
    if not environ.get(VARIABLE):
        return None
    file = Path(environ[VARIABLE])
    return Injector(read_plan(file), rank, host, file.with_name(file.name + ".struck"))
