"""Adapters on disk, in PEFT's layout: adapter_config.json and adapter_model.safetensors, as its version 0.21 has them.

Experts have a tensor each there, as Hugging Face's files of experts do. Whoever calls this says how a weight of ours is
named in Hugging Face's files (`parts`: names and, of a stack, the index).
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from truestep.adapters.add import Shape, scale_of
from truestep.errors import ModelError
from truestep.files import sync
from truestep.numerics.low_rank import Site
from truestep.recipe.posttrain import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "truestep.base"
"""Key of the file's metadata: digest of the files of the model that the adapter was trained beside."""

_PREFIX = "base_model.model."
_SUFFIXES = {"linear": (".lora_A.weight", ".lora_B.weight"), "table": (".lora_embedding_A", ".lora_embedding_B")}
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
}
"""What a configuration may say; anything else of these would be another computation."""
_OTHER_BASE = ("pissa", "olora", "loftq", "corda")
"""Ways to begin that change the base's weights as well."""

Parts = Callable[[str], list[tuple[str, int | None]]]


@dataclass(frozen=True)
class Stored:
    """An adapter as it lies in `directory`; tensors by PEFT's names without their prefix. `base`: see BASE."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    base: str | None

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's factors is multiplied by."""
        patterns: dict[str, float] = self.config.get("alpha_pattern") or {}
        matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(matching, self.config["lora_alpha"])
        return scale_of(rank, alpha, bool(self.config.get("use_rslora")))


