"""Which options take effect: one that will not be used is an error, and is left out of the resolved recipe.

To say so of a new option: one `Rule` under its section. The rules look at one section only; what needs the whole recipe
is in truestep.recipe.checks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from truestep.imports import is_import_path
from truestep.recipe.checkpoint import Checkpoint
from truestep.recipe.data import DataSection, TokenizerSection
from truestep.recipe.elastic import Elastic
from truestep.recipe.machine import LOOPED, Context, Ledger, Machine, Pipeline
from truestep.recipe.model import ModelSection, RopeScaling
from truestep.recipe.moe import Moe
from truestep.recipe.numerics import LowPrecision
from truestep.recipe.posttrain import STATIC, Distill, Preference, Quantise, Reward
from truestep.recipe.section import Section
from truestep.recipe.sentinel import Spikes
from truestep.recipe.stage import TRAINED, Gate, Loss, Optim, Sample, Schedule, Stage


@dataclass(frozen=True)
class Rule:
    """`fields` take effect only where `used(section)` holds; `needs` says when; `reads` are the fields it looks at."""

    fields: tuple[str, ...]
    used: Callable[[Any], bool]
    needs: str
    reads: tuple[str, ...]


def _when(field: str, *values: str) -> Callable[..., Rule]:
    def rule(*fields: str) -> Rule:
        words = " or ".join(f'"{value}"' for value in values)
        return Rule(fields, lambda section: dict(section)[field] in values, f"{field} = {words}", (field,))

    return rule


def _own_kind(*fields: str) -> Rule:
    return Rule(fields, lambda section: is_import_path(section.kind), "kind to be an import path", ("kind",))


def _remote(url: str | list[str] | None) -> bool:
    return any("://" in part for part in ([url] if isinstance(url, str) else url or []))


def _has_text_field(section: DataSection) -> bool:
    """A source of the user's own says when it is opened whether it takes the field; it gets it only if given."""
    given = "text_field" in section.model_fields_set
    if section.format != "text":
        return False
    return section.source in ("jsonl", "parquet", "hf-saved", "hf-hub") or (is_import_path(section.source) and given)


_OF_ROWS = ("fields", "max_refused", "template_values", "date")
_OF_OWN_MODULE = {"module", "options", "vocab_size", "max_context"}

