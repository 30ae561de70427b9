"""What each kind of stage needs of its own fields, of its data and of its start."""

from collections.abc import Iterator

from truestep.recipe.posttrain import STATIC, Lora, Quantise
from truestep.recipe.problems import Problem, did_you_mean
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import TRAINED, Stage

FORMATS = {
    "pretrain": ("text",),
    "sft": ("messages", "prompt-completion"),
    "distill": ("text", "messages", "prompt-completion"),
}
"""Formats of rows that a kind of stage trains on; `formats` knows those that depend on more."""


def formats(stage: Stage) -> tuple[tuple[str, ...], tuple[str, str]]:
    """The formats of rows that a stage trains on, and the field that says so with its value."""
    if stage.kind == "preference":
        single = stage.preference.kind == "kto"
        return ("labels" if single else "preference",), ("preference.kind", stage.preference.kind)
    if stage.kind == "reward_model":
        return ("steps" if stage.reward.kind == "steps" else "preference",), ("reward.kind", stage.reward.kind)
    return FORMATS[stage.kind], ("kind", stage.kind)


def stage_problems(stage: Stage, at: str, recipe: Recipe) -> Iterator[Problem]:
    """Everything that a stage of its kind lacks."""
    if stage.kind not in TRAINED:
        if stage.start == "init":
            yield Problem(f"{at}.start", f'is "init", but kind = "{stage.kind}" needs a model; name one.')
        yield from _quantise(stage.quantise, f"{at}.quantise")
        return
    for name in ("data", "context", "batch_tokens"):
        if not getattr(stage, name):
            yield Problem(f"{at}.{name}", f'is missing; kind = "{stage.kind}" trains.')
    if bool(stage.tokens) == bool(stage.epochs):
        text = "and epochs are both set; remove one." if stage.tokens else "is missing; set it, or epochs."
        yield Problem(f"{at}.tokens", text, (f"{at}.epochs",))
    if stage.kind == "distill":
        yield from _distill(stage, f"{at}.distill", recipe)
    if stage.kind in ("preference", "reward_model") and stage.loss.z_loss:
        text = f'is set but will not be used: kind = "{stage.kind}" has a loss of its own; remove it.'
        yield Problem(f"{at}.loss.z_loss", text, (f"{at}.kind",))
    if stage.kind == "reward_model" and recipe.machine.mesh.cp != 1:
        text = f"is {recipe.machine.mesh.cp}, but the scores of stage {stage.name!r} need whole rows; set it to 1."
        yield Problem("machine.mesh.cp", text, (f"{at}.kind",))
    if stage.lora is not None:
        yield from _lora(stage, stage.lora, f"{at}.lora", recipe)
    if stage.kind == "preference":
        yield from _preference(stage, at)
    if stage.remember.kl:
        yield from _kl(stage, f"{at}.remember.kl")
    yield from _formats(stage, at, recipe)


def _lora(stage: Stage, section: Lora, at: str, recipe: Recipe) -> Iterator[Problem]:
    if stage.start == "init":
        yield Problem(at, 'adapts frozen weights, but start = "init" has none; start from a model.')
    if section.merge:
        return
    if stage.sample is not None:
        text = "is false, so that no model is written of which samples could be shown; set it to true."
        yield Problem(f"{at}.merge", text, (f"{at.removesuffix('.lora')}.sample",))
    for other in recipe.stages:
        if other.start == f"stage:{stage.name}":
            text = f"is {other.start!r}, which writes an adapter alone; set lora.merge = true there."
            yield Problem(f"stages.{other.name}.start", text, (f"{at}.merge",))


def _kl(stage: Stage, at: str) -> Iterator[Problem]:
    above = at.removesuffix(".remember.kl")
    if stage.kind == "preference":
        text = "pulls at tokens, and preferences are of whole answers; their own pull is preference.beta: remove it."
        yield Problem(at, text, (f"{above}.kind",))
    elif stage.start == "init":
        yield Problem(at, 'pulls to the start, but start = "init" knows nothing; remove it.', (f"{above}.start",))


def _preference(stage: Stage, at: str) -> Iterator[Problem]:
    if stage.start == "init" and stage.preference.kind != "simpo":
        text = 'is "init", but preferences are measured against the start, and fresh weights know none; name a model.'
        yield Problem(f"{at}.start", text, (f"{at}.kind",))
    if stage.lora is not None and stage.lora.dropout:
        text = (
            f"is {stage.lora.dropout:g}, but the model and its reference are compared without dropout "
            f'(kind = "preference"); set it to 0.'
        )
        yield Problem(f"{at}.lora.dropout", text, (f"{at}.kind",))


