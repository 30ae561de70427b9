"""Which tokens of a conversation the assistant made, proven by rendering prefixes of it.

Before the assistant's turn i a model sees the rendering of messages[:i] with the generation prompt, and what it then
writes makes the rendering of messages[:i+1]. Where the tokens of the first begin the second, the turn is what follows,
up to the last special token, which ends it; nothing is looked for by its spelling. In a longer conversation the turn
carries loss where the same tokens stand at its beginning. Some templates write an earlier turn otherwise than the
last one (they take its reasoning out, say): such a turn is trained in a sample of its own, which ends with it, just as
a model would have to make it; the conversation forks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from truestep.data.chat.encoding import TemplateEncoder, blanked
from truestep.data.chat.template import ChatTemplate
from truestep.data.chat.units import RowError


@dataclass(frozen=True)
class Turn:
    """Tokens [start, stop) are message `message`, made by the assistant; the last of them ends the turn."""

    message: int
    start: int
    stop: int


@dataclass(frozen=True)
class Proven:
    """The first `count` messages of a conversation as ids, and the turns that they prove, in order."""

    count: int
    ids: np.ndarray
    turns: list[Turn]


class Conversation:
    """The renderings of one conversation's beginnings, made when they are asked for. `messages` and `tools` are as the
    template takes them, and not guarded."""

    def __init__(self, template: ChatTemplate, encoder: TemplateEncoder, messages: list[dict], tools: list | None):
        self._template, self._encoder = template, encoder
        self._messages: list[dict[str, Any]] = encoder.guard(messages)
        self._tools: list[Any] | None = encoder.guard(tools)
        self._plain = messages, tools
        self._texts: dict[tuple[int, bool], str] = {}
        self._encoded: dict[tuple[int, bool], np.ndarray] = {}
        self._known: dict[tuple[bool, str], np.ndarray] = {}

    def prove(self, answers: Iterable[int]) -> list[Proven]:
        """Every message of `answers` (numbers, in order) as a turn of exactly one of the results, the longest last.
        RowError where one cannot be proven even at the end of a conversation."""
        found: list[tuple[int, list[Turn]]] = []
        for message in sorted(answers, reverse=True):
            turn = self._turn(message)
            holder = next((turns for count, turns in reversed(found) if self._holds(count, turn)), None)
            if holder is None:
                count = len(self._messages) if not found and self._holds(len(self._messages), turn) else message + 1
                holder = []
                found.append((count, holder))
            holder.insert(0, turn)
        for count, turns in found:
            self._check_ids(count)
            self._check_specials(count)
            self._check_marks(count, turns)
        return [Proven(count, self._ids(count), turns) for count, turns in reversed(found)]

    def prompt(self, count: int) -> np.ndarray:
        """Ids of the first `count` messages with the generation prompt: what a model goes on from."""
        return self._ids(count, prompt=True)

    def _turn(self, message: int) -> Turn:
        prompt, ids = self.prompt(message), self._ids(message + 1)
        if not _begins(ids, prompt):
            raise RowError(
                "not a continuation",
                f"message {message} of the assistant does not go on from the tokens of the conversation before it "
                f"(its text joins with the template's, or the template changes what was before); begin it with "
                f"another character than white space, or use another tokenizer.chat_template.",
            )
        ends = np.flatnonzero(np.isin(ids[len(prompt) :], self._encoder.special_ids))
        if not len(ends) or self._after_specials(self._text(message + 1)).strip():
            raise RowError(
                "no end of turn",
                f"the chat template ends message {message} of the assistant with no special token, so that a model "
                f"could not learn to stop; write one after it in the template, such as eos_token.",
            )
        return Turn(message, len(prompt), len(prompt) + int(ends[-1]) + 1)

    def _holds(self, count: int, turn: Turn) -> bool:
        return _begins(self._ids(count), self._ids(turn.message + 1)[: turn.stop])

    def _after_specials(self, text: str) -> str:
        last = self._encoder.specials(text)[-1]
        return text[text.rindex(last) + len(last) :]

    def _check_ids(self, count: int) -> None:
        """The ids of a sample are those of its text in one call of the tokenizer."""
        if not np.array_equal(self._ids(count), self._encoder.encode([self._text(count)])[0]):
            raise RuntimeError("the tokenizer makes other ids of a text than of its parts between special tokens")

    def _check_specials(self, count: int) -> None:
        """What the template writes by itself has the same special tokens, so none comes from a text."""
        messages, tools = self._plain
        bare = self._template.render(blanked(messages[:count]), blanked(tools))
        if self._encoder.specials(bare) != self._encoder.specials(self._text(count)):
            raise RowError(
                "special token",
                "its texts change which special tokens the chat template writes, or make one out of pieces; take "
                "what looks like special tokens out of them.",
            )

    def _check_marks(self, count: int, turns: list[Turn]) -> None:
        """Where the template marks what the assistant makes, its marks hold the turns, and nothing of what is between
        them. (Many hold a turn's header too, and some not the token that ends it.)"""
        if not self._template.has_marks or not turns:
            return
        marks = self._template.marked(self._messages[:count], self._tools, self._text(count))
        after = None if self._answers_before(turns[0].message) else 0
        for turn in turns:
            opened, closed = self._text(turn.message, prompt=True), self._text(turn.message + 1)
            last = self._encoder.specials(closed)[-1]
            made = closed[len(opened) : closed.rindex(last)]
            start, stop = closed.rindex(last) - len(made.lstrip()), len(opened) + len(made.rstrip())
            if start < stop and not any(first <= start and stop <= end for first, end in marks):
                raise _disagree(turn.message, "leave out a part of")
            begin = len(self._text(turn.message))
            if after is not None and any(first < begin and end > after for first, end in marks):
                raise _disagree(turn.message, "hold what comes before")
            after = len(closed)

    def _answers_before(self, message: int) -> bool:
        return any(one["role"] == "assistant" for one in self._messages[:message])

    def _ids(self, count: int, prompt: bool = False) -> np.ndarray:
        if (count, prompt) not in self._encoded:
            self._encoded[count, prompt] = self._encoder.encode_known(self._text(count, prompt), self._known)
        return self._encoded[count, prompt]

    def _text(self, count: int, prompt: bool = False) -> str:
        if (count, prompt) not in self._texts:
            messages = self._messages[:count]
            self._texts[count, prompt] = self._template.render(messages, self._tools, generation_prompt=prompt)
        return self._texts[count, prompt]


def _disagree(message: int, what: str) -> RowError:
    return RowError(
        "marks disagree",
        f"the chat template's {{% generation %}} marks {what} message {message} of the assistant, as prefixes of the "
        f"conversation prove it; correct the marks, or take them out of the template.",
    )


def _begins(ids: np.ndarray, beginning: np.ndarray) -> bool:
    return len(beginning) <= len(ids) and np.array_equal(ids[: len(beginning)], beginning)
