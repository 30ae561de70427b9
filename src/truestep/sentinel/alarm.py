"""What a check found to be wrong and what the loop is to do about it."""

from dataclasses import dataclass
from typing import Literal

from truestep.runlog.records import Fault

Action = Literal["tell", "roll back", "halt"]


@dataclass(frozen=True)
class Alarm:
    """`fault` goes into the run log as it is. The same on every rank wherever `action` is not "tell".

    tell        say so and go on
    roll back   go on from the newest checkpoint of before step `fault.since`, without the data of the steps `left_out`
                (from the first, counted from 0, to before the last)
    halt        end the run with the fault's text as its sentence
    """

    fault: Fault
    action: Action = "tell"
    left_out: tuple[int, int] | None = None