@dataclass(frozen=True)
class Factors:
    """An adapter's values for one site: A, B and what their product is multiplied by."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def shape(self) -> Shape:
        return Shape(self.a.shape[-2], self.scale)

    def delta(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """s B A."""
        return self.scale * (self.b.to(dtype) @ self.a.to(dtype))


def write_adapter(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    sites: Sequence[Site],
    everywhere: Sequence[Site],
    parts: Parts,
    lora: Lora,
    *,
    base: str,
    base_name: str,
    head: Mapping[str, torch.Tensor],
    tied: bool,
) -> None:
    """Write the values `tensors` ("<path>.a", "<path>.b") of adapters of `sites`, which are some of the sites
    `everywhere` of the model, as a directory that must not exist yet. `head`: weights that are trained whole, by their
    modules; `tied`: the table of tokens is the head's as well."""
    found = {f"{_PREFIX}{module}.weight": weight.contiguous() for module, weight in head.items()}
    for site in sites:
        a, b = tensors[f"{site.path}.a"], tensors[f"{site.path}.b"]
        suffix_a, suffix_b = _SUFFIXES["table" if site.kind == "table" else "linear"]
        for module, index in _modules(site, parts):
            found[f"{_PREFIX}{module}{suffix_a}"] = _one(a, index)
            found[f"{_PREFIX}{module}{suffix_b}"] = _one(b, index)
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": _targets(sites, everywhere, parts),
        "modules_to_save": sorted(head) or None,
        "ensure_weight_tying": tied and any(site.kind == "table" for site in sites),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    partial = directory.parent / f".{directory.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(found, partial / WEIGHTS, {"format": "pt", BASE: base})
    (partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in [*partial.iterdir(), partial]:
        sync(path)
    os.rename(partial, directory)
    sync(directory.parent)


def read_adapter(directory: Path) -> Stored:
    """ModelError for a directory that holds no adapter, or one that computes something else than W + s B A."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            base = (file.metadata() or {}).get(BASE)
    except FileNotFoundError as error:
        raise ModelError(f"{directory} is no adapter: {error.filename or error} does not exist.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"the adapter in {directory} cannot be read ({error}); fetch it again.") from error
    for key, allowed in _PLAIN.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ModelError(
                f"{directory / CONFIG} has {key} = {config[key]!r}, which is another computation than W + s B A; "
                f"merge that adapter where it was made."
            )
    if str(config.get("init_lora_weights")).startswith(_OTHER_BASE):
        raise ModelError(
            f"{directory / CONFIG} has init_lora_weights = {config['init_lora_weights']!r}, which changed the base's "
            f"weights too; convert the adapter to a plain one where it was made."
        )
    return Stored(directory, config, {name.removeprefix(_PREFIX): x for name, x in tensors.items()}, base)


def factors_of(
    stored: Stored, sites: Sequence[Site], parts: Parts, tied: bool
) -> tuple[dict[str, Factors], dict[str, torch.Tensor]]:
    """The adapter's values by the paths of the model's sites, and by module the weights that it brings whole. `tied`:
    the model's head is its table of tokens, so that what is added to one is to be added to the other. Every
    tensor of the file has its place, every module that its configuration names its tensors, and some product is not
    zero; else a ModelError."""
    left = _untied(stored, tied)
    saved: Collection[str] = stored.config.get("modules_to_save") or ()
    whole = {name: left.pop(f"{name}.weight") for name in saved if f"{name}.weight" in left}
    found: dict[str, Factors] = {}
    for site in sites:
        values = [_take(left, module, site, stored) for module, _ in _modules(site, parts)]
        there = [one for one in values if one is not None]
        if there and len(there) == len(values):
            found[site.path] = _stacked(there) if site.experts else there[0]
        elif there:
            raise ModelError(
                f"the adapter in {stored.directory} has only {len(there)} of the {len(values)} experts of {site.weight}"
                f"; fetch it again."
            )
    if left:
        known = next(iter(_modules(sites[0], parts)))[0]
        raise ModelError(
            f"the adapter in {stored.directory} holds {', '.join(sorted(left)[:3])} ({len(left)} of "
            f"{len(stored.tensors)} tensors) for which the model has no place (its modules are named as {known}); "
            f"rename the keys, or take the model that the adapter was made for."
        )
    wanted = [site for site in sites if _targeted(site, parts, stored.config)]
    if lacking := [site for site in wanted if site.path not in found]:
        raise ModelError(
            f"the adapter in {stored.directory} lacks the tensors of {lacking[0].weight} ({len(lacking)} of "
            f"{len(wanted)} weights that its target_modules name); fetch it again."
        )
    if not any(one.a.any() and one.b.any() for one in found.values()):
        raise ModelError(
            f"the adapter in {stored.directory} changes nothing: every one of its {len(found)} products B A is zero."
        )
    return found, whole


def _untied(stored: Stored, tied: bool) -> dict[str, torch.Tensor]:
    """The tensors, without copies that PEFT may have made of a tied table's factors for its second use."""
    left = dict(stored.tensors)
    if not tied or not any(".lora_embedding_" in name for name in left):
        return left
    if not stored.config.get("ensure_weight_tying"):
        raise ModelError(
            f"the adapter in {stored.directory} changes the table of tokens alone, but the head of this model is the "
            f"same table; train it with ensure_weight_tying, or untie the model first."
        )
    ends = {"lora_A.weight": "lora_embedding_B", "lora_B.weight": "lora_embedding_A"}
    for name in [name for name in left if name.startswith("lm_head.lora_")]:
        twin = next((x for key, x in left.items() if key.endswith(ends.get(name.removeprefix("lm_head."), "?"))), None)
        if twin is not None and torch.equal(twin.t(), left[name]):
            del left[name]
    return left


def _modules(site: Site, parts: Parts) -> list[tuple[str, int | None]]:
    return [(theirs.removesuffix(".weight"), index) for theirs, index in parts(site.weight)]


def _one(x: torch.Tensor, index: int | None) -> torch.Tensor:
    return (x if index is None else x[index]).clone(memory_format=torch.contiguous_format)


def _targets(sites: Sequence[Site], everywhere: Sequence[Site], parts: Parts) -> list[str]:
    """The last words of the modules' names where these say exactly which, else the whole names."""
    chosen = {module for site in sites for module, _ in _modules(site, parts)}
    others = {module for site in everywhere for module, _ in _modules(site, parts)} - chosen
    short = {module.rpartition(".")[2] for module in chosen}
    exact = not any(module.rpartition(".")[2] in short for module in others)
    return sorted(short if exact else chosen)


def _targeted(site: Site, parts: Parts, config: Mapping[str, Any]) -> bool:
    """Whether the configuration alone says that a site has an adapter. What is said in other ways is not looked at."""
    targets = config.get("target_modules") or ()
    if any(config.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules")):
        return False
    module = _modules(site, parts)[0][0]
    if targets == "all-linear":
        return site.group not in ("head", "embeddings")
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _take(left: dict[str, torch.Tensor], module: str, site: Site, stored: Stored) -> Factors | None:
    """A module's factors out of what is left of a file, of the right shapes."""
    suffix_a, suffix_b = _SUFFIXES["table" if site.kind == "table" else "linear"]
    a, b = left.pop(f"{module}{suffix_a}", None), left.pop(f"{module}{suffix_b}", None)
    if a is None and b is None:
        return None
    if a is None or b is None:
        lacks = suffix_a if a is None else suffix_b
        raise ModelError(f"the adapter in {stored.directory} lacks {module}{lacks}; fetch it again.")
    rank = a.shape[0]
    if list(a.shape) != [rank, site.inputs] or list(b.shape) != [site.outputs, rank]:
        raise ModelError(
            f"the adapter in {stored.directory} has factors of {list(b.shape)} and {list(a.shape)} for {module}, whose "
            f"weight here is of [{site.outputs}, {site.inputs}]; it belongs to another model."
        )
    return Factors(a, b, stored.scale(module, rank))


def _stacked(values: Sequence[Factors]) -> Factors:
    return Factors(torch.stack([one.a for one in values]), torch.stack([one.b for one in values]), values[0].scale)
