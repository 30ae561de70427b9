"""Who watches the bits of a stage: what is tried out before it begins, and the guard of its steps."""

import os
from collections.abc import Callable

from truestep.recipe.stage import Stage
from truestep.sentinel.inject import injector
from truestep.stages.context import Context
from truestep.train.evaluate import HeldOut
from truestep.train.first_checks import check_first, refuse
from truestep.train.injection import place_injector
from truestep.train.integrity import Integrity
from truestep.train.record import Recorder
from truestep.train.state import TrainState

Measure = Callable[[bool], HeldOut]


def guard(context: Context, stage: Stage, state: TrainState) -> Integrity:
    """Try the devices and links out, then let all steps be looked at. Also the check for after each of them."""
    job, settings = context.job, context.recipe.sentinel
    if settings.check_host:
        recorder = Recorder(stage.name, context.metrics, context.log, context.progress)
        refuse(check_first(job, stage.name, state.step), recorder.fault)
    chaos = injector(os.environ, job.rank, job.host)
    if chaos is not None:
        place_injector(chaos, state)
    state.guard = found = Integrity(state, settings, stage.name, chaos)
    return found


def measured(measure: Measure | None, guard: Integrity) -> Measure | None:
    """The same held-out figures; each time there is also time for a short test of the device."""
    if measure is None:
        return None

    def measure_and_test(whole: bool) -> HeldOut:
        found = measure(whole)
        guard.idle()
        return found

    return measure_and_test
