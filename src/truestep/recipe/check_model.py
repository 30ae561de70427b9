"""What must hold of [model]: sizes that fit each other, and options that the family's Hugging Face form can hold."""

from collections.abc import Iterator
from typing import Any

from truestep.recipe.check_moe import mla_problems, moe_problems
from truestep.recipe.families import FAMILIES
from truestep.recipe.model import ModelSection
from truestep.recipe.problems import Problem, value_words
from truestep.recipe.recipe import Recipe


def model_problems(recipe: Recipe) -> Iterator[Problem]:
    """Problems of the model section, and of stages and tokenizer against it."""
    yield from _of_section(recipe)
    for stage in recipe.stages:
        if stage.distill is not None and stage.distill.student is not None:
            own = recipe.model_copy(update={"model": stage.distill.student, "stages": [stage]})
            at = f"stages.{stage.name}.distill.student"
            for problem in _of_section(own):
                yield Problem(_moved(problem.path, at), problem.text, tuple(_moved(one, at) for one in problem.reads))


def _moved(path: str, at: str) -> str:
    return at + path.removeprefix("model") if path.split(".")[0] == "model" else path


def _of_section(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model is None:
        return
    yield from _tokenizer(model, recipe)
    for stage in recipe.stages:
        has_own = stage.distill is not None and stage.distill.student not in (None, model)
        if not has_own and recipe.lineage(stage)[-1].start == "init" and stage.context > model.max_context:
            yield Problem(
                f"stages.{stage.name}.context",
                f"is {stage.context}, but model.max_context is {model.max_context}; raise that, or shorten the rows.",
                ("model.max_context", f"stages.{stage.name}.start"),
            )
    if model.module is None:
        yield from _heads(model)
        yield from _family(model)
        yield from moe_problems(model)
        yield from mla_problems(model)
        scaling = model.rope_scaling
        if scaling and scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            text = f"is {high:g}, but must be more than low_freq_factor {low:g}; raise it."
            yield Problem("model.rope_scaling.high_freq_factor", text, ("model.rope_scaling",))


def _tokenizer(model: ModelSection, recipe: Recipe) -> Iterator[Problem]:
    size = tokenizer_size(recipe)
    if size is not None and 0 < model.vocab_size < size:
        reads = ("tokenizer.kind", "tokenizer.vocab_size")
        text = f"is {model.vocab_size}, but the tokenizer has {size} ids; set that or more, or 0 to take them all."
        yield Problem("model.vocab_size", text, reads)


def tokenizer_size(recipe: Recipe) -> int | None:
    """The tokenizer's number of ids as far as the recipe tells; None where a file tells it."""
    section = recipe.tokenizer
    return {"train-bpe": section.vocab_size, "bytes": 257 + len(section.special)}.get(section.kind)


def _heads(model: ModelSection) -> Iterator[Problem]:
    width, heads, keys = model.hidden_size, model.num_heads, model.num_kv_heads
    if model.mla is not None:
        return  # it has sizes of its own
    if model.head_dim == 0 and width % heads:
        text = f"is {heads}, which does not divide hidden_size {width}; change one, or set head_dim."
        yield Problem("model.num_heads", text, ("model.hidden_size", "model.head_dim"))
    elif (model.head_dim or width // heads) % 2:
        text = f"is {model.head_dim or width // heads}: rotary positions need an even size."
        yield Problem("model.head_dim", text, ("model.hidden_size", "model.num_heads"))
    if keys and heads % keys:
        text = f"is {keys}, which does not divide num_heads {heads}; change one of them."
        yield Problem("model.num_kv_heads", text, ("model.num_heads",))


def _family(model: ModelSection) -> Iterator[Problem]:
    rules, family = FAMILIES[model.family], model.family
    given = {name: value for name, value in model if name in model.model_fields_set and value is not None}
    for name, value in _off().items():
        if given.get(name, value) != value and name not in rules.extra:
            able = ", ".join(other for other, r in FAMILIES.items() if name in r.extra)
            yield _misfit(name, given[name], f"which the family {family!r} cannot hold (only {able}); remove it")
    for name, value in rules.structure.items():
        if given.get(name, value) != value:
            yield _misfit(name, given[name], f"but the family {family!r} has {value_words(value)}; remove it")
    query, out = given.get("attention_bias", rules.bias == "qkv" or model.attention_out_bias), model.attention_out_bias
    if rules.bias == "qkv" and (not query or out):
        yield _misfit("attention_bias", query, f"but the family {family!r} has biases on q, k, v only; remove it")
    elif rules.bias == "none" and (query or out):
        yield _misfit("attention_bias", query, f"but the family {family!r} has no biases; remove it")
    elif rules.bias == "flag" and query != out:
        yield _misfit("attention_bias", query, f"but the family {family!r} has one switch: set attention_out_bias too")


def _off() -> dict[str, Any]:
    """Options that only some families can hold, each with the value that switches it off."""
    return {
        "mlp_bias": False,
        "sliding_window": None,
        "full_attention_every": 0,
        "attention_softcap": None,
        "logit_softcap": None,
        "query_scale": None,
        "rope_local_theta": None,
    }


def _misfit(name: str, value: Any, text: str) -> Problem:
    return Problem(f"model.{name}", f"is {value_words(value)}, {text}.", ("model.family",))
