"""Conversations, templates and tokenizers for the tests of chat data."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from tests.data.foreign_tokenizers import sentencepiece
from truestep.data.chat.template import template_source
from truestep.data.samples import Sample, Unit, render
from truestep.data.tokenizer import Tokenizer, bytes_tokenizer, train_bpe
from truestep.recipe.data import DataSection

START, END = "<|im_start|>", "<|im_end|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers & says so: é",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        },
    }
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi  there"},
    {"role": "assistant", "content": "Hello, wörld 🙂"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
CALLS = [
    {"role": "user", "content": "2+2?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "ü": "<b>"}}}],
    },
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "4."},
]

TEMPLATES = {
    "chatml": template_source("chatml"),
    # as in Llama 2: turns of the user end with what asks for an answer
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}",
    # as in Qwen 3: the last turn has its reasoning, earlier ones have not
    "thinks": """
{%- for m in messages %}
    {%- if m.role == 'assistant' and loop.last %}
        {{- '<|im_start|>assistant\n<think>' + (m.reasoning_content or '') + '</think>' + m.content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""".strip(),
    # as in Gemma: another name for the assistant, rules on the order, a date, loop controls
    "rules": """
{{- bos_token + strftime_now('%d %b %Y') }}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- if loop.first and m.role == 'assistant' %}
        {{- raise_exception('Conversations begin with the user') }}
    {%- endif %}
    {%- set who = 'model' if m.role == 'assistant' else m.role %}
<|im_start|>{{ who }}
    {% if m.content %}
{{ m.content | trim }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>model
{% endif %}
""".strip(),
}


def byte_ids(template: str | None = "chatml", *more: str) -> Tokenizer:
    """Bytes with the tokens of ChatML, and a template by its name above or as it is."""
    tokenizer = bytes_tokenizer([START, END, *more])
    return tokenizer if template is None else tokenizer.with_chat_template(TEMPLATES.get(template, template))


def merged_ids(template: str) -> Tokenizer:
    """A byte-level BPE, in which texts join."""
    texts = ["Hello, hello there\n\n\nassistant user system im_end im_start <|im_end|> <|im_start|>\n\n"] * 3
    return train_bpe(texts, 295, [START, END, "<s>"]).with_chat_template(TEMPLATES[template])


def sentence_pieces(template: str) -> Tokenizer:
    """As Llama 2's: spaces are ▁, one is put before a text, and special tokens are pieces of the vocabulary."""
    config = {"chat_template": TEMPLATES[template], "bos_token": "<s>", "unk_token": "<unk>"}
    return Tokenizer(sentencepiece(), "</s>", config=config)


def words(template: str) -> Tokenizer:
    """A vocabulary of whole words, where a special token is one among them."""
    vocab = {word: n for n, word in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "hi", "there", "Hello"])}
    library = Library(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = {"chat_template": TEMPLATES[template], "bos_token": "<s>"}
    return Tokenizer(json.loads(library.to_str()), "</s>", config=config)


def section(kind: str = "messages", **changes: Any) -> DataSection:
    return DataSection(source="jsonl", path="x", format=kind, **changes)


def rendered(row: dict[str, Any], tokenizer: Tokenizer, given: DataSection | None = None) -> list[Unit]:
    return render(row, given or section(), tokenizer)


def only(units: list[Unit]) -> Sample:
    ((sample,),) = units
    return sample


def pieces(sample: Sample, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """The sample's text, cut where the role changes."""
    return [(role, tokenizer.decode(sample.ids[a:b])) for role, a, b in _runs(sample.roles)]


def targets(sample: Sample, tokenizer: Tokenizer) -> list[str]:
    return [text for role, text in pieces(sample, tokenizer) if role]


def _runs(roles: np.ndarray) -> Iterator[tuple[int, int, int]]:
    borders = [0, *(np.flatnonzero(np.diff(roles)) + 1).tolist(), len(roles)]
    return ((int(roles[a]), a, b) for a, b in pairwise(borders))


def saved(tokenizer: Tokenizer, folder: Path) -> str:
    tokenizer.save(folder)
    return str(folder)
