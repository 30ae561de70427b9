"""Statistics of every shard's loss and gradient norm: who looks unlike the others, and unlike before?

Only a hint, and never a proof: single flipped bits mostly change neither number enough to be seen, and data alone can
make any number. A suspect is told, and whoever can compute its microbatch again may do so.

For each microbatch of each rank two numbers are looked at: its loss per target, and the logarithm of the norm of what
it contributes to the gradient, per share of the batch's weight. From each is subtracted where this rank's numbers lie
lately, and then the median of what is left over all shards of the step, so that nobody is blamed for what happens to
all. The rest, in units of its median size lately, is the distance z.

A shard is a suspect if its z is larger than one that would come about once in 1 / PROBABILITY of them, by the tail that
this run itself has shown: with the K largest of n distances so far, Z_1 >= ... >= Z_K,

    1 / alpha = mean of log(Z_i / Z_K)                      (Hill 1975, doi:10.1214/aos/1176343247)
    limit = Z_K (K / (n PROBABILITY)) ^ (1 / alpha)         (Weissman 1978, doi:10.1080/01621459.1978.10480104)

and no less than MARGIN times the largest so far, for a rare kind of data may be wilder than all the rest. The rule
holds for tails like those of any power, however heavy, and is too careful for lighter ones (normal, log-normal noise),
whose limit comes out too high. Nothing is suspected before FEWEST shards were seen, of which the TRIM largest are not
believed if they exceed the limit that the others make.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from truestep.runlog.records import Fault
from truestep.sentinel.alarm import Alarm

PROBABILITY = 1e-7
"""Of one distance of a clean shard lying above the limit. Each shard has two, and the limit is an estimate: five times
this still is at most one false suspect expected in 10^6 shards."""
K = 100
FEWEST = 5000
TRIM = 3
RATE = 0.05
"""Of the new in where numbers lie lately, and how far apart: about the last 20 steps."""
MARGIN = 1.5
BOUND = 3.0
"""In median distances: what lies further off moves the level no more than that."""
FEWEST_IN_A_STEP = 4
"""Shards of a step that have a median of their own to speak of."""
TINY = 1e-30
NUMBERS = ("loss", "gradient norm")


@dataclass(frozen=True)
class Suspect:
    """A microbatch (its place among those of `rank` in the step) whose number lies `distance` away from where it
    should, in median distances, where `limit` was expected to be enough."""

    rank: int
    microbatch: int
    number: str
    value: float
    distance: float
    limit: float


class Tail:
    """The largest distances that were seen, and how many there were in all."""

    def __init__(self):
        self.count = 0
        self._largest = np.zeros(K)  # in order
        self._limit = np.inf

    def limit(self) -> float:
        """What a clean distance exceeds with PROBABILITY."""
        return self._limit

    def add(self, distances: np.ndarray) -> None:
        learning = self.count < FEWEST
        self.count += len(distances)
        new = distances[distances > self._largest[0]]
        if len(new):
            self._largest = np.sort(np.concatenate([self._largest, new]))[-K:]
        if self.count < FEWEST or self._largest[0] <= 0:
            return
        if learning:  # faults among the first shards must not make the watch blind
            self._largest = np.minimum(self._largest, self._expected(self._largest[:-TRIM]))
        self._limit = max(self._expected(self._largest), MARGIN * float(self._largest[-1]))

    def _expected(self, largest: np.ndarray) -> float:
        """Weissman's estimate. Without the TRIM largest, Hill's is corrected for what it lacks of a power's tail."""
        expected = (
            K - 1
        )  # of the sum of log(Z_i / Z_K), in units of 1 / alpha; the i-th has 1/i + ... + 1/(K - 1) of it
        if len(largest) < K:
            expected -= sum(1 / j for i in range(1, TRIM + 1) for j in range(i, K))
        inverse = np.log(largest / largest[0]).sum() / expected
        return float(largest[0] * (K / (self.count * PROBABILITY)) ** inverse)


