"""Values with units: "50M" tokens, "10m", "8GiB". Each type accepts text with a unit, and prints back exactly."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "G": 10**9}
_TIME_S = {"s": Decimal(1), "ms": Decimal("0.001"), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_BYTES = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_NUMBER = r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"


@dataclass(frozen=True)
class Unit:
    """Marks a type with a unit: its name and an example, for comments and messages."""

    name: str
    example: str


def _decimal(text: str) -> Decimal:
    """The exact value of a decimal number. A leading zero is refused: some readers take it for octal."""
    if re.match(r"[+-]?0[\d_]", text):
        raise ValueError(f"{text!r} has a leading zero; write {text.lstrip('0_') or '0'}")
    return Decimal(text.replace("_", ""))


def _whole(number: Decimal, text: object) -> int:
    if number != number.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def read_number(value: Any, *, whole: bool) -> Any:
    """Text that spells a number becomes that number ("1e3" -> 1000, and with `whole` "1e-1" is refused); a boolean is
    no number. Anything else is returned as it is, for the type check that follows."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    if not isinstance(value, str) or not re.fullmatch(_NUMBER, value):
        return value
    number = _decimal(value)
    return _whole(number, value) if whole else float(number)


def _scaled(value: object, units: Mapping[str, int | Decimal], example: str) -> Decimal:
    """The value in the base unit, exactly. A plain number is a text without a unit."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number with a unit, such as {example}")
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*", str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a number with a unit, such as {example}")
    digits, unit = match.groups()
    if unit not in units:
        known = ", ".join(u for u in units if u)
        problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise ValueError(f"{value!r} {problem}; write it as in {example} (units: {known})")
    number = _decimal(digits) * units[unit]
    if number < 0:
        raise ValueError(f"{value!r} is negative")
    return number


def parse_count(value: object) -> int:
    """Text "50M" is 50_000_000. Suffixes K, M, B (or G), T are powers of 1000."""
    return _whole(_scaled(value, _COUNT, '"50M"'), value)


def parse_bytes(value: object) -> int:
    """Text "8MiB" is 8_388_608; KB, MB, GB, TB are decimal, KiB, MiB, GiB, TiB binary."""
    return _whole(_scaled(value, _BYTES, '"8MiB"'), value)


def parse_seconds(value: object) -> float:
    """Text "10m" is 600.0. A plain number is refused: a time needs its unit."""
    return float(_scaled(value, _TIME_S, '"10m" or "30s"'))


def _largest(number: int, units: Mapping[str, int], names: str) -> str | int:
    """The number in the largest of the units that divides it; a plain integer where none does."""
    for name in names.split():
        if number and number % units[name] == 0:
            return f"{number // units[name]}{name}"
    return number


def format_count(number: int) -> str | int:
    """The inverse of parse_count: 50_000_000 is "50M", 1025 stays 1025."""
    return _largest(number, _COUNT, "T B M K")


def format_bytes(number: int) -> str | int:
    """The inverse of parse_bytes: 8_388_608 is "8MiB"."""
    return _largest(number, _BYTES, "TiB GiB MiB KiB TB GB MB KB")


def format_seconds(seconds: float) -> str:
    """The inverse of parse_seconds: 600.0 is "10m", 0.5 is "0.5s"."""
    if seconds != int(seconds):
        return f"{seconds!r}s"
    return str(_largest(int(seconds), {"d": 86400, "h": 3600, "m": 60, "s": 1}, "d h m s") or "0s")


def _schema(pattern: str, *plain: str) -> WithJsonSchema:
    text = {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*({pattern})\s*$"}
    return WithJsonSchema({"anyOf": [*({"type": kind, "minimum": 0} for kind in plain), text]} if plain else text)


Number = Annotated[float, BeforeValidator(partial(read_number, whole=False))]
Count = Annotated[
    int,
    BeforeValidator(parse_count),
    Unit("count", '"50M"'),
    _schema("[KMBGT]?", "integer"),
    PlainSerializer(format_count),
]
Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Unit("bytes", '"8MiB"'),
    _schema("([KMGT]i?)?B|", "integer"),
    PlainSerializer(format_bytes),
]
Seconds = Annotated[
    float, BeforeValidator(parse_seconds), Unit("time", '"10m"'), _schema("ms|s|m|h|d"), PlainSerializer(format_seconds)
]
