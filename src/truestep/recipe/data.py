"""[tokenizer] and [data.*]: where text comes from and how it becomes tokens."""

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from truestep.recipe.section import Section, field
from truestep.recipe.units import Bytes

SOURCES = ("text", "jsonl", "parquet", "hf-saved", "hf-hub", "python-stdlib", "megatron", "npy")


def _day(value: str) -> str:
    return date.fromisoformat(value).isoformat()


Day = Annotated[str, AfterValidator(_day)]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who a message can be from."""

MESSAGE_FIELDS = ("role", "content", "reasoning_content", *(f"role.{role}" for role in ROLES))
"""Fields of a message, and the words for roles, that may go by other names."""
FIELDS: dict[str, tuple[str, ...]] = {
    "text": (),
    "messages": ("messages", "tools"),
    "prompt-completion": ("prompt", "completion", "tools"),
    "preference": ("prompt", "chosen", "rejected", "margin", "answers", "scores", "tools"),
    "labels": ("prompt", "completion", "label", "score", "tools"),
    "steps": ("prompt", "steps", "labels", "tools"),
}
"""Fields of a row, by format."""


class TokenizerSection(Section):
    """How text becomes ids."""

    kind: Literal["train-bpe", "file", "bytes", "start"] = field(
        "bytes",
        help="train a byte-level BPE on the data, load a tokenizer.json (or a directory that has one), "
        "use raw bytes (256 ids + end-of-document), or take that of the model that the first stage starts from",
    )
    path: str | None = field(
        None, help="kind = file: a tokenizer.json, a model directory, or a hub id with @revision", digest="where"
    )
    vocab_size: int = field(4096, help="kind = train-bpe: size of the vocabulary, special tokens included", ge=257)
    data: list[str] = field([], help="kind = train-bpe: data sections to train on; by default the first stage's")
    sample: Bytes = field("32MiB", help="kind = train-bpe: how much text to train on, taken evenly from the data")
    eod: str | None = field(
        None, help="kind = file or start: token that ends a document; by default the tokenizer's eos token"
    )
    special: list[str] = field([], help="kind = train-bpe or bytes: further special tokens, such as <|im_start|>")
    chat_template: str | None = field(
        None, help="chatml, or a file with a Jinja template; by default the one beside the tokenizer"
    )


class Decontaminate(Section):
    """Drop documents that share a 13-gram of words with evaluation text."""

    against: list[str] = field(
        help="text files (one evaluation text each) or JSONL files", min_length=1, digest="where"
    )
    text_field: str = field("text", help="field of JSONL rows")
    ngram: int = field(13, help="words in a row that count as a copy", ge=1)


class DataSection(Section):
    """One corpus. `source` names a kind from truestep.data.sources, or your own as "package.module:Class"."""

    source: str = field(help=f'{", ".join(SOURCES)}, or an import path "package.module:Class"')
    path: str | list[str] | None = field(None, help="files, folders, globs or object-store URLs", digest="where")
    format: Literal["text", "messages", "prompt-completion", "preference", "labels", "steps"] = field(
        "text",
        help="what a row is: plain text; a conversation; a prompt and its completion; a prompt with chosen and "
        "rejected answers; a prompt, an answer and a label; a prompt and an answer in labelled steps",
    )
    fields: dict[str, str] = field(
        {},
        help="where rows name them otherwise: our field to theirs, as in messages = conversations, role = from, "
        '"role.user" = human',
    )
    as_chat: bool = field(
        False,
        help="texts of prompts and answers are messages of a user and the assistant, written by the chat template; "
        "without it they are plain text, and the end-of-document token follows",
    )
    template_values: dict[str, Any] = field({}, help="values for the chat template, as in enable_thinking = false")
    date: Day = field(
        "2026-01-01",
        help="the day that a chat template takes for today (year-month-day), so that text built twice is the same",
    )
    max_refused: float = field(
        0.0, help="share of rows that may be refused (and are counted) before the build ends", ge=0, lt=1
    )
    text_field: str = field("text", help="the field or column that holds the text")
    split: Literal["all", "train", "heldout"] = field(
        "all", help="with holdout: which part of the documents this section is"
    )
    holdout: float = field(
        0.0, help="share of documents (by a hash of their text) that form the held-out part", ge=0, lt=1
    )
    options: dict[str, Any] = field(
        {}, help="keyword arguments of the source (repo, revision, config for hf-hub; include, exclude for text; ...)"
    )
    dedup: Literal["none", "exact", "near"] = field(
        "none",
        help="drop exact duplicates (hash of the text), or near ones too (MinHash, Jaccard above near_threshold)",
    )
    near_threshold: float = field(
        0.8, help="dedup = near: Jaccard similarity of word 5-grams above which a later document is dropped", gt=0, le=1
    )
    decontaminate: Decontaminate | None = field(None, help="drop documents that overlap evaluation text")
    packing: Literal["split", "best-fit"] = field(
        "split", help="split: one stream cut into rows, nothing dropped (pretraining); best-fit: whole documents only"
    )
    too_long: Literal["truncate", "split", "refuse", "drop"] = field(
        "truncate",
        help="best-fit: what happens to a document longer than a row. Rows of other formats than text cannot be split, "
        "and may be dropped, which is counted",
    )
    storage_options: dict[str, str] = field(
        {}, help="options of the object store (endpoint, region, allow_http, ...); never secrets", digest="where"
    )


class MixtureItem(Section):
    """One corpus in a mixture."""

    data: str = field(help="name of a [data.*] section")
    weight: float = field(1.0, help="share of rows, relative to the other weights", gt=0)
    max_epochs: float | None = field(
        None, help="stop drawing from it after this many passes; its share goes to the others", gt=0
    )