def _quantise(section: Quantise, at: str) -> Iterator[Problem]:
    gptq = section.method == "gptq" and section.scheme in ("int4", "int8")
    if (gptq or section.scheme in STATIC) and section.calibration is None:
        asks = 'method = "gptq"' if gptq else f'scheme = "{section.scheme}"'
        text = f"is missing, but {asks} looks at data; name a [data.*] section."
        yield Problem(f"{at}.calibration", text, (f"{at}.method", f"{at}.scheme"))
    if section.format == "gguf":
        yield from _gguf(section, at)
    if section.group == 0:
        yield Problem(
            f"{at}.group", "is 0, and a scale needs inputs to share it; set it to 128, say, or to -1 for all."
        )


def _gguf(section: Quantise, at: str) -> Iterator[Problem]:
    if section.scheme not in ("int8", "int4"):
        text = f'is "{section.scheme}", which format = "gguf" does not have; take int8 (Q8_0) or int4 (Q4_0, Q4_1).'
        yield Problem(f"{at}.scheme", text, (f"{at}.format",))
    elif section.scheme == "int4" and section.group != 32:
        yield Problem(f"{at}.group", f"is {section.group}, but GGUF's blocks have 32; set it to 32.", (f"{at}.format",))
    elif section.scheme == "int8" and not section.symmetric:
        yield Problem(
            f"{at}.symmetric", "is false, but GGUF's 8 bits have no zero point; set it to true.", (f"{at}.format",)
        )


def has_student(stage: Stage) -> bool:
    """Whether the stage says itself what its fresh model is like."""
    return stage.distill is not None and stage.distill.student is not None


def _distill(stage: Stage, at: str, recipe: Recipe) -> Iterator[Problem]:
    section = stage.distill
    if section is None:
        yield Problem(at, 'is missing; kind = "distill" needs [stages.distill] with a teacher.')
        return
    earlier = [f"stage:{one.name}" for one in recipe.stages[: recipe.stages.index(stage)]]
    if section.teacher == "init":
        yield Problem(f"{at}.teacher", 'is "init", and fresh weights teach nothing; name a model.')
    elif section.teacher.startswith("stage:") and section.teacher not in earlier:
        text = f"is {section.teacher!r}, but that is no earlier stage; {did_you_mean(section.teacher, earlier)}"
        yield Problem(f"{at}.teacher", text)
    if section.student is not None and stage.start != "init":
        text = f'will not be used: the stage starts from {stage.start!r}; remove it, or write start = "init".'
        yield Problem(f"{at}.student", text, (f"{at.rpartition('.')[0]}.start",))
    if section.logits == "stored" and not section.top_k:
        text = 'is 0, but logits = "stored" keeps the likeliest tokens only; set it to 64, say.'
        yield Problem(f"{at}.top_k", text, (f"{at}.logits",))
    if stage.loss.z_loss:
        text = 'would not be used: kind = "distill" has no z-loss; remove it.'
        yield Problem(f"{at.rpartition('.')[0]}.loss.z_loss", text)


def _formats(stage: Stage, at: str, recipe: Recipe) -> Iterator[Problem]:
    wanted, (field, value) = formats(stage)
    names = [stage.data] if isinstance(stage.data, str) else [item.data for item in stage.data]
    names += [stage.evaluate.data] if stage.evaluate else []
    replayed = [item.data for item in stage.remember.replay]
    for name in [*names, *replayed]:
        section = recipe.data.get(name)
        if section is not None and section.format != "text" and section.too_long == "split":
            text = f'is "split", but rows of format "{section.format}" stay whole; take "truncate", "drop" or "refuse".'
            yield Problem(f"data.{name}.too_long", text, (f"data.{name}.format",))
        again = name in replayed and stage.kind == "sft" and stage.sft.weighting == "token"
        if section is not None and section.format not in (*wanted, *(("text",) if again else ())):
            words = " or ".join(f'"{one}"' for one in wanted)
            text = f'is "{section.format}", but stage {stage.name!r} with {field} = "{value}" takes {words}.'
            yield Problem(f"data.{name}.format", text, (f"{at}.{field}", f"{at}.data"))
    judged = recipe.data.get(stage.evaluate.data) if stage.evaluate else None
    if stage.evaluate and stage.evaluate.yardstick and judged is not None and judged.format != "text":
        text = f'compares with compressors of plain text, but its data has format "{judged.format}"; remove it.'
        yield Problem(f"{at}.evaluate.yardstick", text, (f"{at}.evaluate.data", f"data.{stage.evaluate.data}"))
