"""Losses after pretraining, each written from its formula, of samples that were run through the model one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.functional import logsigmoid

BETA, SMOOTHING, GAMMA, DESIRABLE, UNDESIRABLE, SFT = 0.5, 0.2, 0.3, 1.5, 0.75, 0.25
POINT, CENTER, MIX, TEMPERATURE, HARD, TOP_K = 0.4, 0.3, 0.3, 2.0, 0.25, 5
"""What the recipes of these tests ask for: nothing that would hide a factor."""


@dataclass(frozen=True)
class Seen:
    """What the model makes of one sample. Of its N targets: log-probabilities `logp_N` and those of the reference,
    all log-probabilities `logits_NV` (of the teacher too). `side`, `value_T` as in tests.parallel.units. `scores_T`: of
    a reward model."""

    logp_N: torch.Tensor
    reference_N: torch.Tensor
    logits_NV: torch.Tensor
    teacher_NV: torch.Tensor
    side: int
    value_T: torch.Tensor
    scores_T: torch.Tensor | None = None

    @property
    def ratio_N(self) -> torch.Tensor:
        return self.logp_N - self.reference_N

    @property
    def score(self) -> torch.Tensor:
        assert self.scores_T is not None
        return self.scores_T[-1]


Formula = Callable[[Sequence[Sequence[Seen]]], torch.Tensor]
"""The loss of a whole global batch of units."""


@dataclass(frozen=True)
class Objective:
    """`units`: which kind of them it takes (see draw_units); `columns`: what its rows carry; `stage`: the fields of the
    recipe's stage; `model`: those of its model."""

    formula: Formula
    units: str
    columns: tuple[str, ...]
    stage: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def top_k(self) -> int:
        """Of the columns of a stored teacher; 0 without one."""
        return TOP_K if "teacher_ids" in self.columns else 0

    @property
    def online(self) -> bool:
        """Whether a teacher answers in the step."""
        return self.stage["kind"] == "distill" and not self.top_k


def sft_by_token(units: Sequence[Sequence[Seen]]) -> torch.Tensor:
    return -torch.cat([seen.logp_N for unit in units for seen in unit]).mean()


def sft_by_sample(units: Sequence[Sequence[Seen]]) -> torch.Tensor:
    """Every sample counts the same, however long it is."""
    return -torch.stack([seen.logp_N.mean() for unit in units for seen in unit]).mean()


def of_pairs(of_pair: Callable[[Seen, Seen], torch.Tensor]) -> Formula:
    """The mean over pairs."""

    def loss(units: Sequence[Sequence[Seen]]) -> torch.Tensor:
        return torch.stack([of_pair(chosen, rejected) for chosen, rejected in units]).mean()

    return loss


def dpo(chosen: Seen, rejected: Seen) -> torch.Tensor:
    """arXiv 2305.18290, equation 7."""
    return -logsigmoid(BETA * (chosen.ratio_N.sum() - rejected.ratio_N.sum()))


def dpo_with_sft(chosen: Seen, rejected: Seen) -> torch.Tensor:
    return dpo(chosen, rejected) - SFT * chosen.logp_N.mean()


def ipo(chosen: Seen, rejected: Seen) -> torch.Tensor:
    """arXiv 2310.12036, equation 17, of mean log-ratios."""
    return (chosen.ratio_N.mean() - rejected.ratio_N.mean() - 1 / (2 * BETA)).square()


def robust(chosen: Seen, rejected: Seen) -> torch.Tensor:
    """arXiv 2403.00409, equation 12."""
    margin = BETA * (chosen.ratio_N.sum() - rejected.ratio_N.sum())
    return (-(1 - SMOOTHING) * logsigmoid(margin) + SMOOTHING * logsigmoid(-margin)) / (1 - 2 * SMOOTHING)


def length_normalised(chosen: Seen, rejected: Seen) -> torch.Tensor:
    """arXiv 2411.15124, equation 6: DPO of mean log-ratios."""
    return -logsigmoid(BETA * (chosen.ratio_N.mean() - rejected.ratio_N.mean()))


def simpo(chosen: Seen, rejected: Seen) -> torch.Tensor:
    """arXiv 2405.14734, equation 6."""
    return -logsigmoid(BETA * (chosen.logp_N.mean() - rejected.logp_N.mean()) - GAMMA)


def kto(units: Sequence[Sequence[Seen]]) -> torch.Tensor:
    """arXiv 2402.01306, section 4, with a reference point that is given."""
    terms = []
    for seen in (seen for unit in units for seen in unit):
        x = seen.ratio_N.sum()
        good = DESIRABLE * (1 - torch.sigmoid(BETA * (x - POINT)))
        terms.append(good if seen.side > 0 else UNDESIRABLE * (1 - torch.sigmoid(BETA * (POINT - x))))
    return torch.stack(terms).mean()


def scored_pair(chosen: Seen, rejected: Seen, margins: bool = False) -> torch.Tensor:
    """Bradley and Terry 1952; with the margin of arXiv 2307.09288, equation 2, and the centre of arXiv 2312.09244: the
    score of an answer is that of its last token."""
    margin = chosen.value_T[-1] if margins else 0.0
    loss = -logsigmoid(chosen.score - rejected.score - margin)
    return loss + (CENTER * (chosen.score + rejected.score).square() if margins else 0.0)


