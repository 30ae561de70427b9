"""Writing a model as one GGUF file, its tokenizer and chat template in it, for llama.cpp and what is built on it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from truestep.errors import ModelError
from truestep.numerics.quantised.gguf import BLOCK, PERMUTED, gguf_name, package, to_pairs
from truestep.recipe.model import ModelSection

KINDS = {("int8", True): "Q8_0", ("int4", True): "Q4_0", ("int4", False): "Q4_1"}
"""(quantise.scheme, symmetric) -> the type of quantised tensors."""
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_SPLITS = {  # llama.cpp knows pre-tokenizers by name; these are their expressions
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "llama-bpe",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "qwen2",
}


def check(section: ModelSection, scheme: str, symmetric: bool, widths: Mapping[str, int]) -> str:
    """The type of the quantised tensors; ModelError for what a file has no place for. `widths`: of their rows."""
    if section.family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f'quantise.format = "gguf" is there for {known}, not for {section.family}; take the other format'
        )
    if section.rope_scaling is not None or section.sliding_window is not None:
        raise ModelError(
            'quantise.format = "gguf" is there for models without scaled rotary positions and windows; take the other '
            "format"
        )
    for name, width in widths.items():
        if width % BLOCK:
            raise ModelError(
                f"{name} has {width} inputs, which blocks of {BLOCK} do not divide, and GGUF has no place for a rest; "
                f"keep it as it is (quantise.keep)"
            )
    return KINDS[scheme, symmetric]


def write(
    file: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    quantised: frozenset[str],
    kind: str,
    section: ModelSection,
    tokenizer_dir: Path,
    generation: Mapping[str, Any],
) -> None:
    """`tensors` by their Hugging Face names; those that are not `quantised` are float16, vectors float32."""
    gguf = package()
    writer = gguf.GGUFWriter(file, ARCHITECTURES[str(section.family)])
    _describe(writer, section)
    writer.add_file_type({"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}[kind])
    _add_tokenizer(writer, tokenizer_dir, section, generation)
    for name, tensor in tensors:
        wide = tensor.float()
        for part, heads in ((".self_attn.q_proj.", section.num_heads), (".self_attn.k_proj.", section.num_kv_heads)):
            if section.family in PERMUTED and part in name:
                wide = to_pairs(wide, int(heads or 0))
        if name in quantised:
            how = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(wide.numpy(), how), raw_dtype=how)
        else:
            held = wide if wide.ndim < 2 else wide.half()
            if not bool(held.isfinite().all()):
                raise ModelError(
                    f"{name} has elements beyond float16, in which GGUF keeps it; quantise it, or scale it"
                )
            writer.add_tensor(gguf_name(name), held.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, section: ModelSection) -> None:
    s = section
    writer.add_context_length(s.max_context)
    writer.add_embedding_length(s.hidden_size)
    writer.add_block_count(s.num_layers)
    writer.add_feed_forward_length(s.intermediate_size)
    writer.add_head_count(s.num_heads)
    writer.add_head_count_kv(s.num_kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_dimension_count(s.head_dim)
    writer.add_rope_freq_base(s.rope_theta)
    writer.add_layer_norm_rms_eps(s.norm_eps)
    writer.add_vocab_size(s.vocab_size)


def _add_tokenizer(writer: Any, directory: Path, section: ModelSection, generation: Mapping[str, Any]) -> None:
    """A byte-level BPE. Ids of the table that the tokenizer does not use get names of their own."""
    spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model, kinds = spec["model"], package().TokenType
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ModelError(
            f"{directory / 'tokenizer.json'} is no byte-level BPE, which GGUF is written for; take the other format"
        )
    tokens = [f"[PAD{id}]" for id in range(section.vocab_size)]
    types = [kinds.UNUSED] * section.vocab_size
    for token, id in model["vocab"].items():
        tokens[id], types[id] = token, kinds.NORMAL
    for added in spec.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(spec.get("pre_tokenizer"), directory))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if merges:
        writer.add_token_merges(merges)
    adders: dict[str, Callable[[int], None]] = {
        "bos_token_id": writer.add_bos_token_id,
        "eos_token_id": writer.add_eos_token_id,
        "pad_token_id": writer.add_pad_token_id,
    }
    for key, add in adders.items():
        named = generation.get(key)
        if isinstance(named, list) and named:
            named = named[-1]  # what ends a turn comes after what ends a document
        if isinstance(named, int):
            add(named)
    writer.add_add_bos_token(False)
    if (template := _template(directory)) is not None:
        writer.add_chat_template(template)


def _pre(spec: Mapping[str, Any] | None, directory: Path) -> str:
    parts = [] if spec is None else spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and parts[0]["pattern"].get("Regex") in _SPLITS:
        return _SPLITS[parts[0]["pattern"]["Regex"]]
    raise ModelError(
        f"{directory / 'tokenizer.json'} splits text in a way that llama.cpp has no name for ({', '.join(kinds)}); "
        f'take quantise.format = "compressed-tensors"'
    )


def _template(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    found = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.exists() else None
    return found if isinstance(found, str) else None
