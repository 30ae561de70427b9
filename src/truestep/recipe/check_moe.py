"""What must hold of [model.moe] and [model.mla], by themselves and against the family."""

from collections.abc import Iterator
from typing import Any

from truestep.recipe.families import FAMILIES, ExpertRules
from truestep.recipe.model import ModelSection
from truestep.recipe.moe import Moe
from truestep.recipe.problems import Problem, value_words

_OFF = {"shared_size": 0, "dense_layers": 0, "every": 1, "groups": 1, "top_groups": 1, "scale": 1.0}
"""Options that only some families can hold, each with the value that switches it off."""


def moe_problems(model: ModelSection) -> Iterator[Problem]:
    """Problems of the experts of a model."""
    rules = FAMILIES[model.family].experts
    if model.moe is None:
        if rules is not None:
            text = f"is missing, but the family {model.family!r} has experts; add num_experts and top_k there."
            yield Problem("model.moe", text, ("model.family",))
        return
    if rules is None:
        able = ", ".join(family for family, other in FAMILIES.items() if other.experts is not None)
        text = f"is set, but the family {model.family!r} has no experts (only {able}); remove it or change the family."
        yield Problem("model.moe", text, ("model.family",))
        return
    yield from _routing(model.moe)
    yield from _layers(model, model.moe)
    yield from _family(model, model.moe, rules)


def mla_problems(model: ModelSection) -> Iterator[Problem]:
    """Problems of the latent attention of a model."""
    latent = FAMILIES[model.family].latent
    if model.mla is None and latent:
        text = f"is missing, but the family {model.family!r} has latent attention; add kv_rank and the sizes there."
        yield Problem("model.mla", text, ("model.family",))
    if model.mla is not None and not latent:
        able = ", ".join(family for family, other in FAMILIES.items() if other.latent)
        text = f"is set, but the family {model.family!r} has plain attention (only {able} has latent); remove it."
        yield Problem("model.mla", text, ("model.family",))
    if model.mla is not None and model.mla.rope_dim % 2:
        text = f"is {model.mla.rope_dim}: rotary positions need an even size."
        yield Problem("model.mla.rope_dim", text)


def _routing(moe: Moe) -> Iterator[Problem]:
    experts, best = moe.num_experts, moe.top_k
    if best > experts:
        text = f"is {best}, more than the {experts} experts; take {experts} or fewer."
        yield Problem("model.moe.top_k", text, ("model.moe.num_experts",))
    elif best == 1 and moe.normalise:  # case C27
        text = (
            "is true with top_k = 1: the weight of the one expert would always be 1, so the router could not learn; "
            "set it to false."
        )
        yield Problem("model.moe.normalise", text, ("model.moe.top_k",))
    if experts % moe.groups:
        near = max(n for n in range(1, moe.groups) if experts % n == 0)
        text = f"is {moe.groups}, which does not divide num_experts {experts}; {near} does."
        yield Problem("model.moe.groups", text, ("model.moe.num_experts",))
        return
    size = experts // moe.groups
    if moe.groups > 1 and size < 2:
        text = f"is {moe.groups}: a group is chosen by its two best experts, so {experts} make {experts // 2} at most."
        yield Problem("model.moe.groups", text, ("model.moe.num_experts",))
    elif moe.top_groups > moe.groups:
        text = f"is {moe.top_groups}, more than the {moe.groups} groups; take {moe.groups} or fewer."
        yield Problem("model.moe.top_groups", text, ("model.moe.groups",))
    elif best <= experts and moe.groups > 1 and best > moe.top_groups * size:
        need = -(-best // size)
        text = f"is {moe.top_groups}, whose {moe.top_groups * size} experts are fewer than top_k {best}; take {need}."
        yield Problem("model.moe.top_groups", text, ("model.moe.groups", "model.moe.num_experts", "model.moe.top_k"))


def _layers(model: ModelSection, moe: Moe) -> Iterator[Problem]:
    if model.num_expert_layers:
        return
    reads = ("model.num_layers", "model.moe.every", "model.moe.dense_layers")
    name, value = ("dense_layers", moe.dense_layers) if moe.dense_layers else ("every", moe.every)
    text = f"is {value}, so none of the {model.num_layers} blocks has experts; lower it."
    yield Problem(f"model.moe.{name}", text, reads)


def _family(model: ModelSection, moe: Moe, rules: ExpertRules) -> Iterator[Problem]:
    given = {name: value for name, value in moe if name in moe.model_fields_set and value is not None}
    for name, value in _OFF.items():
        if given.get(name, value) != value and name not in rules.extra:
            yield _misfit(model, name, given[name], f"cannot hold (only {_able(name)}); remove it")
    for name, value in rules.structure.items():
        if given.get(name, value) != value:
            text = (
                f"is {value_words(given[name])}, but the family {model.family!r} has {value_words(value)}; remove it."
            )
            yield Problem(f"model.moe.{name}", text, ("model.family",))
    if moe.balance == "bias" and "bias" not in rules.extra:
        yield _misfit(model, "balance", "bias", f'cannot hold (only {_able("bias")}); take "aux"')
    if model.family == "mixtral" and given.get("expert_size") and moe.expert_size != model.intermediate_size:
        text = f"is {moe.expert_size}, but mixtral has one size; give it as model.intermediate_size alone."
        yield Problem("model.moe.expert_size", text, ("model.family", "model.intermediate_size"))
    size = moe.expert_size or model.intermediate_size
    if "shared_size" in rules.extra and (moe.shared_size == 0 or (size and moe.shared_size % size)):
        text = (
            f"is {moe.shared_size}, but the family {model.family!r} has one shared expert or more of expert_size; "
            f"take a multiple of that{f', such as {size}' if size else ''}."
        )
        yield Problem("model.moe.shared_size", text, ("model.family", "model.moe.expert_size"))


def _able(name: str) -> str:
    return ", ".join(family for family, r in FAMILIES.items() if r.experts is not None and name in r.experts.extra)


def _misfit(model: ModelSection, name: str, value: Any, text: str) -> Problem:
    words = f"is {value_words(value)}, which the family {model.family!r} {text}."
    return Problem(f"model.moe.{name}", words, ("model.family",))
