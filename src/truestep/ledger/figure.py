"""A figure that can be checked: value, unit, method, source. An unknown value is "not recorded", never zero."""

from dataclasses import dataclass
from typing import Any

NOT_RECORDED = "not recorded"
RUN_LOG = "run log"


@dataclass(frozen=True)
class Figure:
    """`value` None means "not recorded"; then `method` says what is missing."""

    value: float | int | str | None
    unit: str
    method: str
    source: str = RUN_LOG

    def to_json(self) -> dict[str, Any]:
        """value, unit, method, source, with the words "not recorded" for a missing value."""
        value = NOT_RECORDED if self.value is None else self.value
        return {"value": value, "unit": self.unit, "method": self.method, "source": self.source}

    def number(self) -> float | None:
        """The value, where it is a number."""
        return self.value if isinstance(self.value, int | float) else None


def missing(unit: str, method: str, source: str = NOT_RECORDED) -> Figure:
    """A figure whose value is not recorded, and why."""
    return Figure(None, unit, method, source)
