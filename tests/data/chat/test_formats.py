"""Rows of every format, as units; what is wrong with a row is one sentence that names the field and the remedy."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.chat.talks import (
    CALLS,
    TALK,
    TOOLS,
    byte_ids,
    only,
    pieces,
    rendered,
    section,
    sentence_pieces,
    targets,
)
from truestep.data.build import build
from truestep.data.sample_store import SampleStore
from truestep.data.samples import LAST, RowError, row_text
from truestep.data.shard_work import Job
from truestep.data.sources.registry import open_source
from truestep.errors import DataError
from truestep.recipe.data import FIELDS, DataSection

CHAT = byte_ids("chatml")
USER, HELLO = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HEADER = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


# prompt-completion


def test_plain_texts_need_no_template_and_end_with_the_end_of_document():
    tokenizer = byte_ids(None)
    sample = only(rendered({"prompt": "2+2=", "completion": "4"}, tokenizer, section("prompt-completion")))
    assert pieces(sample, tokenizer) == [(0, "2+2="), (LAST, "4<|endoftext|>")]


def test_plain_texts_begin_with_the_bos_that_the_model_is_asked_with():
    tokenizer = sentence_pieces("inst")
    spec = tokenizer.spec | {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        }
    }
    with_bos = type(tokenizer)(spec, "</s>")
    row, given = {"prompt": "ab", "completion": " ab"}, section("prompt-completion")
    assert with_bos.first_ids.tolist() == [1] and tokenizer.first_ids.tolist() == []
    assert only(rendered(row, with_bos, given)).ids.tolist() == [1, *with_bos.encode("ab ab"), 2]
    assert only(rendered(row, tokenizer, given)).ids.tolist() == [*tokenizer.encode("ab ab"), 2]


def test_a_prompt_keeps_the_ids_that_it_has_by_itself():
    """Where the completion joins with its last token, they are encoded apart."""
    tokenizer = sentence_pieces("inst")
    sample = only(rendered({"prompt": "a", "completion": "b"}, tokenizer, section("prompt-completion")))
    prompt = tokenizer.encode("a").tolist()
    assert tokenizer.encode("ab").tolist()[: len(prompt)] != prompt
    assert sample.ids[sample.roles == 0].tolist() == prompt
    assert sample.ids[sample.roles == LAST].tolist() == [*tokenizer.encode("b"), tokenizer.eod_id]


def test_messages_or_texts_as_chat_go_through_the_template():
    as_messages = only(rendered({"prompt": [USER], "completion": [HELLO]}, CHAT, section("prompt-completion")))
    as_texts = only(rendered({"prompt": "q", "completion": "a"}, CHAT, section("prompt-completion", as_chat=True)))
    assert pieces(as_messages, CHAT) == [(0, HEADER), (LAST, "a<|im_end|>"), (0, "\n")] == pieces(as_texts, CHAT)


def test_turns_of_the_prompt_have_no_loss():
    row = {"prompt": TALK[:4], "completion": TALK[4:]}
    assert targets(only(rendered(row, CHAT, section("prompt-completion"))), CHAT) == ["4<|im_end|>"]


# preference


def test_pairs_share_their_prompt():
    row = {"prompt": [USER], "chosen": [HELLO], "rejected": [HELLO | {"content": "b"}], "margin": 0.5}
    ((chosen, rejected),) = rendered(row, CHAT, section("preference"))
    assert [targets(one, CHAT) for one in (chosen, rejected)] == [["a<|im_end|>"], ["b<|im_end|>"]]
    assert [(one.side, one.value) for one in (chosen, rejected)] == [(1, 0.5), (-1, 0.5)]
    start = np.flatnonzero(chosen.roles)[0]
    assert np.array_equal(chosen.ids[:start], rejected.ids[:start])


def test_a_prompt_may_be_what_both_conversations_begin_with():
    told = rendered({"prompt": TALK[:4], "chosen": TALK[4:], "rejected": [HELLO]}, CHAT, section("preference"))
    found = rendered({"chosen": TALK, "rejected": [*TALK[:4], HELLO]}, CHAT, section("preference"))
    for one, other in zip(told[0], found[0]):
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.roles, other.roles)


def test_lists_of_rejected_answers_and_ranked_answers_are_pairs():
    plain = byte_ids(None)
    several = rendered({"prompt": "p", "chosen": "a", "rejected": ["b", "c"]}, plain, section("preference"))
    assert [[targets(one, plain)[0][0] for one in unit] for unit in several] == [["a", "b"], ["a", "c"]]
    row = {"prompt": "p", "answers": ["x", "y", "z"], "scores": [1, 3, 1]}
    ranked = rendered(row, plain, section("preference"))
    assert [[targets(one, plain)[0][0] for one in unit] for unit in ranked] == [["y", "x"], ["y", "z"]]
    assert [unit[0].value for unit in ranked] == [2, 2]


def test_a_pair_has_one_answer_a_side_even_where_the_template_forks():
    tokenizer = byte_ids("thinks")
    row = {"prompt": TALK[:4], "chosen": TALK[4:], "rejected": [HELLO]}
    ((chosen, _),) = rendered(row, tokenizer, section("preference"))
    assert targets(chosen, tokenizer) == ["<think></think>4<|im_end|>"]
    long = {"prompt": [USER], "chosen": [HELLO, USER, HELLO], "rejected": [HELLO]}
    with pytest.raises(
        RowError, match=r"^field 'chosen' has turns of the assistant that the chat template writes other"
    ):
        rendered(long, tokenizer, section("preference"))


# labels, steps


@pytest.mark.parametrize("label,side", [(True, 1), (1, 1), (False, -1), (0, -1), (-1, -1)])
def test_labels_are_sides(label, side):
    row = {"prompt": "p", "completion": "a", "label": label, "score": 0.25}
    sample = only(rendered(row, byte_ids(None), section("labels")))
    assert (sample.side, sample.value) == (side, 0.25)


@pytest.mark.parametrize("as_chat", [False, True])
def test_labels_of_steps_lie_on_their_last_tokens(as_chat):
    row = {"prompt": "q", "steps": ["one", "two\n", "three"], "labels": [True, 0.5, False]}
    sample = only(rendered(row, CHAT, section("steps", as_chat=as_chat)))
    assert isinstance(sample.value, np.ndarray) and sample.value.shape == sample.ids.shape
    at = np.flatnonzero(~np.isnan(sample.value))
    assert sample.value[at].tolist() == [1.0, 0.5, 0.0]
    answer = CHAT.decode(sample.ids[: at[-1] + 1]).removeprefix(HEADER if as_chat else "q")
    assert answer == "one\ntwo\nthree" and [CHAT.decode([i]) for i in sample.ids[at]] == ["\n", "\n", "e"]
    assert targets(sample, CHAT) == [answer + ("<|im_end|>" if as_chat else "<|endoftext|>")]


# names


def test_fields_and_roles_by_other_names():
    names = {
        "messages": "conversations",
        "role": "from",
        "content": "value",
        "role.user": "human",
        "role.assistant": "gpt",
    }
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    sample = only(rendered(row, CHAT, section(fields=names)))
    assert np.array_equal(sample.ids, only(rendered({"messages": [USER, HELLO]}, CHAT)).ids)


def test_json_in_texts_and_parts_of_text_are_taken():
    call = {"function": {"name": "add", "arguments": json.dumps(CALLS[1]["tool_calls"][0]["function"]["arguments"])}}
    message = CALLS[1] | {"tool_calls": [call]}
    parts = CALLS[0] | {"content": [{"type": "text", "text": "2+2"}, {"type": "text", "text": "?"}]}
    row = {"messages": [parts, message, *CALLS[2:]], "tools": json.dumps(TOOLS)}
    wanted = only(rendered({"messages": CALLS, "tools": TOOLS}, CHAT))
    assert np.array_equal(only(rendered(row, CHAT)).ids, wanted.ids)


def test_the_text_of_a_row_is_all_that_its_fields_hold():
    row = {"messages": TALK, "tools": TOOLS, "other": "left out"}
    text = row_text(row, section())
    assert "Hello, wörld 🙂" in text and "Adds <two>" in text and "left out" not in text
    assert row_text({"messages": [{"role": "user", "content": "\ud800"}]}, section()) == "user\n?"


# rows that are refused


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("messages", {"talk": []}, "no messages", r"has no field 'messages' \(fields: 'talk'\); name the right one, as in"),
    ("messages", {"messages": "hi"}, "no messages", r"field 'messages' holds \"hi\", no list of messages; repair it"),
    ("messages", {"messages": []}, "no messages", r"holds \[\], no list of messages"),
    ("messages", {"messages": ["hi"]}, "no message", r"message 0 is \"hi\", no object with a role"),
    (
        "messages",
        {"messages": [USER, {"role": "gpt", "content": "a"}]},
        "unknown role",
        r"message 1: role \"gpt\" is unknown \(known: system, .*\); map it, as in .* \"role.assistant\" = \"gpt\"",
    ),
    ("messages", {"messages": [USER, {"role": ["x"], "content": "a"}]}, "unknown role", r"role \[\"x\"\] is unknown"),
    ("messages", {"messages": [USER, {"role": "assistant"}]}, "empty message", "of the assistant is empty; write"),
    ("messages", {"messages": [{"role": "user", "content": 3}]}, "content is no text", "content is 3, no text"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "not text",
        "only parts of text are taken",
    ),
    ("messages", {"messages": [{"role": "user", "content": "\ud83d"}]}, "half a character", "half of a surrogate pair"),
    ("messages", {"messages": [USER, HELLO | {"weight": 0.5}]}, "weight", "it may be 0"),
    ("messages", {"messages": [USER, HELLO | {"tool_calls": [{"x": 1}]}]}, "tool calls", "tool call 0 is"),
    (
        "messages",
        {"messages": [USER, HELLO | {"tool_calls": [{"name": "f", "arguments": "no"}]}]},
        "tool calls",
        'arguments are "no", no object nor its JSON',
    ),
    ("messages", {"messages": [USER, HELLO], "tools": "x"}, "tools", r"field 'tools' holds \"x\", no list of objects"),
    ("prompt-completion", {"prompt": "p", "completion": ""}, "completion is no text", r"field 'completion' holds \"\""),
    ("prompt-completion", {"prompt": "p", "completion": None}, "no completion", "has no field 'completion'"),
    ("prompt-completion", {"prompt": [USER], "completion": "a"}, "texts and messages", "write both alike"),
    ("preference", {"prompt": "p", "chosen": "a", "rejected": "a"}, "equal answers", "the same chosen and rejected"),
    ("preference", {"chosen": "a", "rejected": "b"}, "no prompt", "has no prompt, and its answers are texts"),
    ("preference", {"chosen": [USER, HELLO], "rejected": [HELLO]}, "no prompt", "begin with different messages"),
    ("preference", {"prompt": "p", "chosen": "a", "rejected": "b", "margin": "x"}, "margin is no number", "no number"),
    ("preference", {"prompt": "p", "answers": ["a", "b"], "scores": [1, 1]}, "no order", "none is preferred"),
    ("preference", {"prompt": "p", "answers": ["a"], "scores": [1, 2]}, "answers", "1 answers, but 2 scores"),
    ("labels", {"prompt": "p", "completion": "a", "label": 2}, "label", "field 'label' is 2; write true or false"),
    ("labels", {"prompt": "p", "completion": "a", "label": "yes"}, "label is no number", r"holds \"yes\", no number"),
    ("steps", {"prompt": "p", "steps": ["a"], "labels": [1, 0]}, "steps", "has 1 steps, but 2 labels"),
    ("steps", {"prompt": "p", "steps": ["a"], "labels": [float("nan")]}, "no number", "in a list of numbers"),
    ("steps", {"prompt": "p", "steps": [], "labels": []}, "labels is no list", r"holds \[\], no list"),
]


@pytest.mark.parametrize("kind,row,reason,says", BAD, ids=[f"{n}-{one[2]}" for n, one in enumerate(BAD)])
def test_a_bad_row_is_one_sentence_and_has_a_reason(kind, row, reason, says):
    with pytest.raises(RowError, match=says) as error:
        rendered(row, CHAT, section(kind))
    assert error.value.reason == reason and "\n" not in str(error.value)


KEYS = (
    "messages",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "label",
    "steps",
    "labels",
    "answers",
    "scores",
    "tools",
)
INNER = (
    "role",
    "content",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "weight",
    "type",
    "text",
    "reasoning_content",
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(["user", "assistant", "", "[]"])
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(FIELDS)[1:]), st.dictionaries(st.sampled_from(KEYS), ANY, max_size=5), st.booleans())
def test_whatever_a_row_holds_it_is_taken_or_refused(kind, row, as_chat):
    """No other error ever, and a unit that is taken has targets in each of its samples."""
    given_section = section(kind, as_chat=as_chat and kind != "messages")
    row_text(row, given_section)
    try:
        units = rendered(row, CHAT, given_section)
    except RowError as error:
        assert error.reason and "\n" not in str(error)
        return
    assert units and all(sample.roles.any() for unit in units for sample in unit)


# from files to a store


def stored(given: DataSection, out: Path) -> SampleStore:
    store = build(given, CHAT, out)
    assert isinstance(store, SampleStore)
    return store


def test_rows_of_every_source_make_the_same_store(tmp_path):
    rows = [{"messages": [USER, HELLO | {"content": f"answer {n}"}]} for n in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    paths = {"jsonl": "a.jsonl", "parquet": "a.parquet", "hf-saved": "saved"}
    stores = [
        stored(DataSection(source=source, path=str(tmp_path / name), format="messages"), tmp_path / source)
        for source, name in paths.items()
    ]
    assert len({store.fingerprint for store in stores}) == 1 and stores[0].num_samples == 5
    assert targets(stores[0].document(4)[0][0], CHAT) == ["answer 4<|im_end|>"]


def test_null_fields_of_columns_are_no_fields(tmp_path):
    """Arrow gives every message all fields that one of them has."""
    rows = [{"messages": CALLS, "tools": TOOLS}, {"messages": [USER, HELLO], "tools": None}]
    rows[0] = json.loads(json.dumps(rows[0]))
    rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "ü": "<b>"}'
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    store = stored(DataSection(source="parquet", path=str(tmp_path / "a.parquet"), format="messages"), tmp_path / "s")
    wanted = [
        only(rendered({"messages": CALLS, "tools": TOOLS}, CHAT)),
        only(rendered({"messages": [USER, HELLO]}, CHAT)),
    ]
    for number, sample in enumerate(wanted):
        assert np.array_equal(store.document(number)[0][0].ids, sample.ids)


def test_a_refused_row_names_file_and_line_and_reasons_are_counted(tmp_path):
    good, bad = {"messages": [USER, HELLO]}, {"messages": [USER]}
    odd = {"messages": [USER, {"role": "bot", "content": "a"}]}
    lines = [good, bad, good | {"n": 1}, bad | {"n": 2}, odd, good]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    given: dict[str, Any] = {"source": "jsonl", "path": str(tmp_path / "a.jsonl"), "format": "messages"}
    with pytest.raises(DataError, match=r"a.jsonl, line 2: has no message of the assistant with loss"):
        stored(DataSection(**given), tmp_path / "one")
    report = stored(DataSection(**given, max_refused=0.6), tmp_path / "two").header["report"]
    assert report["refused_by_reason"] == {"no target": 2, "unknown role": 1}
    assert (
        report["dropped"]["refused"]["documents"] == 3 and "line 5: field 'messages', message 1" in report["refused"][2]
    )


def test_what_is_wrong_with_the_template_is_no_refused_row(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [USER, HELLO]}) + "\n")
    given = DataSection(source="jsonl", path=str(tmp_path / "a.jsonl"), format="messages", max_refused=0.9)
    with pytest.raises(DataError, match=r"has no chat template; set tokenizer.chat_template"):
        build(given, byte_ids(None), tmp_path / "s")


def test_property_7_what_decides_ids_decides_the_store(tmp_path):
    """The same rows give the same bytes; another template, value or day gives another store."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [USER, HELLO]}) + "\n")
    given = DataSection(source="jsonl", path=str(tmp_path / "a.jsonl"), format="messages")
    dated = byte_ids("{{ strftime_now('%d') }}{{ greeting }}" + (byte_ids("chatml").chat_template or ""))
    greeted = given.model_copy(update={"template_values": {"greeting": "hi"}})
    other_day = given.model_copy(update={"date": "2026-01-02"})
    made = [(given, CHAT), (given, CHAT), (given, dated), (greeted, dated), (other_day, dated)]
    prints = [build(one, tok, tmp_path / f"s{n}").fingerprint for n, (one, tok) in enumerate(made)]
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_parts_of_a_build_that_was_broken_off_are_kept_only_for_the_same_rendering(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    given = DataSection(source="jsonl", path=str(tmp_path / "a.jsonl"), format="labels")
    (shard,) = open_source(given, tmp_path).shards()
    changes: list[dict[str, Any]] = [{}, {"as_chat": True}, {"template_values": {"x": 1}}, {"date": "2026-01-02"}]
    jobs = [
        Job(tmp_path, tmp_path, "f", "all", 0, None, "", 0, False, given.model_copy(update=change))
        for change in changes
    ]
    assert len({job.key(shard) for job in jobs}) == len(jobs)


def test_sources_of_texts_have_no_rows(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    given = DataSection(source="text", path=str(tmp_path / "a.txt"), format="messages")
    with pytest.raises(DataError, match=r"a.txt: is no row with fields, as format = \"messages\" needs"):
        build(given, CHAT, tmp_path / "s")