RULES: dict[type[Section], tuple[Rule, ...]] = {
    TokenizerSection: (
        _when("kind", "file")("path"),
        _when("kind", "file", "start")("eod"),
        _when("kind", "train-bpe", "bytes")("special"),
        _when("kind", "train-bpe")("vocab_size", "data", "sample"),
    ),
    DataSection: (
        _when("dedup", "near")("near_threshold"),
        _when("format", "text")("packing"),
        Rule(
            ("too_long",),
            lambda s: s.format != "text" or s.packing == "best-fit",
            'packing = "best-fit", or another format than text',
            ("format", "packing"),
        ),
        _when("format", "prompt-completion", "preference", "labels", "steps")("as_chat"),
        Rule(_OF_ROWS, lambda s: s.format != "text", "another format than text", ("format",)),
        _when("split", "train", "heldout")("holdout"),
        Rule(("text_field",), _has_text_field, "a source with named fields and plain text", ("format", "source")),
        Rule(("storage_options",), lambda s: _remote(s.path), "a path with a URL", ("path",)),
    ),
    ModelSection: (
        Rule(
            tuple(name for name in ModelSection.model_fields if name not in _OF_OWN_MODULE),
            lambda s: s.module is None,
            "`module` to be left out (its own `options` say what it is like)",
            ("module",),
        ),
        Rule(("options",), lambda s: s.module is not None, "a `module` of your own", ("module",)),
        Rule(
            ("full_attention_every", "rope_local_theta"),
            lambda s: s.sliding_window is not None,
            "a sliding_window",
            ("sliding_window",),
        ),
        Rule(("num_kv_heads", "head_dim"), lambda s: s.mla is None, "plain attention, without [model.mla]", ("mla",)),
    ),
    Moe: (
        Rule(("balance_coefficient", "counts"), lambda s: s.balance in (None, "aux"), 'balance = "aux"', ("balance",)),
        Rule(("bias_rate",), lambda s: s.balance in (None, "bias"), 'balance = "bias"', ("balance",)),
        Rule(("top_groups",), lambda s: s.groups > 1, "groups above 1", ("groups",)),
    ),
    RopeScaling: (
        _when("kind", "llama3")("low_freq_factor", "high_freq_factor"),
        _when("kind", "yarn")("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
        _when("kind", "llama3", "yarn")("original_context"),
    ),
    Schedule: (
        _when("kind", "wsd")("decay", "decay_shape"),
        _when("kind", "wsd", "cosine", "linear")("final"),
    ),
    Optim: (
        _when("kind", "muon")("muon_lr", "muon_momentum", "muon_steps", "muon_dtype"),
        _when("kind", "adamw", "muon")("betas", "eps", "weight_decay", "decay_embeddings"),
        Rule(("decay_embeddings",), lambda s: s.weight_decay > 0, "a weight_decay above 0", ("weight_decay",)),
        _own_kind("options"),
    ),
    Stage: (
        _when("kind", *TRAINED)("data", "tokens", "epochs", "batch_tokens", "ramp", "optim", "loss", "lora"),
        _when("kind", "pretrain")("mask_documents"),
        _when("kind", "sft")("sft"),
        _when("kind", "preference")("preference"),
        _when("kind", "reward_model")("reward"),
        _when("kind", "distill")("distill"),
        _when("kind", "quantise")("quantise"),
        _when("kind", "sft", "preference", "distill")("remember"),
    ),
    Preference: (
        _when("kind", "robust")("label_smoothing"),
        _when("kind", "simpo")("margin"),
        _when("kind", "kto")("desirable", "undesirable", "kl_pairs"),
        _when("kind", "dpo", "ipo", "robust", "length-normalised", "kto")("reference"),
    ),
    Reward: (_when("kind", "pairs")("margins", "center"),),
    Distill: (_when("divergence", "js")("mix"),),
    Quantise: (
        _when("scheme", "int4")("group"),
        _when("scheme", "int4", "int8")("symmetric", "method"),
        _when("method", "gptq")("damp", "act_order"),
        _when("format", "compressed-tensors")("method"),
        Rule(
            ("calibration", "calibration_rows"),
            lambda s: s.method == "gptq" or s.scheme in STATIC,
            'method = "gptq", or scheme = "fp8-static" or "nvfp4-static"',
            ("method", "scheme"),
        ),
    ),
    Loss: (_when("kind", "cross-entropy")("z_loss"), _own_kind("options")),
    Gate: (_when("kind", "heldout")("max_loss", "max_bits_per_byte", "margin"), _when("kind", "none")("reason")),
    Sample: (Rule(("top_p",), lambda s: s.temperature > 0, "a temperature above 0", ("temperature",)),),
    Machine: (
        Rule(
            ("reshard_after_forward",),
            lambda s: s.mesh.dp_shard != 1 or s.mesh.cp != 1,
            "mesh.dp_shard above 1",
            ("mesh.dp_shard", "mesh.cp"),
        ),
        Rule(("pipeline",), lambda s: s.mesh.pp != 1, "mesh.pp above 1", ("mesh.pp",)),
        Rule(("context",), lambda s: s.mesh.cp != 1, "mesh.cp above 1", ("mesh.cp",)),
        Rule(("async_tp",), lambda s: s.mesh.tp != 1, "mesh.tp above 1", ("mesh.tp",)),
        Rule(("async_tp", "offload_optimizer"), lambda s: s.device != "cpu", "a CUDA device", ("device",)),
        _when("activation_checkpointing", "auto")("activation_memory"),
    ),
    Elastic: (_when("start", "auto", "fork")("regroup"),),
    Pipeline: (_when("schedule", *LOOPED)("stages_per_rank"),),
    Context: (_when("style", "all-gather")("balance"),),
    LowPrecision: (
        Rule(
            ("hadamard",),
            lambda s: s.kind == "nvfp4" and s.low_weight_gradient,
            'kind = "nvfp4" with low weight gradients',
            ("kind", "weight_gradient"),
        ),
        _when("kind", "mxfp8")("block_scale"),
    ),
    Checkpoint: (
        Rule(("storage_options",), lambda s: _remote(s.url), "an object store as `url`", ("url",)),
        Rule(("keep_every",), lambda s: s.keep > 0, "keep above 0 (all are kept)", ("keep",)),
    ),
    Spikes: (_when("action", "skip")("in_a_row", "skips", "rollbacks"),),
    Ledger: (
        Rule(
            ("currency",),
            lambda s: s.price_per_device_hour is not None,
            "price_per_device_hour",
            ("price_per_device_hour",),
        ),
    ),
}


def unused(section: Section) -> dict[str, Rule]:
    """The fields of this section that take no effect, each with the rule that says so."""
    rules = RULES.get(type(section), ())
    return {name: rule for rule in rules if not rule.used(section) for name in rule.fields}
