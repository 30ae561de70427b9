"""The rows that recipes/assistant.toml trains on: known answers, sides that differ, subjects that are held out."""

import importlib
import inspect
import re

import pytest
from recipes.assistant_data import Conversations, Function, Pairs, exchange, functions, part_of

from truestep.data.sources.base import Document

KINDS = ("Write the signature of ", "Which module has ", "What is ", "Spell ", "What does ", "Explain ")


def rows(source) -> list[dict]:
    documents = list(source.documents())
    assert all(isinstance(one, Document) and one.text is None and one.ids is None for one in documents)
    return [one.row for one in documents]


def turns(messages: list[dict]) -> list[tuple[str, str]]:
    """(question, answer) of every exchange."""
    said = [one["content"] for one in messages if one["role"] != "system"]
    return list(zip(said[::2], said[1::2], strict=True))


def test_conversations_alternate_and_repeat_themselves_by_seed():
    made = rows(Conversations(300))
    for row in made:
        roles = [message["role"] for message in row["messages"]]
        roles = roles[1:] if roles[0] == "system" else roles
        assert roles == ["user", "assistant"] * (len(roles) // 2) and len(roles) in (2, 4, 6)
    assert {len(turns(row["messages"])) for row in made} == {1, 2, 3}
    asked = [question for row in made for question, _ in turns(row["messages"])]
    assert all(any(question.startswith(kind) for question in asked) for kind in KINDS)
    assert rows(Conversations(300)) == made and rows(Conversations(300, seed=5)) != made


def test_sums_and_turned_words_are_right():
    found = {"sums": 0, "words": 0}
    for row in rows(Conversations(400)):
        for question, answer in turns(row["messages"]):
            if match := re.fullmatch(r"What is (\d+) \+ (\d+)\?", question):
                a, b = map(int, match.groups())
                assert answer == f"{a} + {b} = {a + b}"
                found["sums"] += 1
            if match := re.fullmatch(r"Spell (\w+) backwards\.", question):
                assert answer == "".join(reversed(match[1]))
                found["words"] += 1
    assert min(found.values()) > 20


@pytest.mark.parametrize("name", ["json.dumps", "shutil.copyfile", "textwrap.shorten", "bisect.bisect_left"])
def test_what_is_said_of_a_function_is_what_the_library_says(name):
    module, function = name.rsplit(".", 1)
    (found,) = [one for one in functions() if (one.module, one.name) == (module, function)]
    real = getattr(importlib.import_module(module), function)
    assert isinstance(found, Function) and found.summary in " ".join((real.__doc__ or "").split())
    arguments = [part.split("=")[0] for part in found.arguments.replace(" ", "").replace("**", "").split(",")]
    named = inspect.signature(real).parameters
    assert set(arguments) - {"*", "/"} == set(named) or name.startswith("bisect")


def test_the_rejected_side_of_a_pair_is_wrong():
    for row in rows(Pairs(400)):
        (chosen,), (rejected,) = row["chosen"], row["rejected"]
        assert row["prompt"][-1]["role"] == "user" and chosen["role"] == rejected["role"] == "assistant"
        assert chosen["content"] != rejected["content"]
        match = re.fullmatch(r"What is (\d+) \+ (\d+)\?", row["prompt"][-1]["content"])
        if match:
            right = str(int(match[1]) + int(match[2]))
            assert chosen["content"].endswith(f"= {right}") and not rejected["content"].endswith(f"= {right}")


def test_subjects_are_held_out_of_every_data_set():
    from random import Random

    random = Random(0)
    trained = {exchange(random, "train").subject for _ in range(3000)}
    held = {exchange(random, "heldout").subject for _ in range(300)}
    assert not trained & held and {part_of(one) for one in held} == {"heldout"} and len(held) > 50
    sides = [
        {question for row in rows(Conversations(400, part=part)) for question, _ in turns(row["messages"])}
        for part in ("train", "heldout")
    ]
    assert not sides[0] & sides[1]
    asked = {row["prompt"][-1]["content"] for row in rows(Pairs(200, part="heldout"))}
    assert not asked & sides[0]
