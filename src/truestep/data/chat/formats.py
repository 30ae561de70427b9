"""Rows of each format become units of samples."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from truestep.data.chat.chat import chat_of
from truestep.data.chat.rows import Message, Row
from truestep.data.chat.turns import Proven
from truestep.data.chat.units import EARLIER, LAST, NO_LOSS, RowError, Sample, Unit
from truestep.data.tokenizer import Tokenizer
from truestep.recipe.data import DataSection


class Renderer:
    """Makes the units of rows of one section."""

    def __init__(self, section: DataSection, tokenizer: Tokenizer):
        self._section, self._tokenizer = section, tokenizer

    def units(self, values: dict[str, Any]) -> list[Unit]:
        return _MAKE[self._section.format](self, Row(values, self._section))

    def conversation(self, row: Row) -> list[Unit]:
        """messages, tools: every turn of the assistant once, in one sample, or in several where the template writes
        earlier turns otherwise than last ones."""
        messages = row.messages(row.need("messages"), f"field {row.name('messages')!r}")
        return self._answers(messages, row.tools(), 0)

    def completion(self, row: Row) -> list[Unit]:
        """prompt, completion, tools: only the completion has loss."""
        prompt, completion = self._prompt(row), self._part(row.need("completion"), row, "completion", "assistant")
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._answers([*prompt, *completion], row.tools(), len(prompt))
        return [[self._answer(prompt, completion, row, "completion")]]

    def preference(self, row: Row) -> list[Unit]:
        """prompt, chosen, rejected (one, or a list of them), margin; or prompt, answers, scores: a pair of any two
        answers whose scores differ."""
        if row.get("answers") is not None:
            return self._ranked(row)
        margin = row.number("margin") if row.get("margin") is not None else 0.0
        rejected = row.need("rejected")
        several = rejected if _is_several(rejected) else [rejected]
        return [self._pair(row, row.need("chosen"), one, margin) for one in several]

    def labelled(self, row: Row) -> list[Unit]:
        """prompt, completion, label (true or 1: desirable; false, 0 or -1: not), score."""
        label = row.number("label")
        if label not in (-1, 0, 1):
            raise RowError("label", f"field {row.name('label')!r} is {label:g}; write true or false.")
        score = row.number("score") if row.get("score") is not None else 0.0
        completion = self._part(row.need("completion"), row, "completion", "assistant")
        sample = self._answer(self._prompt(row), completion, row, "completion")
        return [[replace(sample, side=1 if label == 1 else -1, value=score)]]

    def stepped(self, row: Row) -> list[Unit]:
        """prompt, steps (texts), labels (one a step): the label of a step lies on its last token."""
        labels = [_number(one, row) for one in row.items("labels")]
        steps = [row.as_text(one, f"field {row.name('steps')!r}", "steps are no text") for one in row.items("steps")]
        if len(steps) != len(labels):
            raise RowError("steps", f"has {len(steps)} steps, but {len(labels)} labels; repair the row.")
        lines = [step if step.endswith("\n") else step + "\n" for step in steps[:-1]] + steps[-1:]
        answer: str | list[Message] = "".join(lines)
        prompt = self._prompt(row)
        if isinstance(prompt, list):
            answer = [{"role": "assistant", "content": answer}]
        sample = self._answer(prompt, answer, row, "steps")
        return [[replace(sample, value=self._values(sample, lines, labels))]]

    def _values(self, sample: Sample, lines: list[str], labels: list[float]) -> np.ndarray:
        """float32, one an id: each label on the last token of its step."""
        answer = np.flatnonzero(sample.roles == LAST)[:-1]  # the last one ends the turn
        parts = self._tokenizer.encode_batch(lines)
        if not np.array_equal(np.concatenate(parts), sample.ids[answer]):
            raise RowError(
                "steps join",
                "has steps whose tokens change when they are written one after the other; begin each with a letter, "
                "or use a chat template that writes an answer as it is.",
            )
        values = np.full(len(sample.ids), np.nan, dtype=np.float32)
        values[answer[np.cumsum([len(part) for part in parts]) - 1]] = labels
        return values

    def _ranked(self, row: Row) -> list[Unit]:
        answers, scores = row.items("answers"), [_number(one, row) for one in row.items("scores")]
        if len(answers) != len(scores):
            raise RowError("answers", f"has {len(answers)} answers, but {len(scores)} scores; repair the row.")
        order = sorted(range(len(scores)), key=lambda n: -scores[n])
        pairs = [(a, b) for a, b in combinations(order, 2) if scores[a] > scores[b]]
        if not pairs:
            raise RowError("no order", "has answers of equal scores only, so none is preferred; drop the row.")
        return [self._pair(row, answers[a], answers[b], scores[a] - scores[b]) for a, b in pairs]

    def _pair(self, row: Row, chosen: Any, rejected: Any, margin: float) -> Unit:
        sides = {"chosen": chosen, "rejected": rejected}
        parts = {name: self._part(one, row, name, "assistant") for name, one in sides.items()}
        if parts["chosen"] == parts["rejected"]:
            raise RowError("equal answers", "has the same chosen and rejected answer; drop the row.")
        if row.get("prompt") is None:
            prompt, parts = _common(parts, row)
        else:
            prompt = self._prompt(row)
        samples = [self._answer(prompt, part, row, name) for name, part in parts.items()]
        return [replace(one, side=side, value=margin) for one, side in zip(samples, (1, -1))]

    def _prompt(self, row: Row) -> str | list[Message]:
        return self._part(row.need("prompt"), row, "prompt", "user")

    def _part(self, value: Any, row: Row, field: str, role: str) -> str | list[Message]:
        """A text, or the messages that it stands for."""
        where = f"field {row.name(field)!r}"
        if isinstance(value, list | dict):
            return row.messages([value] if isinstance(value, dict) else value, where)
        text = row.as_text(value, where, f"{field} is no text")
        return [{"role": role, "content": text}] if self._section.as_chat else text

    def _answer(self, prompt: str | list[Message], answer: str | list[Message], row: Row, field: str) -> Sample:
        """One sample, in which the answer has the role of the last turn, whole."""
        if isinstance(prompt, str) and isinstance(answer, str):
            return self._plain(prompt, answer)
        if isinstance(prompt, str) or isinstance(answer, str):
            raise RowError(
                "texts and messages",
                f"has messages in one of prompt and {row.name(field)}, and text in the other; write both alike.",
            )
        messages = [*prompt, *answer]
        proven = self._prove(messages, row.tools(), len(prompt))
        if len(proven) > 1:
            raise RowError(
                "not a continuation",
                f"field {row.name(field)!r} has turns of the assistant that the chat template writes otherwise once "
                f"others follow; keep one answer, or use another template.",
            )
        roles = _marked(proven[0], LAST, LAST)
        return Sample(proven[0].ids, roles)

    def _answers(self, messages: list[Message], tools: list[Any] | None, first: int) -> list[Unit]:
        proven = self._prove(messages, tools, first)
        last = proven[-1].turns[-1].message
        return [[Sample(one.ids, _marked(one, EARLIER, LAST, last))] for one in proven]

    def _prove(self, messages: list[Message], tools: list[Any] | None, first: int) -> list[Proven]:
        weights = [message.pop("weight", 1) for message in messages]
        turns = [n for n, one in enumerate(messages) if n >= first and one["role"] == "assistant" and weights[n]]
        if not turns:
            raise RowError("no target", "has no message of the assistant with loss, so nothing to learn; drop the row.")
        return chat_of(self._tokenizer, self._section).conversation(messages, tools).prove(turns)

    def _plain(self, prompt: str, answer: str) -> Sample:
        """Without a template. The prompt has the ids that it has by itself: with those a model is asked."""
        before, after, joined = self._tokenizer.encode_batch([prompt, answer, prompt + answer])
        if np.array_equal(joined[: len(before)], before):
            after = joined[len(before) :]
        ids = np.concatenate([self._tokenizer.first_ids, before, after, [self._tokenizer.eod_id]])
        return Sample(ids, _roles(len(ids), len(ids) - len(after) - 1))


_MAKE: dict[str, Callable[[Renderer, Row], list[Unit]]] = {
    "messages": Renderer.conversation,
    "prompt-completion": Renderer.completion,
    "preference": Renderer.preference,
    "labels": Renderer.labelled,
    "steps": Renderer.stepped,
}


def _roles(length: int, start: int) -> np.ndarray:
    roles = np.full(length, NO_LOSS, dtype=np.uint8)
    roles[start:] = LAST
    return roles


def _marked(proven: Proven, earlier: int, last: int, last_message: int = -1) -> np.ndarray:
    roles = np.full(len(proven.ids), NO_LOSS, dtype=np.uint8)
    for turn in proven.turns:
        roles[turn.start : turn.stop] = last if turn.message == last_message else earlier
    return roles


def _is_several(value: Any) -> bool:
    """Whether a value is a list of answers: of texts, or of lists of messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | list)


def _common(parts: dict[str, str | list[Message]], row: Row) -> tuple[list[Message], dict[str, list[Message]]]:
    """The messages with which both conversations begin, and what is left of each."""
    chosen, rejected = parts["chosen"], parts["rejected"]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise RowError("no prompt", "has no prompt, and its answers are texts; give a prompt.")
    shared = next(n for n in range(len(chosen) + 1) if chosen[n : n + 1] != rejected[n : n + 1])
    if not shared:
        raise RowError("no prompt", "has no prompt, and its answers begin with different messages; give a prompt.")
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


def _number(value: Any, row: Row) -> float:
    if isinstance(value, bool | int | float) and value == value and abs(value) != float("inf"):
        return float(value)
    raise RowError("no number", f"holds {value!r} in a list of numbers; repair the row.")
