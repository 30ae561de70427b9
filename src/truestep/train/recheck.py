"""A microbatch computed again: by the neighbour on the data axis, where bits differ also by its own rank and a third.

Every rank takes part at the same time, each for the rank behind it, so that collectives inside the model meet. Compared
are the bits of the loss sum and the fingerprints of every parameter's gradient before it is reduced. With a pipeline
FSDP2 reduces once a step, so all microbatches of the neighbour are computed again and compared as a sum.

A rank's bits also depend on those that compute with it (tp, cp and pp): each rank is compared with the one at the same
place of another data rank.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import xxhash

from truestep.numerics.batch import Batch
from truestep.numerics.digest import raw_bytes
from truestep.numerics.repeatable import repeatable
from truestep.sentinel.verdict import Finding, judge
from truestep.train.guard import Work
from truestep.train.state import TrainState


@dataclass(frozen=True)
class Bits:
    """What a computation came to: `values` int64, first the loss sums' bits, then a fingerprint for each of `names`.
    `norms`: of the gradients, which are not compared."""

    values: torch.Tensor
    names: list[str]
    norms: list[float] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return self.values[: len(self.values) - len(self.names)].view(torch.float64).tolist()

    @property
    def digest(self) -> int:
        return xxhash.xxh3_64_intdigest(raw_bytes(self.values))

    def first_difference(self, other: "Bits") -> str:
        """The name of the first tensor whose bits differ."""
        losses = len(self.values) - len(self.names)
        if self.names != other.names:
            return "the set of gradients"
        places = (self.values != other.values).nonzero().flatten().tolist()
        return "the loss" if places[0] < losses else f"the gradient of {self.names[places[0] - losses]}"


@dataclass(frozen=True)
class Trial:
    """One microbatch (or pipeline's worth) that several ranks computed: that of rank `owner`, in which `where` differs.
    `finding.odd` are ranks of the job, out of `column`: those at the same place of the other axes, by data rank.
    `repeats`: some rank came to the same twice, so it is not the nature of the computation to differ."""

    owner: int
    where: str
    column: tuple[int, ...]
    finding: Finding
    repeats: bool


class Recheck:
    """Compares a microbatch of every rank of a step, by its `index` there, with what others make of it. Collective, all
    of it."""

    def __init__(self, state: TrainState):
        self._state = state
        groups, job = state.parallel.groups, state.job
        degrees = groups.degrees
        mine = degrees.coordinate(job.rank)
        column = [degrees.coordinate(rank) for rank in range(degrees.world)]
        self._ranks = [rank for rank, at in enumerate(column) if (at.pp, at.cp, at.tp) == (mine.pp, mine.cp, mine.tp)]
        self._place = groups.data_rank
        assert self._ranks[self._place] == job.rank

    @property
    def size(self) -> int:
        """How many ranks have microbatches of their own."""
        return len(self._ranks)

    def original(self, sums: Sequence[float], index: int) -> Bits:
        """What the step itself came to, which was watched at `index`."""
        whole = self._state.parallel.pipeline is not None
        prints = self._state.parallel.probe.prints.get(0 if whole else index, {})
        losses = torch.tensor(sums if whole else [sums[index]], dtype=torch.float64)
        return _bits(losses, prints)

    def neighbour(self, work: Work, index: int, own: Bits) -> tuple[Bits, Bits]:
        """(what the next rank came to, what this one makes of the same)."""
        again = self._compute(work, index, 1)
        return Bits(self._passed_back(own.values, 1), own.names), again

    def trials(self, work: Work, index: int, own: Bits, next_: Bits, again: Bits) -> list[Trial]:
        """Once some rank has found a difference: every rank computes its own microbatch twice more, that of the next
        rank once more, and where there are three ranks, that of the one behind it. The same on all ranks."""
        rows = [(self._place, own.digest), (self._at(1), again.digest)]
        rows += [(self._place, self._compute(work, index, 0).digest) for _ in range(2)]
        rows.append((self._at(1), self._compute(work, index, 1).digest))
        if self.size > 2:
            rows.append((self._at(2), self._compute(work, index, 2).digest))
        differs = next_.first_difference(again) if next_.digest != again.digest else ""
        return _judged(self._state.job.everybody((self._ranks, rows, differs, self._at(1))))

    def count(self, work: Work) -> int:
        """Of how many a step consists, as far as every data rank has them. Those of a pipeline are one sum."""
        shares = self._state.shares
        if self._state.parallel.pipeline is not None:
            return 1
        return len(work.batches) if shares is None or shares.even else shares.everywhere(self._state.step)

    def repeats_itself(self, work: Work, shards: Sequence[tuple[float, float, float]]) -> bool:
        """Whether this rank's microbatches, computed once more, are finite where they were and not where they were not:
        their loss sums, and the norms of their gradients where known. (Bits would ask for kernels that repeat
        themselves.)"""
        whole, count = self._state.parallel.pipeline is not None, self.count(work)
        seen = shards if whole else shards[:count]
        again = [self._compute(work, index, 0) for index in range(count)]
        losses = _finite([loss for loss, _, _ in seen]) == _finite([loss for each in again for loss in each.losses])
        norms = _finite([norm for _, _, norm in seen]) == _finite([norm for each in again for norm in each.norms])
        return losses and (norms or whole)

    def _at(self, shift: int) -> int:
        return (self._place + shift) % self.size

    def _compute(self, work: Work, index: int, shift: int) -> Bits:
        """The microbatch of the rank that is `shift` further on. Its gradients go nowhere."""
        parallel, exact = self._state.parallel, self._state.exact
        whole = parallel.pipeline is not None
        batches = self._moved(work.batches if whole else [work.batches[index]], shift)
        first, owner = 0 if whole else index, self._at(shift)

        def begin(place: int) -> None:
            work.begin(self._state.number(first + place, owner))

        with parallel.aside(), repeatable(parallel.device), exact.aside() if exact else nullcontext():
            sums, _ = parallel.run(batches, work.loss_of, work.factor, begin)
            found = _bits(torch.stack(sums).double(), parallel.probe.prints.get(0, {}))
            return replace(found, norms=parallel.probe.norms())

    def _moved(self, batches: list[Batch], shift: int) -> list[Batch]:
        """Microbatches of the rank that is `shift` further on."""
        if shift % self.size == 0:
            return batches
        fields = [x.contiguous().cpu().view(-1).view(torch.uint8) for batch in batches for x in batch.tensors()]
        arrived = iter(self._passed_back(torch.cat(fields), shift).split([x.numel() for x in fields]))
        return [batch.map(lambda x: next(arrived).clone().view(x.dtype).view(x.shape)) for batch in batches]

    def _passed_back(self, values: torch.Tensor, shift: int) -> torch.Tensor:
        """The tensor of the rank that is `shift` further on, while the one `shift` back is given this rank's."""
        if shift % self.size == 0:
            return values
        arrived, control = torch.empty_like(values), self._state.job.control
        source, target = self._ranks[self._at(shift)], self._ranks[self._at(-shift)]
        sent = dist.isend(values.contiguous(), group=control, group_dst=target)
        dist.recv(arrived, group=control, group_src=source)
        if sent is not None:
            sent.wait()
        return arrived


def _bits(losses: torch.Tensor, prints: dict[str, torch.Tensor]) -> Bits:
    names = sorted(prints)
    found = torch.stack([prints[name] for name in names]).cpu() if names else torch.zeros(0, dtype=torch.int64)
    return Bits(torch.cat((losses.cpu().view(torch.int64), found)), names)


def _finite(values: Sequence[float]) -> list[bool]:
    return [math.isfinite(value) for value in values]


def _judged(told: list) -> list[Trial]:
    """From what every rank of the job says: (its column of the data axis, (owner's place, digest) of everything that it
    computed, where its neighbour's work differs, whose)."""
    said: dict[tuple[tuple[int, ...], int], dict[int, list[int]]] = {}
    where: dict[tuple[tuple[int, ...], int], str] = {}
    for rank, (ranks, rows, differs, next_) in enumerate(told):
        column = tuple(ranks)
        for owner, digest in rows:
            said.setdefault((column, owner), {}).setdefault(rank, []).append(digest)
        if differs:
            where[column, next_] = differs
    trials = []
    for (column, owner), digests in said.items():
        finding = judge(digests)
        if not finding.agreed:
            repeats = any(len(set(found)) < len(found) for found in digests.values())
            here = where.get((column, owner), "")
            trials.append(Trial(column[owner], here, column, finding, repeats))
    return sorted(trials, key=lambda trial: (not trial.where, trial.owner))
