"""Histories of one small run: attempts on meshes of one to four ranks that are killed, paused, stopped and begun again,
and what must hold of any of them.

What was trained on is known from a ledger: each rank writes down what the rows of a step hold just before it trains on
them. Of these the steps count that the run's log says the final model stands on. Nothing here is computed from row
numbers or from the batch schedule.
"""

import json
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.stages.history_ranks import Attempt, Ranks, Strike, Told
from truestep.checkpoint.catalogue import list_committed, read_manifest
from truestep.runlog.log import read, verify
from truestep.runlog.records import AttemptEnd, AttemptStart, Decision, Resume, StageStart, Step
from truestep.storage.store import open_store

CONTEXT, ROWS_PER_EPOCH = 8, 24
SIZES = (4, 4, 4, 6, 6, 6, 6, 6, 6)
"""Rows of each step: a ramp, the first epoch's edge behind step 5, the second's behind the last."""
STEPS = len(SIZES)
BAD_ROWS = {"no bad rows": (), "one bad step": (13,), "two bad steps": (13, 22)}
"""Global rows with labels that make the loss of their step no number: two such steps in a row roll the run back."""
LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"pp": 2},
    {"dp_shard": 3},
    {"dp_replicate": 3},
    {"dp_shard": 4},
    {"dp_replicate": 4},
    {"dp_shard": 2, "dp_replicate": 2},
    {"dp_shard": 2, "pp": 2},
    {"dp_replicate": 2, "pp": 2},
)
FAST_BOUND = 1e-4
"""Relative difference of a step's loss from that of one process, where sums are added up in another order."""


def world_of(layout: dict[str, int]) -> int:
    world = 1
    for degree in layout.values():
        world *= degree
    return world


Row = tuple[int, ...]
"""The tokens that a row holds, which tell it from all others."""


@dataclass(frozen=True)
class Life:
    """One attempt. `strike`: what it comes to; None: it goes on to the end. Where an earlier attempt was paused, that
    goes on when this one begins its `wake`-th step, and `alone` until it ends."""

    layout: dict[str, int]
    strike: Strike | None = None
    saves: frozenset[int] = frozenset()
    full: tuple[tuple[int, int], ...] = ()
    asynchronous: bool = True
    wake: int = 1
    alone: bool = False


@dataclass(frozen=True)
class History:
    """`bad`: a key of BAD_ROWS. The last life has no strike."""

    reduction: str
    bad: str
    lives: tuple[Life, ...]


@st.composite
def _strikes(draw: st.DrawFn, world: int) -> Strike:
    """Most of them come about, on any world."""
    act = draw(st.sampled_from(["kill", "kill", "kill", "pause", "pause", "stop"]))
    most = {"step": 8, "forward": 11, "backward": 11, "store": 70, "log": 22}
    event = "step" if act == "stop" else draw(st.sampled_from(list(most)))
    rank = 0 if event == "log" else draw(st.integers(0, world - 1))
    return Strike(act, rank, event, draw(st.integers(1, most[event] if rank == 0 else min(most[event], 11))))


