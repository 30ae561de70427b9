"""The rules of sentinel.invariants, looked after on a training state: at an attempt's first update and now and then.

A broken rule is a bug: the run ends and says which, before it costs more.
"""

from truestep.imports import is_import_path
from truestep.numerics.fingerprint import fingerprint
from truestep.optim.schedule import factor
from truestep.parallel.model import local
from truestep.runlog.records import Fault
from truestep.sentinel.alarm import Alarm
from truestep.sentinel.finite import Verdict
from truestep.sentinel.invariants import View, violations
from truestep.train.state import TrainState
from truestep.train.step import StepResult


class Invariants:
    """A check of the loop (train.loop.Check). `every`: steps between looks; 0: the first update alone."""

    def __init__(self, state: TrainState, every: int):
        self._state, self._every = state, every
        self._looked = False

    def due(self, step: int) -> bool:
        """Whether `step` (counted from 1) is looked at."""
        return not self._looked or bool(self._every and step % self._every == 0)

    def after(self, result: StepResult) -> list[Alarm]:
        """Collective where `due`."""
        state = self._state
        if result.verdict is not Verdict.GO or not self.due(state.step):
            return []
        self._looked = True
        mine = violations(self._view()), self._ties()
        everybody = state.job.everybody(mine)
        broken = {text: rank for rank, (texts, _) in reversed([*enumerate(everybody)]) for text in texts}
        broken |= _undone([ties for _, ties in everybody])
        return [self._alarm(text, rank) for text, rank in sorted(broken.items())]

    def _alarm(self, text: str, rank: int) -> Alarm:
        words = f"{text} (rank {rank}): this is a bug; the checkpoints since it began are not to be trusted"
        return Alarm(Fault(kind="invariant", text=words, step=self._state.step, evidence={"rank": rank}), "halt")

    def _view(self) -> View:
        state, optimizer = self._state, self._state.optimizer
        named = state.parallel.named_parameters()
        states = optimizer.state_by_param()
        tensors = {name: local(parameter.detach()) for name, parameter in named.items()}
        tensors |= {f"{name}.{key}": local(value) for name, kept in states.items() for key, value in kept.items()}
        return View(
            trainable=[name for name, parameter in named.items() if parameter.requires_grad],
            held=optimizer.named_params,
            without_gradient=state.parallel.without_gradient,
            rates=self._rates(),
            states=None if is_import_path(state.section.kind) else states,
            tensors=tensors,
        )

    def _rates(self) -> list[tuple[str, float, float]]:
        state = self._state
        now = {id(p): group["lr"] for group in state.optimizer.param_groups for p in group["params"]}
        share = factor(state.section.schedule, state.updates - 1, state.steps)
        return [
            (group.name, now.get(id(param), 0.0), group.lr * share)
            for group in state.optimizer.groups
            for _, param in group.params[:1]
        ]

    def _ties(self) -> dict[tuple[int, str], int]:
        """Fingerprints of a tied table and of its copy, by this rank's place in its stage of the pipeline."""
        mirror, place = self._state.parallel.mirror, self._state.parallel.groups.stage.rank
        if mirror is None:
            return {}
        both = {"table": mirror.owner, "copy": mirror.copy}
        held = {name: parameter for name, parameter in both.items() if parameter is not None}
        return {(place, name): int(fingerprint(local(parameter.detach()))) for name, parameter in held.items()}


def _undone(ties: list[dict[tuple[int, str], int]]) -> dict[str, int]:
    """Ties that do not hold, each with a rank that has one of the two."""
    found: dict[str, int] = {}
    all_of_them = {key: (rank, value) for rank, held in enumerate(ties) for key, value in held.items()}
    for (place, name), (rank, value) in all_of_them.items():
        if name == "copy" and all_of_them[place, "table"][1] != value:
            found.setdefault("the head's copy of the tied table embed.weight differs from it", rank)
    return found
