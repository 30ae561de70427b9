"""The chat template of a tokenizer, examined once: what it can write, and whether a model can learn from it."""

import json
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache
from typing import Any

from truestep.data.chat.encoding import TemplateEncoder
from truestep.data.chat.template import ChatTemplate
from truestep.data.chat.turns import Conversation
from truestep.data.chat.units import RowError
from truestep.data.tokenizer import Tokenizer
from truestep.errors import DataError
from truestep.files import canonical
from truestep.recipe.data import DataSection

_REASONING = ("reasoning_content", "thinking", "reasoning")
_QUESTION: dict[str, Any] = {"role": "user", "content": "q"}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Chat:
    """A template with its encoder. `conversation` makes renderings of messages that have been checked."""

    template: ChatTemplate
    encoder: TemplateEncoder

    def conversation(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Conversation:
        """RowError for what the template would leave out in silence."""
        self._check_prompt()
        if tools and not self._writes_tools:
            raise RowError("tools", "has tools, but the chat template does not write them; use another template.")
        return Conversation(self.template, self.encoder, [self._as_taken(one) for one in messages], tools)

    def turn_end(self) -> int:
        """The id that ends an assistant's turn: where generation stops."""
        self._check_prompt()
        (proven,) = Conversation(self.template, self.encoder, [_QUESTION, _answer("a")], None).prove([1])
        return int(proven.ids[proven.turns[0].stop - 1])

    def _as_taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with the names that this template reads."""
        taken = dict(message)
        if "reasoning_content" in taken:
            if self._reasoning is None:
                raise RowError(
                    "reasoning",
                    "has reasoning_content, but the chat template does not write it; use another template.",
                )
            taken[self._reasoning] = taken.pop("reasoning_content")
        if taken.get("tool_calls"):
            if self._content_of_call is _NEITHER:
                raise RowError(
                    "tool calls", "has tool calls, but the chat template does not write them; use another template."
                )
            taken["content"] = taken["content"] or self._content_of_call
        return taken

    @cached_property
    def _reasoning(self) -> str | None:
        """The field of reasoning that changes what the template writes of a last turn."""
        return next((name for name in _REASONING if self._differ(_answer("a"), _answer("a") | {name: "r"})), None)

    @cached_property
    def _content_of_call(self) -> Any:
        """What a message with calls and no text has for content: some templates write the calls only beside null."""
        call = [{"type": "function", "id": "a" * 9, "function": {"name": "f", "arguments": {"x": 1}}}]
        other = [{"type": "function", "id": "a" * 9, "function": {"name": "g", "arguments": {"x": 1}}}]
        for content in ("", None):
            if self._differ(*(_answer(content) | {"tool_calls": one} for one in (call, other))):
                return content
        return _NEITHER

    @cached_property
    def _writes_tools(self) -> bool:
        plain = [_QUESTION, _answer("a")]
        return self._try(plain, None) != self._try(plain, [_TOOL])

    def _differ(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        texts = [self._try([_QUESTION, answer], None) for answer in (one, other)]
        return None not in texts and texts[0] != texts[1]

    def _try(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
        try:
            return self.template.render(messages, tools)
        except RowError:
            return None

    def _check_prompt(self) -> None:
        if self._prompt_fault:
            raise DataError(self._prompt_fault)

    @cached_property
    def _prompt_fault(self) -> str | None:
        """What is wrong with how the assistant's turn begins, or with how a conversation does."""
        before, asked = (self.template.render([_QUESTION], generation_prompt=one) for one in (False, True))
        answers = [self.template.render([_QUESTION, _answer(text)]) for text in ("one", "two")]
        if answers[0] == answers[1]:
            return "the chat template does not write what the assistant says; use another one."
        if before == asked and _common_start(*answers).removeprefix(before).strip():
            return (
                "the chat template has no generation prompt (add_generation_prompt changes nothing), so that what it "
                "writes before an answer would be taken for the assistant's own; add {% if add_generation_prompt %}."
            )
        end = _common_start(*(text[::-1] for text in answers))[::-1]
        if before == asked and len(self.encoder.specials(end)) > 1:
            return (
                "the chat template writes the generation prompt after every answer, asked or not, so that it would be "
                "taken for the assistant's own; put it between {% if add_generation_prompt %} and {% endif %}."
            )
        ids = self.encoder.encode([asked])[0]
        if len(ids) > 1 and ids[0] == ids[1] and ids[0] in self.encoder.special_ids:
            return "the chat template begins with the same special token twice; take one of them out of it."
        return None


_NEITHER = object()


def _common_start(one: str, other: str) -> str:
    length = next(n for n in range(min(len(one), len(other)) + 1) if one[n : n + 1] != other[n : n + 1])
    return one[:length]


def _answer(content: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def chat_of(tokenizer: Tokenizer, section: DataSection) -> Chat:
    """The tokenizer's template with the section's values. DataError where the tokenizer has none."""
    return _chat(tokenizer, canonical(section.template_values), section.date)


@lru_cache(maxsize=8)
def _chat(tokenizer: Tokenizer, values: bytes, today: str) -> Chat:
    if tokenizer.chat_template is None:
        raise DataError(
            f"the tokenizer ({tokenizer.origin}) has no chat template; set tokenizer.chat_template to chatml or a file."
        )
    variables = tokenizer.template_variables | json.loads(values)
    return Chat(ChatTemplate(tokenizer.chat_template, variables, date.fromisoformat(today)), TemplateEncoder(tokenizer))
