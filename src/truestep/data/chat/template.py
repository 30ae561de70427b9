"""Chat templates: the tokenizer's Jinja template, rendered as Hugging Face's `apply_chat_template` renders it.

Templates come from elsewhere and are programs, so they run in Jinja's sandbox and see nothing but what they are given.
The day that a template takes for today is an argument: text that is built twice must be the same text.
"""

import json
import re
from collections.abc import Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from truestep.data.chat.units import RowError
from truestep.errors import DataError

CHATML = "chatml"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_OPEN, _CLOSE = "\ufddd", "\ufdde"  # code points that are no characters, so no text has them
_MARK = re.compile(f"([{_OPEN}{_CLOSE}])")
Messages = Sequence[dict[str, Any]]


class ChatTemplate:
    """`source` is Jinja; `variables` are what every rendering sees (bos_token, ..., and values of the recipe's)."""

    def __init__(self, source: str, variables: dict[str, Any], today: date):
        self.source, self._variables, self._today = source, variables, today
        self._template = self._compiled(marking=False)

    def render(self, messages: Messages, tools: list[Any] | None = None, *, generation_prompt: bool = False) -> str:
        """The text of a conversation. RowError with the template's own words where it refuses or fails."""
        return self._rendered(self._template, messages, tools, generation_prompt)

    @cached_property
    def has_marks(self) -> bool:
        """Whether the template says itself, with {% generation %}, what the assistant makes."""
        return any(word in self.source for word in ("{% generation", "{%- generation", "{%+ generation"))

    def marked(self, messages: Messages, tools: list[Any] | None, text: str) -> list[tuple[int, int]]:
        """The characters [start, stop) of `text`, which is `render` of the same, that lie between the template's
        {% generation %} marks."""
        spans, starts, at, plain = [], [], 0, []
        for piece in _MARK.split(self._rendered(self._marking, messages, tools, False)):
            if piece == _OPEN:
                starts.append(at)
            elif piece == _CLOSE:
                spans.append((starts.pop(), at))
            else:
                plain.append(piece)
                at += len(piece)
        if "".join(plain) != text:
            raise DataError(
                "the chat template changes the text between its {% generation %} marks, so that they cannot be placed; "
                "take the marks out of it."
            )
        return spans

    @cached_property
    def _marking(self) -> jinja2.Template:
        return self._compiled(marking=True)

    def _compiled(self, marking: bool) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Marking if marking else _Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self._today.strftime
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is no Jinja: line {error.lineno}: {error.message}; correct it, or set "
                f"tokenizer.chat_template."
            ) from error

    def _rendered(
        self, template: jinja2.Template, messages: Messages, tools: list[Any] | None, generation_prompt: bool
    ) -> str:
        try:
            return template.render(
                **self._variables, messages=messages, tools=tools, add_generation_prompt=generation_prompt
            )
        except jinja2.TemplateError as error:
            raise RowError("template", f"the chat template refuses it: {_line(error)}; change the row.") from error
        except Exception as error:  # a template is a program of somebody else's, and may fail in any way
            said = f"{type(error).__name__}: {_line(error)}"
            raise RowError("template", f"the chat template fails on it ({said}); change the row.") from error


def template_source(name: str) -> str:
    """The text of a template that a recipe names: chatml, or a file."""
    path = Path(__file__).with_name("chatml.jinja") if name == CHATML else Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer.chat_template {name} cannot be read: {error}; write chatml, or a file.") from error


class _Generation(jinja2.ext.Extension):
    """{% generation %}: what is inside."""

    tags = {"generation"}  # noqa: RUF012  the attribute is Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> str:
        return caller()


class _Marking(_Generation):
    """{% generation %}: what is inside, between two code points."""

    def _inside(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which text for a model must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