@st.composite
def _lives(draw: st.DrawFn, layouts: st.SearchStrategy[dict[str, int]], last: bool) -> Life:
    layout = draw(layouts)
    steps = st.integers(1, STEPS)
    saves = draw(st.frozensets(steps, max_size=5))
    full = draw(st.lists(st.tuples(steps, st.integers(1, 2)), max_size=2, unique_by=lambda pair: pair[0]))
    return Life(
        layout,
        None if last else draw(_strikes(world_of(layout))),
        saves,
        () if last else tuple(full),
        draw(st.booleans()),
        draw(st.integers(1, 4)),
        draw(st.booleans()),
    )


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Two in three of exact reductions on any meshes; of the fast ones every other stays on its mesh."""
    reduction = draw(st.sampled_from(["exact", "exact", "fast"]))
    stays = reduction == "fast" and draw(st.booleans())
    layouts = st.just(draw(st.sampled_from(LAYOUTS))) if stays else st.sampled_from(LAYOUTS)
    lives = draw(st.lists(_lives(layouts, False), min_size=1, max_size=3))
    return History(reduction, draw(st.sampled_from(list(BAD_ROWS))), (*lives, draw(_lives(layouts, True))))


def write_text(folder: Path) -> None:
    """Letters without order in documents of uneven length, ROWS_PER_EPOCH rows in all: no two rows hold the same."""
    folder.mkdir(parents=True)
    chance, left, number = random.Random(5), ROWS_PER_EPOCH * CONTEXT + 1, 0
    while left:
        length = min(left, chance.choice([9, 14, 23, 40]))
        length = left if left - length < 2 else length
        text = "".join(chance.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length - 1))
        (folder / f"{number:02d}.txt").write_text(text)
        left, number = left - length, number + 1


def recipe(folder: Path, name: str, history: History, life: Life) -> dict[str, Any]:
    if not (folder / "text").exists():
        write_text(folder / "text")
    ramp_after, (small, big) = 3 * 4 * CONTEXT, (4 * CONTEXT, 6 * CONTEXT)
    stage = {"name": "base", "data": "train", "context": CONTEXT, "tokens": sum(SIZES) * CONTEXT}
    stage |= {"batch_tokens": small, "ramp": [{"after": ramp_after, "batch_tokens": big}]}
    stage |= {"optim": {"lr": 1e-2}, "gate": {"kind": "none", "reason": "a trial"}}
    sentinel = {"check_host": False, "spikes": {"threshold": 1e9, "in_a_row": 2}}
    if BAD_ROWS[history.bad]:
        stage["loss"] = {"kind": "tests.stages.history_ranks:NanOnBad"}
    model = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 2, "num_heads": 2, "tie_embeddings": True}
    machine = {"microbatch_rows": 1, "threads": 1, "device": "cpu", "precision": "float32", "data_workers": 1}
    machine |= {"cache": str(folder / "cache"), "mesh": {"dp_shard": 1} | life.layout}
    saves = {"every_time": "1h", "drill_every": "0s", "max_failures": 9, "asynchronous": life.asynchronous}
    return {
        "run": {"name": name, "dir": str(folder / "runs"), "seed": 3},
        "tokenizer": {"kind": "bytes"},
        "model": model,
        "data": {"train": {"source": "text", "path": str(folder / "text")}},
        "stages": [stage],
        "machine": machine,
        "numerics": {"reduction": history.reduction},
        "checkpoint": saves,
        "sentinel": sentinel,
        "ledger": {"peak_flops": 1e11},
    }


@dataclass
class Lived:
    """A run that a history has been carried out on. `outcomes` of its attempts in order; `zombies`: how those that were
    paused ended once they had gone on."""

    run_dir: Path
    ledger: Path
    outcomes: list[str] = field(default_factory=list)
    zombies: list[str] = field(default_factory=list)


@dataclass
class Theatre:
    """Carries histories out in a folder, and counts what was lived through."""

    folder: Path
    ranks: Ranks = field(default_factory=Ranks)
    counts: Counter[str] = field(default_factory=Counter)

    def live(self, history: History, name: str) -> Lived:
        lived = Lived(self.folder / "runs" / name, self.folder / f"{name}.ledger")
        zombie: Attempt | None = None
        for number, life in enumerate(history.lives):
            self.counts["mesh changes"] += number > 0 and life.layout != history.lives[number - 1].layout
            body = recipe(self.folder, name, history, life)
            attempt, paused = self._begin(body, history, life, lived, zombie)
            if zombie is not None:
                self._end(zombie, lived)
            zombie = attempt if paused else None
            lived.outcomes.append("paused" if paused else self._outcome(attempt))
            self.counts[f"attempts {lived.outcomes[-1]}"] += 1
            ended_well(lived)
            if lived.outcomes[-1] == "finished":
                break
        self.counts["histories"] += 1
        return lived

    def _begin(
        self, body: dict, history: History, life: Life, lived: Lived, zombie: Attempt | None
    ) -> tuple[Attempt, bool]:
        """An attempt until it ends or is paused, with the one that was paused before beside it."""
        strikes = [Strike("pause", 0, "step", life.wake)] if zombie else []
        strikes += [life.strike] if life.strike else []
        told = Told(lived.ledger, tuple(strikes), life.saves, life.full, BAD_ROWS[history.bad])
        attempt = self.ranks.start(body, world_of(life.layout), told)
        while (struck := attempt.wait()) is not None:
            if zombie is None or strikes[struck] is life.strike:
                return attempt, True
            zombie.signal(signal.SIGCONT)
            if life.alone:
                _to_the_end(zombie)
            attempt.signal(signal.SIGCONT)
        if attempt.killed:
            attempt.signal(signal.SIGSTOP)  # until they are killed
        return attempt, False

    def _end(self, zombie: Attempt, lived: Lived) -> None:
        zombie.signal(signal.SIGCONT)
        _to_the_end(zombie)
        lived.zombies.append(self._outcome(zombie))
        self.counts[f"zombies {lived.zombies[-1]}"] += 1

    def _outcome(self, attempt: Attempt) -> str:
        self.ranks.end(attempt)
        return attempt.outcome()


def _to_the_end(zombie: Attempt) -> None:
    while not zombie.over and zombie.wait() is not None:
        zombie.signal(signal.SIGCONT)


def ended_well(lived: Lived) -> None:
    """A run that ends short of its last step never says that it is done."""
    model = lived.run_dir / "models" / "base"
    said = (
        [r.data.reason for r in read(lived.run_dir) if isinstance(r.data, AttemptEnd)] if lived.run_dir.exists() else []
    )
    if (model / "card.json").exists() or "finished" in (*said, lived.outcomes[-1]):
        newest = list_committed(open_store(str(lived.run_dir / "checkpoints" / "base")))[-1]
        assert newest.step == STEPS
        assert len(Past.of(lived).steps) == STEPS


@dataclass
class Past:
    """What the final model stands on: steps by number as (attempt, how many times that attempt had begun it, record),
    and rows left out by their place in the order."""

    steps: dict[int, tuple[int, int, Step]] = field(default_factory=dict)
    left_out: dict[int, list[Row]] = field(default_factory=dict)

    @staticmethod
    def of(lived: Lived) -> "Past":
        past, begun, resumed, rows = Past(), Counter[tuple[int, int]](), 0, Rows.of(lived.ledger)
        for record in read(lived.run_dir):
            data = record.data
            if isinstance(data, AttemptStart):
                resumed = 0
            elif isinstance(data, Resume):
                resumed = data.step
            elif isinstance(data, StageStart):
                past._back_to(resumed)
            elif isinstance(data, Step):
                begun[record.attempt, data.step] += 1
                past._back_to(data.step - 1)
                past.steps[data.step] = record.attempt, begun[record.attempt, data.step], data
            elif isinstance(data, Decision) and data.action == "roll back":
                assert data.to_step is not None
                if data.left_out:
                    start, stop = data.left_out
                    seen = [row for step in sorted(past.steps) for row in rows.of_step(*past.steps[step][:2], step)]
                    past.left_out[start] = seen[len(seen) - (stop - start) :]
                past._back_to(data.to_step)
        return past

    def _back_to(self, step: int) -> None:
        self.steps = {number: done for number, done in self.steps.items() if number <= step}


@dataclass(frozen=True)
class Rows:
    """The ledger by (attempt, step, rank): each time that the rank began the step."""

    entries: dict[tuple[int, int, int], list[tuple[int, list[list[int]], int]]]

    @staticmethod
    def of(ledger: Path) -> "Rows":
        entries: dict[tuple[int, int, int], list[tuple[int, list[list[int]], int]]] = {}
        for line in ledger.read_text().splitlines() if ledger.exists() else ():
            attempt, step, rank, data_rank, rows, targets = json.loads(line)
            entries.setdefault((attempt, step, rank), []).append((data_rank, rows, targets))
        return Rows(entries)

    def of_step(self, attempt: int, time: int, step: int) -> list[Row]:
        """What a step was given on all ranks, in the order of microbatches, each of which one data rank has had. Ranks
        of a pipeline have the same."""
        shares: dict[int, list[list[int]]] = {}
        for (_, _, _), times in ((k, v) for k, v in self.entries.items() if k[:2] == (attempt, step)):
            data_rank, rows, _ = times[time - 1]
            assert shares.setdefault(data_rank, rows) == rows
        found = sorted(row for rows in shares.values() for row in rows)
        assert [row[0] for row in found] == list(range(len(found))), f"step {step}: microbatches {found}"
        return [tuple(row[1:]) for row in found]


@dataclass(frozen=True)
class Undisturbed:
    """What a run comes to that nothing happens to: the digest of its weights, and by step losses (as text, so that one
    that is no number equals itself), targets, and whether the update was left out."""

    weights: str
    losses: list[str]
    targets: list[int]
    skipped: list[bool]


def undisturbed(lived: Lived) -> Undisturbed:
    past = Past.of(lived)
    steps = [past.steps[number][2] for number in range(1, STEPS + 1)]
    return Undisturbed(
        weights(lived), [s.loss.hex() for s in steps], [s.targets for s in steps], [s.skipped for s in steps]
    )


def weights(lived: Lived) -> str:
    return json.loads((lived.run_dir / "models" / "base" / "manifest.json").read_text())["weights"]


def check_data(lived: Lived) -> None:
    """Every row once an epoch, those counted that were left out; as many microbatches a step whoever computes it."""
    past, rows = Past.of(lived), Rows.of(lived.ledger)
    assert sorted(past.steps) == list(range(1, STEPS + 1))
    order: list[Row] = []
    for step in range(1, STEPS + 1):
        while len(order) in past.left_out:
            order += past.left_out[len(order)]
        given = rows.of_step(*past.steps[step][:2], step)
        assert len(given) == SIZES[step - 1]
        order += given
    every = set(order[:ROWS_PER_EPOCH])
    assert len(every) == ROWS_PER_EPOCH
    epochs = [order[at : at + ROWS_PER_EPOCH] for at in range(0, len(order), ROWS_PER_EPOCH)]
    for number, epoch in enumerate(epochs):
        assert len(set(epoch)) == len(epoch) and set(epoch) <= every, f"epoch {number}: {Counter(epoch).most_common(3)}"
        assert number == 0 or epoch != epochs[0][: len(epoch)], f"epoch {number} has the order of the first"


def check_counters(lived: Lived, reference: Undisturbed) -> None:
    """What checkpoints that count say was done is what the undisturbed run had done by then."""
    store = open_store(str(lived.run_dir / "checkpoints" / "base"))
    committed = list_committed(store)
    assert committed[-1].step == STEPS
    for each in committed:
        extra = read_manifest(store, each).extra
        assert extra["step"] == each.step
        assert extra["tokens"] == sum(SIZES[: each.step]) * CONTEXT
        assert extra["loader"]["next_row"] == sum(SIZES[: each.step])
        assert extra["targets"] == sum(reference.targets[: each.step])
        assert extra["updates"] == each.step - sum(reference.skipped[: each.step])


def check(lived: Lived, history: History, reference: Undisturbed, same_layout: Undisturbed | None) -> None:
    """`reference`: of one process. `same_layout`: where all lives had the same mesh, of a run on that."""
    verify(lived.run_dir)
    assert lived.outcomes[-1] == "finished"
    found = undisturbed(lived)
    check_data(lived)
    assert found.targets == reference.targets and found.skipped == reference.skipped
    check_counters(lived, reference)
    if history.reduction == "exact":
        assert found == reference
    elif same_layout is not None:
        assert found == same_layout
    else:
        for ours, theirs in zip(found.losses, reference.losses):
            a, b = float.fromhex(ours), float.fromhex(theirs)
            assert ours == theirs or abs(a - b) <= FAST_BOUND * b, (found.losses, reference.losses)
