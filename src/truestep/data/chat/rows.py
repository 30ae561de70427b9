"""The fields of a row: what the recipe calls them, and whether they hold what a conversation is made of."""

import json
from typing import Any

from truestep.data.chat.units import RowError
from truestep.recipe.data import ROLES, DataSection

Message = dict[str, Any]


class Row:
    """One row of a corpus, its fields under our names. What is wrong is a RowError that names theirs."""

    def __init__(self, values: dict[str, Any], section: DataSection):
        self._values, self._names = values, section.fields
        self._roles = {self._names.get(f"role.{role}", role): role for role in ROLES}

    def name(self, field: str) -> str:
        """What the row calls a field."""
        return self._names.get(field, field)

    def get(self, field: str) -> Any:
        """The value of a field; None where the row has none, or null."""
        return self._values.get(self.name(field))

    def need(self, field: str) -> Any:
        value = self.get(field)
        if value is None:
            has = ", ".join(map(repr, self._values)) or "none"
            raise RowError(
                f"no {field}",
                f"has no field {self.name(field)!r} (fields: {has}); name the right one, as in fields = "
                f'{{ {field} = "..." }}, or drop the row.',
            )
        return value

    def text(self, field: str) -> str:
        return self.as_text(self.need(field), f"field {self.name(field)!r}", f"{field} is no text")

    def number(self, field: str) -> float:
        value = self.need(field)
        if isinstance(value, bool | int | float) and value == value and abs(value) != float("inf"):
            return float(value)
        raise RowError(
            f"{field} is no number", f"field {self.name(field)!r} holds {_shown(value)}, no number; repair it."
        )

    def items(self, field: str) -> list[Any]:
        value = self.need(field)
        if not isinstance(value, list) or not value:
            raise RowError(
                f"{field} is no list", f"field {self.name(field)!r} holds {_shown(value)}, no list; repair it."
            )
        return value

    def as_text(self, value: Any, where: str, reason: str) -> str:
        """A text that is not empty."""
        if not isinstance(value, str) or not value:
            raise RowError(reason, f"{where} holds {_shown(value)}, no text; repair it or drop the row.")
        return _whole(value, where)

    def tools(self) -> list[Any] | None:
        """Descriptions of functions: a list of objects, or its JSON."""
        value = _from_json(self.get("tools"))
        if not value:
            return None
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise RowError(
                "tools", f"field {self.name('tools')!r} holds {_shown(value)}, no list of objects; repair it."
            )
        _check_strings(value, f"field {self.name('tools')!r}")
        return value

    def messages(self, value: Any, where: str) -> list[Message]:
        """Messages as templates take them."""
        if not isinstance(value, list) or not value:
            raise RowError("no messages", f"{where} holds {_shown(value)}, no list of messages; repair it.")
        return [self._message(one, f"{where}, message {number}") for number, one in enumerate(value)]

    def _message(self, value: Any, where: str) -> Message:
        if not isinstance(value, dict):
            raise RowError("no message", f"{where} is {_shown(value)}, no object with a role; repair it.")
        role = self._role(value.get(self.name("role")), where)
        message: Message = {"role": role, "content": self._content(value.get(self.name("content")), where)}
        for field in ("name", "tool_call_id"):
            if value.get(field) is not None:
                message[field] = self.as_text(value[field], f"{where}, field {field!r}", f"{field} is no text")
        if role == "assistant":
            message |= self._answer(value, where)
        if not message["content"] and not message.get("tool_calls"):
            raise RowError("empty message", f"{where} of the {role} is empty; write a text, or drop the row.")
        return message

    def _role(self, value: Any, where: str) -> str:
        if isinstance(value, str) and value in self._roles:
            return self._roles[value]
        name, known = self.name("role"), ", ".join(self._roles)
        raise RowError(
            "unknown role",
            f"{where}: {name} {_shown(value)} is unknown (known: {known}); map it, as in fields = "
            f'{{ "role.assistant" = {json.dumps(value)[:40]} }}.',
        )

    def _content(self, value: Any, where: str) -> str:
        name = self.name("content")
        if isinstance(value, list):  # parts; only text can be trained on here
            kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
            if any(kind != "text" for kind in kinds):
                raise RowError("not text", f"{where} has a part of type {kinds!r}; only parts of text are taken.")
            texts = [part.get("text") for part in value]
            value = "".join(texts) if all(isinstance(text, str) for text in texts) else texts
        if value is None:
            return ""
        if not isinstance(value, str):
            raise RowError("content is no text", f"{where}: {name} is {_shown(value)}, no text; repair it.")
        return _whole(value, where)

    def _answer(self, value: dict[str, Any], where: str) -> Message:
        """What only the assistant's messages have."""
        answer: Message = {}
        reasoning = value.get(self.name("reasoning_content"))
        if reasoning:
            at = f"{where}, field {self.name('reasoning_content')!r}"
            answer["reasoning_content"] = self.as_text(reasoning, at, "reasoning is no text")
        calls = _from_json(value.get("tool_calls"))
        if calls:
            if not isinstance(calls, list):
                raise RowError("tool calls", f"{where}: tool_calls holds {_shown(calls)}, no list; repair it.")
            answer["tool_calls"] = [_call(call, f"{where}, tool call {n}") for n, call in enumerate(calls)]
        weight = value.get("weight")
        if weight not in (None, 0, 1):
            raise RowError("weight", f"{where}: weight is {_shown(weight)}; it may be 0 (no loss) or 1.")
        return answer | ({"weight": 0} if weight == 0 else {})


def _call(value: Any, where: str) -> dict[str, Any]:
    """A call as templates take it: arguments as an object, whether the row has an object or its JSON."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RowError("tool calls", f"{where} is {_shown(value)}, no object with a function's name; repair it.")
    arguments = _from_json(function.get("arguments"))
    if not isinstance(arguments, dict):
        raise RowError("tool calls", f"{where}: arguments are {_shown(arguments)}, no object nor its JSON; repair it.")
    _check_strings([name, arguments], where)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call | ({"id": value["id"]} if isinstance(value.get("id"), str) else {})


def _from_json(value: Any) -> Any:
    """The object that a text of JSON stands for; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _check_strings(value: Any, where: str) -> None:
    if isinstance(value, str):
        _whole(value, where)
    elif isinstance(value, dict):
        for key, one in value.items():
            _check_strings(key, where)
            _check_strings(one, where)
    elif isinstance(value, list):
        for one in value:
            _check_strings(one, where)


def _whole(text: str, where: str) -> str:
    """Half of a surrogate pair, as cut JSON has it, cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError("half a character", f"{where} holds half of a surrogate pair; repair the text.") from None
    return text


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
