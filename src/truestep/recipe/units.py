"""Values with units: "50M" tokens, "10m", "8GiB". Each type accepts a plain number or a string, and prints back exactly."""

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_TIME_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*)?\.?\d+(?:[eE][+-]?\d+)?|\d[\d_]*\.)\s*([A-Za-z]*)\s*")


def _parse(value: object, units: dict[str, float], example: str) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number with a unit, such as {example}")
    if isinstance(value, int | float):
        number, unit = value, ""
        if unit not in units:
            raise ValueError(f"{value!r} has no unit; write it as in {example}")
        return number
    match = _NUMBER.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a number with a unit, such as {example}")
    digits, unit = match.groups()
    if unit not in units:
        known = ", ".join(u for u in units if u)
        raise ValueError(f"{value!r} has the unknown unit {unit!r}; known units: {known}")
    number = int(digits) if re.fullmatch(r"[+-]?[\d_]+", digits) else float(digits)
    return number * units[unit]


def _whole(value: float | int, text: object, example: str) -> int:
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{text!r} is not a whole number; write it as in {example}")
    if value < 0:
        raise ValueError(f"{text!r} is negative")
    return int(value)


def parse_count(value: object) -> int:
    """"50M" -> 50_000_000. Suffixes K, M, B (or G), T are powers of 1000."""
    return _whole(_parse(value, _COUNT, '"50M"'), value, '"50M"')


def parse_bytes(value: object) -> int:
    """"8MiB" -> 8_388_608; KB/MB/GB are decimal, KiB/MiB/GiB binary."""
    return _whole(_parse(value, _BYTES, '"8MiB"'), value, '"8MiB"')


def parse_seconds(value: object) -> float:
    """"10m" -> 600.0. A plain number is refused: a time needs its unit."""
    seconds = float(_parse(value, _TIME_S, '"10m" or "30s"'))
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{value!r} is not a finite, non-negative time")
    return seconds


Count = Annotated[int, BeforeValidator(parse_count)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(lambda v: v if isinstance(v, float) else parse_seconds(v))]
