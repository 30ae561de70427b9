"""[machine.elastic]: what happens when processes or hosts fail, come and go."""

from typing import Literal

from truestep.recipe.section import Section, field
from truestep.recipe.units import Seconds


class Elastic(Section):
    """Restarts, and the numbers of processes between which a run may shrink and grow. The global batch stays."""

    min: int | None = field(
        None, help="fewest processes to go on with; by default those that the run begins with", ge=1
    )
    max: int | None = field(None, help="most processes to use; by default those that the run begins with", ge=1)
    spares: int = field(0, help="processes held ready to take the place of one that fails", ge=0)
    restarts: int = field(
        3, help="failures that a host may have before it is given up; the run ends before all could be", ge=0
    )
    forget: Seconds = field("1h", help="time after which half of the failures are forgotten")
    start: Literal["auto", "torchrun", "fork"] = field(
        "auto", help="fork: from a process that has torch loaded already; auto: that on CPUs, torchrun on GPUs"
    )
    regroup: bool = field(True, help="let survivors of a failure form a new group in place (gloo), without a new start")
    hang: Seconds | Literal["auto"] = field(
        "auto",
        help="time without progress of any rank after which the run is taken to hang; auto: half of machine.timeout",
    )
    notice: str | None = field(None, help="a file whose appearance says that this host will be taken away")
    listen: str | None = field(None, help="host:port at which other hosts join (`truestep node`)")
