"""From what ranks have found to faults with names: the same on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from truestep.parallel.job import Job
from truestep.parallel.wire import Delivered
from truestep.runlog.records import Fault
from truestep.sentinel.verdict import vote
from truestep.train.recheck import Trial

Kind = Literal["state", "replica", "replay", "collective", "host", "link"]


@dataclass(frozen=True)
class Accuser:
    """Makes faults of a stage's steps."""

    job: Job
    stage: str

    def fault(
        self, kind: Kind, text: str, ranks: Sequence[int], *, named: bool, step: int, since: int, **evidence: Any
    ) -> Fault:
        """`ranks`: who is at fault if `named`, else all who may be. Several ranks are named only on one host, and then
        the host is. `text` says what was seen of them."""
        hosts = sorted({self._host(rank) for rank in ranks})
        named = named and (len(ranks) == 1 or (len(hosts) == 1 and bool(hosts[0])))
        who = " and ".join(f"rank {rank}" for rank in ranks)
        if named:
            place = f" (host {hosts[0]})" if hosts[0] else ""
            told = f"{who}{place}: {text}"
        else:
            told = f"{text}; it cannot be said whose fault it is ({who})" if who else text
        return Fault(
            kind=kind,
            text=told,
            stage=self.stage,
            step=step,
            rank=ranks[0] if named and len(ranks) == 1 else None,
            host=(hosts[0] or None) if named else None,
            named=named,
            since=since,
            evidence=evidence | {"ranks": list(ranks), "hosts": hosts},
        )

    def own_memory(self, told: Sequence[tuple[list[str], list[str]]], step: int) -> list[Fault]:
        """`told`: names of state and of gradients that each rank found changed, in the course of `step`."""
        hit = [rank for rank, (state, grads) in enumerate(told) if state or grads]
        everywhere = len(hit) > 1 and len(hit) == len(told)  # no chip does that
        faults = []
        if everywhere:
            names = sorted({name for state, grads in told for name in state + grads})
            text = f"{names[0]} changed on every rank at once, while nothing should have changed it"
            return [self.fault("state", text, hit, named=False, step=step, since=step - 1, tensor=names[0])]
        for rank in hit:
            state, grads = told[rank]
            text = (
                f"{state[0]} changed between two steps" if state else f"the gradient of {grads[0]} changed before use"
            )
            since = step - 1 if state else step
            where = {"tensor": (state + grads)[0], "tensors": len(state + grads)}
            faults.append(self.fault("state", text, [rank], named=True, step=step, since=since, **where))
        return faults

    def copies(self, differing: Sequence[tuple[str, dict[int, int]]], step: int, since: int) -> list[Fault]:
        """`differing`: name of a tensor, and the digest of each rank's copy of one part of it."""
        faults = []
        for name, said in differing:
            found = vote(said)
            if not found.agreed:
                text = f"other bits of {name} than others hold of the same part"
                faults.append(
                    self.fault("replica", text, found.odd, named=found.named, step=step, since=since, tensor=name)
                )
        return _first_of_each(faults)

    def recomputed(self, trials: Sequence[Trial], step: int, clean: int) -> list[Fault]:
        """`clean`: the last step in which all recomputations agreed."""
        faults = []
        for named in (True, False):
            some = [trial for trial in trials if trial.finding.named == named]
            odd: dict[int, set[int]] = {}
            for trial in some:
                for rank in trial.finding.odd:
                    # ranks of one data rank compute on each other's results: what shows on one may come from another
                    odd.setdefault(trial.column.index(rank) if named else -1, set()).add(rank)
            for ranks in odd.values():
                first = next(trial for trial in some if ranks & set(trial.finding.odd))
                once = not all(trial.finding.repeatable for trial in some if ranks & set(trial.finding.odd))
                where = {"owner": first.owner, "tensor": first.where, "repeatable": not once}
                place = f", in {first.where}" if first.where else ""
                times = "but not every time" if once else "every time"
                text = f"other bits than were computed otherwise for a microbatch of rank {first.owner}{place}, {times}"
                since = step if once else clean + 1
                faults.append(self.fault("replay", text, sorted(ranks), named=named, step=step, since=since, **where))
        return faults

    def torn(self, told: Sequence[tuple[int, bool]], step: int) -> list[Fault]:
        """`told`: data rank of each rank, and whether it came to the same when it computed a step that is not finite
        once more."""
        places = {place for place, same in told if not same}
        everywhere = len(places) == len({place for place, _ in told}) > 1
        faults = []
        for place in sorted(places):
            some = [rank for rank, (at, _) in enumerate(told) if at == place]  # they compute on each other's results
            named = not everywhere and len(some) == 1
            text = "a microbatch that is not finite came out otherwise when it was computed again"
            faults.append(self.fault("replay", text, some, named=named, step=step, since=step, repeatable=False))
        return faults

    def misdelivered(self, told: Sequence[Sequence[Delivered]], step: int) -> list[Fault]:
        """`told`: of each rank, what it and the others of its groups saw."""
        faults = []
        for group in {tuple(each.ranks): each for rows in told for each in rows}.values():
            for giver, row in zip(group.ranks, group.said):
                found = vote(dict(zip(group.ranks, row)))
                if not found.agreed:
                    text = f"an all-gather delivered other bits than rank {giver} gave"
                    faults.append(
                        self.fault("collective", text, found.odd, named=found.named, step=step, since=step, giver=giver)
                    )
            odd = [rank for rank, count in zip(group.ranks, group.wrong) if count]
            if odd:
                named = 2 * len(odd) < len(group.ranks) and group.alike
                text = "a sum of gradients is further off than rounding explains"
                suspects = odd if named else group.ranks
                faults.append(
                    self.fault("collective", text, suspects, named=named, step=step, since=step, elements=group.wrong)
                )
        return _first_of_each(faults)

    def damaged(self, told: Sequence[Sequence[tuple[int, int]]], step: int, *, gave_up: bool) -> Fault:
        """`told`: of each rank, pairs between which bits of exact collectives changed."""
        pairs = sorted({tuple(pair) for rows in told for pair in rows})
        common = set.intersection(*(set(pair) for pair in pairs)) if pairs else set()
        odd = sorted(common) if len(common) == 1 else sorted({rank for pair in pairs for rank in pair})
        end = "in each computation of the step" if gave_up else "and the step was computed again"
        text = f"bits changed in an exact collective, {end}"
        since = step if gave_up else step + 1
        return self.fault("collective", text, odd, named=len(odd) == 1, step=step, since=since, pairs=pairs)

    def _host(self, rank: int) -> str:
        return self.job.hosts[rank] if rank < len(self.job.hosts) else ""


def _first_of_each(faults: Sequence[Fault]) -> list[Fault]:
    """One fault for each set of ranks: many tensors may show the same."""
    first: dict[tuple, Fault] = {}
    for fault in faults:
        first.setdefault((fault.named, tuple(fault.evidence["ranks"])), fault)
    return list(first.values())
