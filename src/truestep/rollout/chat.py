"""A conversation with a model, through a chat template."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from truestep.data.chat.chat import Chat as ChatFormat
from truestep.errors import ModelError
from truestep.rollout.directory import Opened, open_model, template_of
from truestep.rollout.generate import stream_ids
from truestep.rollout.streaming import TextStream


class Template(Protocol):
    """What a conversation needs of a chat template."""

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """The ids of a conversation, and of what begins an answer."""
        ...


class Chat:
    """`messages` is the conversation so far. An answer depends on (seed, the conversation) only."""

    def __init__(
        self,
        opened: Opened,
        template: Template,
        system: str | None = None,
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.7,
        top_p: float = 0.95,
        seed: int = 0,
    ):
        self._opened, self._template = opened, template
        self._max_new_tokens, self._temperature, self._top_p, self._seed = max_new_tokens, temperature, top_p, seed
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Begin anew, with instructions to the model or without."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, message: str) -> str:
        """The answer to a message."""
        return "".join(self.stream(message))

    def stream(self, message: str) -> Generator[str, None, None]:
        """The answer as it comes. Of an answer that nobody hears to its end, what was said stays in the conversation.

        ModelError where the conversation leaves no room for an answer, or the template refuses it; it is then what it
        was before."""
        asked = [*self.messages, {"role": "user", "content": message}]
        prompt = list(self._template.prompt_ids(asked))
        room = self._opened.model.section.max_context - len(prompt)
        if room < 1:
            raise ModelError(
                f"the conversation has {len(prompt)} tokens, but the model takes {len(prompt) + room}; begin anew "
                f"(/reset), or say less."
            )
        said: list[str] = []
        try:
            for piece in self._answer(prompt, min(room, self._max_new_tokens)):
                said.append(piece)
                yield piece
        finally:
            self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _answer(self, prompt: list[int], length: int) -> Iterator[str]:
        opened, text = self._opened, TextStream(self._opened.tokenizer)
        seed = self._seed + len(self.messages)  # the same question draws anew
        for id in stream_ids(opened.model, prompt, length, opened.stop_ids, self._temperature, self._top_p, seed):
            if piece := text.add(id):
                yield piece
        if piece := text.rest():
            yield piece


@dataclass(frozen=True)
class OwnTemplate:
    """The template that lies beside a model."""

    chat: ChatFormat

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        plain = [dict(message) for message in messages]
        return self.chat.conversation(plain).prompt(len(plain)).tolist()


def open_chat(
    directory: Path,
    system: str | None = None,
    *,
    adapter: Path | None = None,
    own_module: str | None = None,
    device: str = "auto",
    **options: Any,
) -> Chat:
    """Load a model directory, and an adapter for it if one is named. Options: max_new_tokens, temperature, top_p,
    seed. DataError where the model has no chat template."""
    opened = open_model(directory, adapter, own_module=own_module, device=device)
    return Chat(opened, OwnTemplate(template_of(opened.tokenizer)), system, **options)
