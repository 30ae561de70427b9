"""Silent corruption: what is compared in each step of the loop, and what follows from a difference.

    at the end of a step       digests of a share of the state, compared when the next step begins
    before an update           the same of gradients between their reduction and their use; in sampled steps what native
                               collectives delivered, and a microbatch that another rank computes again
    every `sweep_every` steps  digests of all state, and of all copies of it on other ranks

A rank is named by its own memory or by a strict majority of bits (sentinel.verdict), never by statistics.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from truestep.numerics.counter import key_of
from truestep.numerics.fingerprint import fingerprint
from truestep.parallel.replica import compare, differing
from truestep.recipe.sentinel import Sentinel
from truestep.runlog.records import Fault
from truestep.sentinel.alarm import Alarm
from truestep.sentinel.host import SHORT, check_device
from truestep.sentinel.inject import Injector
from truestep.train import held
from truestep.train.accuse import Accuser
from truestep.train.at_rest import AtRest
from truestep.train.first_checks import devices
from truestep.train.guard import Corruption, Work
from truestep.train.recheck import Recheck
from truestep.train.state import TrainState
from truestep.train.step import StepResult


class Integrity:
    """The guard of a stage's steps (train.guard.Guard), and a check after each of them (train.loop.Check). `injector`
    strikes where a plan says, so that all of this can be tried out."""

    def __init__(self, state: TrainState, settings: Sentinel, stage: str, injector: Injector | None = None):
        self._state, self._settings, self._injector = state, settings, injector
        self._accuser = Accuser(state.job, stage)
        self._rest = AtRest(partial(held.memory, state), settings.digest_share)
        self._grads = AtRest(partial(held.gradients, state), settings.digest_share)
        self._recheck = Recheck(state)
        self._work: Work | None = None
        self._armed = self._asked = self._suspects = False
        self._repeatable = True
        self._device = ""  # what is wrong with it
        self._left_at = -1
        self._rechecked = self._agreed = state.step  # steps up to which nothing was found
        self._alarms: list[Alarm] = []

    @property
    def armed(self) -> bool:
        return self._armed

    def suspect(self) -> None:
        """This rank has a reason, be it none that proves anything, to have the step after next computed again."""
        self._suspects = True

    def idle(self) -> None:
        """There is time, some 10 ms, for a test of this rank's device. What it finds is told in the next step."""
        device = self._state.parallel.device
        if self._settings.check_host:
            self._device = check_device(device, SHORT[device.type])

    def begin(self, work: Work) -> None:
        state, step = self._state, self._state.step
        if self._injector is not None:
            self._injector.begin(step + 1)
            self._injector.strike_all("state", held.weights(state))
            self._injector.strike_all("optimizer", held.optimizer(state))
        if self._left_at == step:
            self._rest.find()
        else:  # the state was restored since
            self._rest.forget()
        wanted = self._asked or sampled(state.seed, "recompute", step, self._settings.replay_share)
        self._armed = self._repeatable and wanted and work.factor != 0
        self._work, self._asked = work, False
        state.parallel.probe.watched = self._indices(work) if self._armed else ()
        state.parallel.wire.begin(armed=self._armed)

    def reduced(self) -> None:
        self._grads.leave(self._state.step)
        if self._injector is not None:
            self._injector.strike_all("reduced", held.gradients(self._state))

    def numbers(self) -> Iterable[float]:
        self._grads.find()
        yield float(len(self._rest.changed()) + len(self._grads.changed()))
        yield float(self._suspects)
        yield float(bool(self._device))
        self._suspects = False

    def inspect(self, shards: list[tuple[float, float, float]], numbers: list[float], *, finite: bool) -> None:
        work, step, exact = self._work, self._state.step + 1, self._state.exact
        assert work is not None
        self._asked = numbers[1] > 0
        faults: list[Fault] = []
        if numbers[0] > 0:
            told = self._state.job.everybody((self._rest.changed(), self._grads.changed()))
            faults += self._accuser.own_memory(told, step)
        if numbers[2] > 0:
            faults += devices(self._accuser, self._device, step)
        if exact is not None and exact.gave_up:
            faults.append(self._accuser.damaged(self._state.job.everybody(exact.broken), step, gave_up=True))
        if self._armed:
            self._state.parallel.wire.armed = False
            faults += [] if faults else self._compared(work, [loss for loss, _, _ in shards])
            self._state.parallel.probe.watched = ()
        if not finite and not faults and not self._state.scaler.enabled and work.factor:
            place = self._state.parallel.groups.data_rank
            told = self._state.job.everybody((place, self._recheck.repeats_itself(work, shards)))
            faults += self._accuser.torn(told, step)
        self._work = None
        if faults:
            self._rest.forget()
            raise Corruption(faults)

    def after(self, result: StepResult) -> Sequence[Alarm]:
        step, settings, exact = self._state.step, self._settings, self._state.exact
        sweep = settings.sweep_every > 0 and step % settings.sweep_every == 0
        self._rest.leave(step, everything=sweep and settings.digest_share > 0)
        self._left_at = step
        found, self._alarms = self._alarms, []
        if "not repeated" in result.troubles:
            text = "an overflow of gradients was not there when the step was computed again"
            found.append(Alarm(self._accuser.fault("replay", text, [], named=False, step=step, since=step + 1)))
        if exact is not None and "damaged" in result.troubles:
            found.append(Alarm(self._accuser.damaged(self._state.job.everybody(exact.broken), step, gave_up=False)))
        return [*found, *(self._replicas() if sweep else [])]

    def _indices(self, work: Work) -> Sequence[int]:
        """Which microbatches of the step are computed again: one, or where every step is looked at, all. (Those of a
        pipeline are one sum.)"""
        count = self._recheck.count(work)
        if self._settings.replay_share == 1:
            return range(count)
        return [draw(self._state.seed, "microbatch", self._state.step) % count]

    def _compared(self, work: Work, sums: list[float]) -> list[Fault]:
        """What the step's collectives delivered, and what others make of each rank's work."""
        step, recheck = self._state.step + 1, self._recheck
        delivered = self._state.parallel.wire.delivered()
        seen = {}
        for index in self._indices(work):
            own = recheck.original(sums, index)
            seen[index] = own, *recheck.neighbour(work, index, own)
        differ = [next_.digest != again.digest for _, next_, again in seen.values()]
        unsound, *wrong = self._state.job.all_sum(
            [float(not all(each.sound for each in delivered)), *map(float, differ)]
        )
        faults: list[Fault] = []
        if unsound:
            faults += self._accuser.misdelivered(self._state.job.everybody(delivered), step)
        if any(wrong):
            index = next(index for index, ranks in zip(seen, wrong) if ranks)
            trials = recheck.trials(work, index, *seen[index])
            if any(trial.repeats for trial in trials):
                faults += self._accuser.recomputed(trials, step, self._rechecked)
            else:
                self._give_recomputation_up(step)
        if not faults:
            self._rechecked = step
        return faults

    def _give_recomputation_up(self, step: int) -> None:
        self._repeatable = False
        text = "no rank computes the same bits twice, so that recomputation tells nothing; it is off from now on"
        self._alarms.append(Alarm(self._accuser.fault("replay", text, [], named=False, step=step, since=step)))

    def _replicas(self) -> list[Alarm]:
        """Compare all copies of weights and optimizer state, as they are now."""
        step, job = self._state.step, self._state.job
        pieces, axes = held.copies(self._state)
        digests = {name: fingerprint(piece) for name, piece in pieces.items()}
        names = differing(digests, axes)
        if not job.all_sum([float(len(names))])[0]:
            self._agreed = step
            return []
        found = compare(names, {name: piece.box for name, piece in pieces.items()}, digests, job)
        faults = self._accuser.copies([(each.name, each.said) for each in found], step, self._agreed + 1)
        return [Alarm(fault, "roll back") for fault in faults]


def sampled(seed: int, what: str, step: int, share: float) -> bool:
    """Whether step `step` is one of the `share` of steps in which something is done; the same on all ranks, and again
    in a replay."""
    return draw(seed, what, step) < share * 2**64


def draw(seed: int, what: str, step: int) -> int:
    """A number in [0, 2^64) by counter."""
    return key_of(seed, f"{what}:{step}")
