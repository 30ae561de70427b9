"""What the kinds of stages after pretraining add to a stage: adapters, preferences, teachers, formats of numbers."""

from typing import Annotated, Literal

from annotated_types import Gt

from truestep.recipe.data import MixtureItem
from truestep.recipe.model import ModelSection
from truestep.recipe.section import Section, field
from truestep.recipe.units import Number


class Sft(Section):
    """Supervised fine-tuning: which tokens carry loss, and what each of them weighs."""

    loss_on: Literal["assistant", "last", "all"] = field(
        "assistant", help="tokens with loss: of every assistant turn, of the last one, or all but the first"
    )
    weighting: Literal["token", "sample"] = field(
        "token", help="token: every target weighs the same; sample: every sample does, however long"
    )


class Lora(Section):
    """Low-rank adapters beside frozen weights (arXiv 2106.09685); only they are trained."""

    rank: int = field(16, help="rank r of an adapter", gt=0)
    alpha: Annotated[Number, Gt(0)] = field(32, help="the product is scaled by alpha / r")
    rslora: bool = field(False, help="scale by alpha / sqrt(r) instead (arXiv 2312.03732)")
    dropout: float = field(0.0, help="dropout of the input of adapters; none beside experts", ge=0, lt=1)
    targets: list[str] = field(
        ["attention", "mlp"],
        help="what gets an adapter: attention, mlp, experts, embeddings, head, or patterns of weights' names",
        min_length=1,
    )
    base: Literal["full", "int8", "int4", "nf4", "fp8"] = field(
        "full", help="how the frozen weights are held: as they are, or quantised (QLoRA, arXiv 2305.14314)"
    )
    merge: bool = field(True, help="export the merged model as well as the adapter")


class Preference(Section):
    """Training on pairs of answers (or on single labelled ones) against a reference, which is the stage's start."""

    kind: Literal["dpo", "ipo", "robust", "length-normalised", "kto", "simpo"] = field(
        "dpo", help="the loss: DPO's sigmoid, IPO, robust DPO, DPO of length-normalised ratios, KTO, or SimPO"
    )
    beta: float = field(0.1, help="strength of the pull to the reference", gt=0)
    label_smoothing: float = field(0.0, help="robust: share of pairs whose order is taken to be wrong", ge=0, lt=0.5)
    margin: float = field(0.5, help="simpo: target margin (gamma)", ge=0)
    desirable: float = field(1.0, help="kto: weight of desirable answers", gt=0)
    undesirable: float = field(1.0, help="kto: weight of undesirable answers", gt=0)
    kl_pairs: int = field(
        64, help="kto: pairs of a prompt and the answer of another row that the reference point is taken over", ge=2
    )
    sft: float = field(0.0, help="weight of the cross-entropy of chosen answers, per token, added to the loss", ge=0)
    reference: Literal["precomputed", "online"] = field(
        "precomputed", help="the reference's log-probabilities: made once before the first step, or in every step"
    )


class Reward(Section):
    """Reward models: one score of an answer, or of each of its steps."""

    kind: Literal["pairs", "steps"] = field(
        "pairs", help="pairs: Bradley-Terry on pairs; steps: a label for every step of an answer (process rewards)"
    )
    margins: bool = field(False, help="pairs: a pair's own margin is subtracted from the difference of its scores")
    center: float = field(0.0, help="pairs: weight of the squared sum of a pair's scores, to keep them near 0", ge=0)


class Distill(Section):
    """Distillation from the logits of a teacher with the same vocabulary."""

    teacher: str = field(help='"stage:NAME", a model directory, or a hub id "org/name@commit"')
    student: ModelSection | None = field(None, help='start = "init": the student\'s architecture; by default [model]')
    divergence: Literal["forward", "reverse", "js"] = field(
        "forward", help="KL(teacher, student), KL(student, teacher), or the generalised Jensen-Shannon divergence"
    )
    mix: float = field(
        0.5, help="js: weight of the teacher in the mixture; 0 is forward, 1 reverse (the limits)", ge=0, le=1
    )
    temperature: float = field(1.0, help="of both; the loss is multiplied by its square", gt=0)
    hard: float = field(0.0, help="share of plain cross-entropy in the loss", ge=0, lt=1)
    logits: Literal["online", "stored"] = field(
        "online", help="the teacher answers in every step, or once before the first step into a store"
    )
    top_k: int = field(0, help="only the teacher's k likeliest tokens, the rest as one; 0: the whole vocabulary", ge=0)


STATIC = ("fp8-static", "nvfp4-static")
"""Schemes with scales of inputs that calibration finds."""


class Quantise(Section):
    """Weights in fewer bits. The result is a model of its own."""

    scheme: Literal["int8", "int4", "fp8", "fp8-static", "nvfp4", "nvfp4-static"] = field(
        "int4",
        help="int8, int4, nvfp4: weights only; fp8: inputs of products too, by a scale of each token; "
        "fp8-static, nvfp4-static: inputs too, by scales from calibration",
    )
    method: Literal["rtn", "gptq"] = field("rtn", help="round to nearest, or GPTQ (arXiv 2210.17323)")
    group: int = field(128, help="int4: inputs that share a scale; -1 means all of them", ge=-1)
    symmetric: bool = field(True, help="int8, int4: no zero point")
    calibration: str | None = field(None, help="gptq, and static schemes: a [data.*] section")
    calibration_rows: int = field(128, help="rows of it", gt=0)
    act_order: bool = field(True, help="gptq: columns with the largest inputs first; the files are the same")
    damp: float = field(0.01, help="gptq: share of the mean diagonal added to the Hessian", gt=0)
    keep: list[str] = field([], help="patterns of parameter names that stay as they are; tables and heads always do")
    format: Literal["compressed-tensors", "gguf"] = field("compressed-tensors", help="how the files are laid out")


class Remember(Section):
    """What keeps a stage from undoing the one before."""

    kl: float = field(0.0, help="weight of KL(model, start) per token", ge=0)
    replay: list[MixtureItem] = field([], help="data of earlier stages, mixed in")
    ema: float = field(0.0, help="decay of a moving average of the weights, which is exported; 0: none", ge=0, lt=1)
