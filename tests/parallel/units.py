"""Units of samples for losses that look at more than labels, and the rows that they lie in.

A unit is drawn once; how it lies in rows (alone or with others, with how much padding, in which order) is a `Layout`,
and no layout may change a loss or a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from truestep.numerics.batch import IGNORE, Batch


@dataclass(frozen=True)
class Sample:
    """`ids` (n,), `targets` (n,) bool: which tokens are learnt, never the first. `value` (n,): of each token, NaN where
    it has none. Of each token, too: `reference` (n,), `teacher_ids`, `teacher_logp` (n, K), about the token itself."""

    ids: torch.Tensor
    targets: torch.Tensor
    side: int
    value: torch.Tensor
    reference: torch.Tensor
    teacher_ids: torch.Tensor
    teacher_logp: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)


Unit = list[Sample]


@dataclass(frozen=True)
class Layout:
    """`together`: units of a row; what is left of its places is padding, behind them. `reverse`: the last unit comes
    first."""

    context: int = 32
    together: int = 1
    reverse: bool = False


def draw_units(kind: str, count: int, vocab: int, seed: int) -> list[Unit]:
    """Units of the kind that a loss takes: "one" sample, a "pair", "labelled" ones, or "steps". Prompts and answers are
    of uneven length; an answer has at least two tokens, or one in the second unit."""
    random = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    def answer(prompt: torch.Tensor, length: int, side: int, value: float) -> Sample:
        ids = torch.cat([prompt, torch.randint(0, vocab, (length,), generator=random)])
        targets = torch.arange(len(ids)) >= len(prompt)
        values = torch.full((len(ids),), value)
        if kind == "steps":
            ends = torch.rand(len(ids), generator=random) < 0.5
            ends[-1] = True
            labels = (torch.rand(len(ids), generator=random) < 0.5).float()
            values = torch.where(ends & targets, labels, torch.nan)
        nothing = torch.zeros(len(ids))
        return Sample(ids, targets, side, values, nothing, nothing[:, None].int(), nothing[:, None])

    units: list[Unit] = []
    for number in range(count):
        prompt = torch.randint(0, vocab, (whole(1, 3),), generator=random)
        lengths = [1 if number == 1 else whole(2, 5), whole(2, 5)]
        value = 0.25 * whole(0, 4)
        if kind == "pair":
            units.append([answer(prompt, length, side, value) for length, side in zip(lengths, (1, -1))])
        else:
            side = (1 if number % 3 else -1) if kind == "labelled" else 0
            units.append([answer(prompt, lengths[0] + lengths[1], side, 0.0)])
    return units


def with_reference(units: Sequence[Unit], logp_of: Callable[[torch.Tensor], torch.Tensor]) -> list[Unit]:
    """Each sample with what `logp_of(ids)` (n - 1,) says of its tokens but the first."""

    def told(sample: Sample) -> Sample:
        logp = pad(logp_of(sample.ids), (1, 0))
        return replace(sample, reference=torch.where(sample.targets, logp, 0.0))

    return [[told(sample) for sample in unit] for unit in units]


def with_teacher(
    units: Sequence[Unit], logits_of: Callable[[torch.Tensor], torch.Tensor], top_k: int, temperature: float
) -> list[Unit]:
    """Each sample with the columns of a stored teacher with these logits (n, V) after each token: its `top_k` likeliest
    next tokens and, as id -1, all others, as log-probabilities at a temperature."""

    def told(sample: Sample) -> Sample:
        logp_NV = (logits_of(sample.ids)[:-1] / temperature).log_softmax(-1)
        named_NK, ids_NK = logp_NV.topk(top_k)
        rest_N1 = torch.log1p(-named_NK.exp().sum(1, keepdim=True))
        logp_NK, ids_NK = torch.cat([named_NK, rest_N1], 1), pad(ids_NK, (0, 1), value=-1).int()
        mine = sample.targets[1:, None]
        ids, logp = (pad(torch.where(mine, x, 0), (0, 0, 1, 0)) for x in (ids_NK, logp_NK))
        return replace(sample, teacher_ids=ids, teacher_logp=logp)

    return [[told(sample) for sample in unit] for unit in units]


def rows_of(units: Sequence[Unit], layout: Layout, columns: Sequence[str], dtype: torch.dtype) -> Batch:
    """The units as rows with these columns (see truestep.data.samples): every sample a document of its own. `dtype`: of
    columns of fractions; it is float32 in runs."""
    units = list(reversed(units)) if layout.reverse else list(units)
    groups = [units[first : first + layout.together] for first in range(0, len(units), layout.together)]
    return stack([_row(group, layout.context, columns, dtype) for group in groups])


def stack(rows: Sequence[Batch]) -> Batch:
    return rows[0].map(lambda *parts: torch.cat(parts), *rows[1:])


def _row(units: Sequence[Unit], context: int, wanted: Sequence[str], dtype: torch.dtype) -> Batch:
    tokens_T = torch.zeros(context, dtype=torch.int64)
    labels_T, positions_T = torch.full_like(tokens_T, IGNORE), torch.zeros_like(tokens_T)
    documents_T = torch.full((context,), -1, dtype=torch.int32)
    samples = [sample for unit in units for sample in unit]
    width = samples[0].teacher_ids.shape[1]
    columns = {
        "unit": torch.zeros(context, dtype=torch.int32),
        "side": torch.zeros(context, dtype=torch.int8),
        "counted": torch.zeros(context, dtype=dtype),
        "value": torch.zeros(context, dtype=dtype),
        "weight": torch.zeros(context, dtype=dtype),
        "reference": torch.zeros(context, dtype=dtype),
        "teacher_ids": torch.zeros(context, width, dtype=torch.int32),
        "teacher_logp": torch.zeros(context, width, dtype=dtype),
    }
    at = document = 0
    for number, unit in enumerate(units):
        columns["counted"][at] = 1.0
        for sample in unit:
            here, before = slice(at, at + len(sample)), slice(at, at + len(sample) - 1)
            tokens_T[here], positions_T[here] = sample.ids, torch.arange(len(sample))
            documents_T[here], columns["unit"][here], columns["side"][here] = document, number, sample.side
            labels_T[before] = torch.where(sample.targets[1:], sample.ids[1:], IGNORE)
            columns["value"][here] = sample.value
            columns["weight"][before] = sample.targets[1:].to(dtype) / sample.targets.sum()
            columns["reference"][before] = sample.reference[1:]
            columns["teacher_ids"][before] = sample.teacher_ids[1:]
            columns["teacher_logp"][before] = sample.teacher_logp[1:]
            at, document = at + len(sample), document + 1
    given = {name: columns[name][None] for name in wanted}
    return Batch(tokens_T[None], labels_T[None], positions_T[None], documents_T[None], given)
