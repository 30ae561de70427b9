"""[[stages]]: what is trained, on what, for how long, and what must hold afterwards."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from truestep.recipe.data import MixtureItem
from truestep.recipe.posttrain import Distill, Lora, Preference, Quantise, Remember, Reward, Sft
from truestep.recipe.section import Section, field
from truestep.recipe.units import Count, Number

TRAINED = ("pretrain", "sft", "preference", "reward_model", "distill")
"""Kinds of stages that train."""
OPTIMIZERS = ("adamw", "muon")
LOSSES = ("cross-entropy",)
Rate = Annotated[Number, Ge(0), Lt(1)]


class Schedule(Section):
    """Learning-rate factor against the count of optimizer steps that were taken. Fractions are of the stage's steps."""

    kind: Literal["wsd", "cosine", "linear", "constant"] = field(
        "wsd", help="warm-up then: stable and decay, cosine, linear to `final`, or constant"
    )
    warmup: float = field(
        0.05, help="steps of linear warm-up: a fraction below 1, or a number of steps from 1 on", ge=0
    )
    decay: float = field(0.2, help="wsd: steps of the final decay (fraction or number)", ge=0)
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = field("1-sqrt", help="wsd: shape of the decay")
    final: float = field(0.0, help="factor at the end", ge=0, le=1)


class Optim(Section):
    """The optimizer of a stage."""

    kind: str = field(
        "adamw", help='adamw, muon (matrices by Muon, the rest by AdamW), or an import path "package.module:factory"'
    )
    lr: float = field(3e-4, help="peak learning rate", gt=0)
    betas: tuple[Rate, Rate] = field((0.9, 0.95), help="AdamW's decay rates")
    eps: float = field(1e-8, help="AdamW's epsilon", gt=0)
    weight_decay: float = field(0.1, help="decoupled decay of the decayed groups", ge=0)
    decay_embeddings: bool = field(False, help="also decay the embedding table")
    clip_norm: float = field(
        1.0, help="global gradient norm above which gradients are scaled down; 0 switches clipping off", ge=0
    )
    muon_lr: float = field(0.02, help="muon: learning rate of the matrices", gt=0)
    muon_momentum: float = field(0.95, help="muon: momentum (Nesterov)", ge=0, lt=1)
    muon_steps: int = field(5, help="muon: Newton-Schulz iterations", gt=0)
    muon_dtype: Literal["bfloat16", "float32", "auto"] = field(
        "auto",
        help="muon: dtype of the Newton-Schulz products; auto is bfloat16 where the hardware has it",
        digest="bits",
    )
    schedule: Schedule = field(Schedule(), help="learning-rate schedule")
    options: dict[str, Any] = field({}, help="keyword arguments for an optimizer of your own")


class Loss(Section):
    """The loss of a stage."""

    kind: str = field("cross-entropy", help='cross-entropy, or an import path "package.module:Class" of your own')
    z_loss: float = field(0.0, help="weight of log(Z)^2 per target token", ge=0)
    options: dict[str, Any] = field({}, help="keyword arguments for a loss of your own")


class RampPoint(Section):
    """From `after` tokens of the stage on, a step takes `batch_tokens`."""

    after: Count = field(help="tokens of the stage done so far")
    batch_tokens: Count = field(help="tokens a step from there on", gt=0)


class Evaluation(Section):
    """Held-out evaluation inside the loop."""

    data: str = field(help="name of a [data.*] section")
    every: int = field(0, help="steps between evaluations; 0 means at the end only", ge=0)
    rows: int = field(0, help="rows of an evaluation inside the loop, 0 means all; the last one takes all", ge=0)
    yardstick: bool = field(False, help="show what gzip -9 and xz -9e make of the same text, beside bits per byte")


class Gate(Section):
    """The decision after a stage. Held-out loss must stay within `margin` of the parent's, or below a stated bound."""

    kind: Literal["heldout", "none"] = field(
        "heldout", help="heldout, or none (needs a reason; the model is marked UNGATED)"
    )
    max_loss: float | None = field(None, help="largest held-out loss (nats per token) that passes", gt=0)
    max_bits_per_byte: float | None = field(None, help="largest held-out bits per byte that passes", gt=0)
    margin: float = field(0.0, help="with a parent: how much worse than the parent's loss may be", ge=0)
    reason: str | None = field(None, help="kind = none: why this stage has no gate")


class Sample(Section):
    """Completions to show after the stage."""

    prompts: list[str] = field(help="texts to complete", min_length=1)
    max_new_tokens: int = field(64, help="length of a completion", gt=0)
    temperature: float = field(0.8, help="0 is greedy", ge=0)
    top_p: float = field(1.0, help="nucleus", gt=0, le=1)


class Stage(Section):
    """One stage of the lifecycle. Each kind takes a model and gives a model."""

    name: str = field(help="unique in the recipe; overrides address a stage by it", pattern=r"^[a-z0-9][a-z0-9_-]*$")
    kind: Literal["pretrain", "sft", "preference", "reward_model", "distill", "quantise"] = field(
        "pretrain", help="what the stage does"
    )
    start: str = field("init", help='init, "stage:NAME", a model directory, or a hub id "org/name@commit"')
    data: str | list[MixtureItem] = field([], help="a [data.*] section, or a mixture")
    context: int = field(0, help="tokens in a row", ge=0)
    tokens: Count = field(0, help="how many places of rows to train on, rounded up to whole steps", ge=0)
    epochs: float = field(0.0, help="instead of tokens: passes over the data, rounded up to whole steps", ge=0)
    batch_tokens: Count = field(0, help="places of rows in a step over all ranks", ge=0)
    ramp: list[RampPoint] = field([], help="batch-size ramp; batch_tokens holds until the first point")
    mask_documents: bool = field(
        True, help="documents of one row do not see each other, positions restart, the label across a border is dropped"
    )
    optim: Optim = field(Optim(), help="optimizer")
    loss: Loss = field(Loss(), help="loss")
    sft: Sft = field(Sft(), help="kind = sft: what carries loss")
    preference: Preference = field(Preference(), help="kind = preference: the loss on pairs")
    reward: Reward = field(Reward(), help="kind = reward_model: the loss on scores")
    distill: Distill | None = field(None, help="kind = distill: the teacher")
    quantise: Quantise = field(Quantise(), help="kind = quantise: the format")
    lora: Lora | None = field(None, help="train low-rank adapters instead of all weights")
    remember: Remember = field(Remember(), help="what keeps the stage from undoing the one before")
    evaluate: Evaluation | None = field(None, help="held-out evaluation")
    gate: Gate | None = field(
        None, help="decision after the stage; needed (use kind = none with a reason to go without)"
    )
    sample: Sample | None = field(None, help="completions to show afterwards", digest="where")
