"""Who is wrong, judged by raw bits alone. Pure: no tensors, no ranks, no waiting.

Right is what more than half of the witnesses say; without that nobody is accused, and all of them are told. A witness
that says two things of one computation is wrong by its own evidence, unless all of them do: then it is the computation
that does not repeat itself, which no chip is to blame for.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """`agreed`: everybody says the same. `odd`: who is wrong, if `named`; otherwise all who may be. `right`: what the
    majority says, None where there is none. `repeatable`: nobody who said it more than once contradicted himself."""

    agreed: bool
    odd: tuple[int, ...] = ()
    named: bool = False
    right: Any = None
    repeatable: bool = True


def judge(said: Mapping[int, Sequence[Hashable]]) -> Finding:
    """Of one thing, what each witness (by number) says of it, once or more often. Values are compared by ==, so give
    bits, not floats."""
    values = {witness: set(found) for witness, found in said.items()}
    torn = {witness for witness, found in values.items() if len(found) > 1}
    heard = Counter(value for found in values.values() for value in found)
    if len(heard) <= 1:
        return Finding(True, right=next(iter(heard), None))
    everybody = tuple(sorted(values))
    if torn and torn == set(values) and len(values) > 1:
        return Finding(False, everybody, repeatable=False)
    majority = [value for value, count in heard.items() if 2 * count > len(values)]
    right = majority[0] if len(majority) == 1 else None
    odd = torn if right is None else {witness for witness, found in values.items() if found != {right}}
    if not odd:
        return Finding(False, everybody)
    return Finding(False, tuple(sorted(odd)), True, right, repeatable=not torn)


def vote(said: Mapping[int, Hashable] | Sequence[Hashable]) -> Finding:
    """`judge` where each witness says one thing; of a sequence, witnesses are its places."""
    pairs = said.items() if isinstance(said, Mapping) else enumerate(said)
    return judge({witness: [value] for witness, value in pairs})