def scored_steps(units: Sequence[Sequence[Seen]]) -> torch.Tensor:
    """arXiv 2305.20050: the cross-entropy of every step's label, a mean over steps."""
    terms = []
    for seen in (seen for unit in units for seen in unit):
        assert seen.scores_T is not None
        for score, label in zip(seen.scores_T, seen.value_T):
            if not label.isnan():
                terms.append(-label * logsigmoid(score) - (1 - label) * logsigmoid(-score))
    return torch.stack(terms).mean()


def forward_kl(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """Σ p (log p - log q) of log-probabilities."""
    return (p_NV.exp() * (p_NV - q_NV)).sum(-1)


def reverse_kl(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    return forward_kl(q_NV, p_NV)


def jensen_shannon(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """arXiv 2306.13649, section 2: the mixture holds the share MIX of the teacher."""
    mixture_NV = (MIX * p_NV.exp() + (1 - MIX) * q_NV.exp()).log()
    return MIX * forward_kl(p_NV, mixture_NV) + (1 - MIX) * forward_kl(q_NV, mixture_NV)


def distilled(units: Sequence[Sequence[Seen]], of: Callable[..., torch.Tensor], top_k: int = 0) -> torch.Tensor:
    """(1 - HARD) T² D(teacher, student) + HARD nll, a mean over targets. `top_k`: the teacher's likeliest tokens, and
    all others as one."""
    terms = []
    for seen in (seen for unit in units for seen in unit):
        p_NV, q_NV = (x.div(TEMPERATURE).log_softmax(-1) for x in (seen.teacher_NV, seen.logits_NV))
        if top_k:
            best_NK = p_NV.topk(top_k).indices
            p_NV, q_NV = (_classes(x, best_NK) for x in (p_NV, q_NV))
        terms.append((1 - HARD) * TEMPERATURE**2 * of(p_NV, q_NV) - HARD * seen.logp_N)
    return torch.cat(terms).mean()


def _classes(logp_NV: torch.Tensor, best_NK: torch.Tensor) -> torch.Tensor:
    named_NK = logp_NV.gather(1, best_NK)
    return torch.cat([named_NK, torch.log1p(-named_NK.exp().sum(1, keepdim=True))], dim=1)


UNIT = ("unit", "side", "counted", "value")


def _preference(of_pair: Callable[[Seen, Seen], torch.Tensor], **options: Any) -> Objective:
    columns = UNIT if options["kind"] == "simpo" else (*UNIT, "reference")
    return Objective(of_pairs(of_pair), "pair", columns, {"kind": "preference", "preference": {"beta": BETA} | options})


def _teacher(kind: str, of: Callable[..., torch.Tensor], top_k: int = 0, stored: bool = False) -> Objective:
    settings: dict[str, Any] = {"divergence": kind, "temperature": TEMPERATURE, "hard": HARD, "top_k": top_k}
    settings |= {"logits": "stored" if stored else "online"} | ({"mix": MIX} if kind == "js" else {})
    stage = {"kind": "distill", "distill": {"teacher": "elsewhere", **settings}}
    columns = ("teacher_ids", "teacher_logp") if stored else ()
    return Objective(partial(distilled, of=of, top_k=top_k), "one", columns, stage)


SCORES = {"scores": True, "tie_embeddings": False}


OBJECTIVES: dict[str, Objective] = {
    "sft by token": Objective(sft_by_token, "one", (), {"kind": "sft"}),
    "sft by sample": Objective(
        sft_by_sample, "one", ("weight", "counted"), {"kind": "sft", "sft": {"weighting": "sample"}}
    ),
    "dpo": _preference(dpo, kind="dpo"),
    "ipo": _preference(ipo, kind="ipo"),
    "robust": _preference(robust, kind="robust", label_smoothing=SMOOTHING),
    "length-normalised": _preference(length_normalised, kind="length-normalised"),
    "dpo with sft": _preference(dpo_with_sft, kind="dpo", sft=SFT),
    "kto": Objective(
        kto,
        "labelled",
        (*UNIT, "reference"),
        {
            "kind": "preference",
            "preference": {"kind": "kto", "beta": BETA, "desirable": DESIRABLE, "undesirable": UNDESIRABLE},
        },
    ),
    "simpo": _preference(simpo, kind="simpo", margin=GAMMA),
    "pairs of scores": Objective(of_pairs(scored_pair), "pair", UNIT, {"kind": "reward_model"}, SCORES),
    "pairs with margins": Objective(
        of_pairs(partial(scored_pair, margins=True)),
        "pair",
        UNIT,
        {"kind": "reward_model", "reward": {"margins": True, "center": CENTER}},
        SCORES,
    ),
    "scores of steps": Objective(
        scored_steps, "steps", UNIT, {"kind": "reward_model", "reward": {"kind": "steps"}}, SCORES
    ),
    "forward": _teacher("forward", forward_kl),
    "reverse": _teacher("reverse", reverse_kl),
    "js": _teacher("js", jensen_shannon),
    "forward of the likeliest": _teacher("forward", forward_kl, TOP_K - 2),
    "forward, stored": _teacher("forward", forward_kl, TOP_K, stored=True),
    "reverse, stored": _teacher("reverse", reverse_kl, TOP_K, stored=True),
    "js, stored": _teacher("js", jensen_shannon, TOP_K, stored=True),
}
