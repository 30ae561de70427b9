"""Numbers as people read them."""

import math
from typing import Any

from truestep.ledger.figure import NOT_RECORDED, Figure

_PREFIXES = [(1e12, "T"), (1e9, "B"), (1e6, "M")]


def count(value: float) -> str:
    """12345.6 -> "12,346"; 12345678 -> "12.3 M"; 0.12345 -> "0.1235"."""
    for size, letter in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}" if abs(value) < 999.5 * size else f"{value / size:,.0f} {letter}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """3.2 -> "3.2 s"; 125 -> "2 min 05 s"; 7500 -> "2 h 05 min"; 200000 -> "2 d 07 h"."""
    if abs(seconds) < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def size(num_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def power_of_ten(value: float) -> str:
    """1.234e18 -> "1.23e18"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def show(figure: Figure) -> str:
    """A figure with its unit, or "not recorded"."""
    value, unit = figure.value, figure.unit
    if value is None:
        return NOT_RECORDED
    if isinstance(value, str):
        return value
    if unit == "FLOP":
        return f"{power_of_ten(value)} FLOP"
    if unit == "1":
        return f"{100 * value:.1f} %"
    if unit == "s":
        return duration(value)
    if unit == "bytes":
        return size(value)
    if unit in ("nats per token", "bits per byte"):
        return f"{value:.4f} {unit}"
    if unit == "PUE":
        return f"{value:g}"
    return f"{count(value)} {unit}"


def bare(figure: Figure) -> str:
    """A figure without its unit, for a column whose head says it. Times keep theirs."""
    return show(figure) if figure.unit == "s" else show(figure).removesuffix(f" {figure.unit}")


def flat(values: Any, path: str = "") -> dict[str, str]:
    """Nested settings as dotted path -> text; what is empty or not given is left out."""
    if isinstance(values, dict | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        found: dict[str, str] = {}
        for key, value in items:
            found |= flat(value, f"{path}.{key}" if path else str(key))
        return found
    return {} if values is None or values == "" else {path: str(values)}
