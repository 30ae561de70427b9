"""Conversations: what the model is asked, when an answer ends, what stays of it."""

from pathlib import Path

import pytest
import torch

from tests.models.families import tiny
from tests.rollout.test_generate import Letters
from truestep.errors import ModelError
from truestep.models.load import load_model
from truestep.rollout.chat import Chat
from truestep.rollout.directory import Opened
from truestep.rollout.generate import generate_ids

BEGIN, END = 1, 3


class Plain:
    """A message begins with 1 and ends with 3."""

    def prompt_ids(self, messages):
        turns = [[BEGIN, *Letters().encode(message["content"]), END] for message in messages]
        return [id for turn in turns for id in turn] + [BEGIN]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    tiny("llama").save_pretrained(tmp_path / "model")
    return Opened(load_model(tmp_path / "model"), Letters(), frozenset({2, END}))


def talk(opened: Opened, system: str | None = None, **options) -> Chat:
    return Chat(opened, Plain(), system, **{"temperature": 0.0, "max_new_tokens": 6} | options)


def answer_to(opened: Opened, prompt: list[int], length: int = 6) -> str:
    return Letters().decode(generate_ids(opened.model, [prompt], length, opened.stop_ids)[0])


def test_an_answer_follows_the_whole_conversation(opened):
    chat = talk(opened, "AB")
    first = chat.say("C")
    assert first == answer_to(opened, [1, 5, 6, 3, 1, 7, 3, 1]) and len(first) == 6
    said = Letters().encode(first)
    assert chat.say("D") == answer_to(opened, [1, 5, 6, 3, 1, 7, 3, 1, *said, 3, 1, 8, 3, 1])
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[2]["content"] == first
    chat.reset()
    assert chat.say("C") == answer_to(opened, [1, 7, 3, 1]) and len(chat.messages) == 2


def test_an_answer_ends_with_its_turn(opened):
    free = generate_ids(opened.model, [[1, 7, 3, 1]], 6)[0]
    stop = Opened(opened.model, opened.tokenizer, frozenset({free[2]}))
    cut = free.index(free[2])
    assert list(talk(stop).stream("C")) == [Letters().decode([id]) for id in free[:cut]]


def test_what_was_said_before_a_stop_stays(opened):
    chat = talk(opened)
    stream = chat.stream("C")
    said = next(stream) + next(stream)
    stream.close()
    assert chat.messages[-1] == {"role": "assistant", "content": said}


def test_draws_depend_on_seed_and_conversation(opened):
    drawn = {"temperature": 1.0, "top_p": 0.9}
    answers = [talk(opened, seed=seed, **drawn).say("C") for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    chat = talk(opened, seed=1, **drawn)
    chat.say("C")
    state = torch.get_rng_state()
    chat.say("C")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_full_context_is_refused_and_nothing_changes(opened):
    chat = talk(opened)
    with pytest.raises(ModelError, match="the conversation has 73 tokens, but the model takes 64; begin anew"):
        chat.say("A" * 70)
    assert chat.messages == []
    assert len(chat.say("A" * 58)) <= 3, "an answer takes the room that there is"