class Level:
    """Where one kind of number lies lately, for each rank, and how far from there it usually is."""

    def __init__(self, ranks: int):
        self._middle_R, self._steps_R = np.zeros(ranks), np.zeros(ranks)
        self._scale, self._steps = 0.0, 0

    def distances(self, x_N: np.ndarray, rank_N: np.ndarray) -> np.ndarray | None:
        """Of each number of a step, by the rank that it is of; None while there is nothing to compare with. Then takes
        them in."""
        num_R = np.bincount(rank_N, minlength=len(self._middle_R))
        known_R = num_R > 0
        num_R = np.maximum(num_R, 1)
        if not self._steps_R.all():
            mean_R = np.bincount(rank_N, x_N, len(num_R)) / num_R
            self._middle_R = np.where(self._steps_R, self._middle_R, mean_R)
        off_N = x_N - self._middle_R[rank_N]
        rest_N = off_N - _median(off_N) if len(off_N) >= FEWEST_IN_A_STEP else off_N
        size_N = np.abs(rest_N)
        scale, bound = self._scale, BOUND * self._scale or np.inf

        self._steps_R += known_R
        self._steps += 1
        moved_R = np.bincount(rank_N, np.clip(off_N, -bound, bound), len(num_R)) / num_R
        self._middle_R += np.maximum(RATE, 1 / np.maximum(self._steps_R, 1)) * moved_R
        self._scale += max(RATE, 1 / self._steps) * (min(_median(size_N), bound) - scale)
        return size_N / scale if scale else None


def apart(numbers: Sequence[float], rank: int, world: int) -> list[float]:
    """As many for every rank, this rank's at its own place and zeros else: summed over ranks, those of all."""
    count = len(numbers)
    return [0.0] * (count * rank) + list(numbers) + [0.0] * (count * (world - 1 - rank))


def _median(values: np.ndarray) -> float:
    """The upper one, where there are two."""
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])


class Statistics:
    """Looks at the shards of every step. `data_ranks`: for each rank, which share of the data it computes on; ranks of
    one share (of a pipeline, of a tensor axis) have one loss between them, and each its own part of the gradient."""

    def __init__(self, data_ranks: Sequence[int]):
        self._data_R = np.asarray(data_ranks)
        self._num_shares = int(self._data_R.max()) + 1
        self._levels = [Level(len(data_ranks)) for _ in NUMBERS]
        self._tails = [Tail() for _ in NUMBERS]
        self._suspects: list[Suspect] = []

    def look(self, shards_RM3: np.ndarray) -> list[Suspect]:
        """Take in one step: for each rank and microbatch its loss sum, its weight (0 of padding, and of ranks without a
        loss), and the norm of its contribution, NaN where it is not known. The same on all ranks."""
        loss_RM, weight_RM, norm_RM = np.moveaxis(shards_RM3, 2, 0)
        shared_DM = np.zeros((self._num_shares, weight_RM.shape[1]))
        np.add.at(shared_DM, self._data_R, weight_RM)
        shared_RM = shared_DM[self._data_R]
        whole = float(shared_DM.sum())
        self._suspects = []
        self._judge(0, loss_RM, weight_RM > 0, lambda x, at: x / weight_RM[at])
        known_RM = (shared_RM > 0) & np.isfinite(norm_RM)
        self._judge(1, norm_RM, known_RM, lambda x, at: np.log(np.maximum(x * (whole / shared_RM[at]), TINY)))
        return self._suspects

    def _judge(self, kind: int, raw_RM: np.ndarray, known_RM: np.ndarray, number: Callable) -> None:
        at = np.nonzero(known_RM & np.isfinite(raw_RM))
        if not len(at[0]):
            return
        x_N = number(raw_RM[at], at)
        z_N, tail = self._levels[kind].distances(x_N, at[0]), self._tails[kind]
        if z_N is None:
            return
        limit = tail.limit()
        for found in np.flatnonzero(z_N > limit).tolist():
            rank, place = int(at[0][found]), int(at[1][found])
            self._suspects.append(Suspect(rank, place, NUMBERS[kind], float(x_N[found]), float(z_N[found]), limit))
        tail.add(np.minimum(z_N, limit))

    def alarms(self, step: int) -> list[Alarm]:
        """What to say of the newest step, `step` (counted from 1)."""
        if not self._suspects:
            return []
        worst = max(self._suspects, key=lambda suspect: suspect.distance / suspect.limit)
        text = (
            f"the {worst.number} of microbatch {worst.microbatch} on rank {worst.rank} lies {worst.distance:.3g} usual "
            f"distances off, where {worst.limit:.3g} was to be expected once in {1 / PROBABILITY:.0e} times"
        )
        evidence = {"suspects": [vars(suspect) for suspect in self._suspects]}
        return [Alarm(Fault(kind="statistics", text=text, step=step, evidence=evidence))]
