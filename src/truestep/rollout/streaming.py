"""Ids to text while they come."""

from truestep.rollout.generate import Codec


class TextStream:
    """Text of ids one by one. A character whose bytes are not all there yet waits for them."""

    def __init__(self, codec: Codec):
        self._codec = codec
        self._ids: list[int] = []
        self._from, self._told = 0, 0  # text of ids [_from, _told) was given the last time: what follows joins it

    def add(self, id: int) -> str:
        """The text that is complete with this id; empty where none is."""
        self._ids.append(id)
        text = self._new()
        if text.endswith("\ufffd"):
            return ""
        self._from, self._told = self._told, len(self._ids)
        return text

    def rest(self) -> str:
        """What still waits, in replacement characters."""
        return self._new()

    def _new(self) -> str:
        before = self._codec.decode(self._ids[self._from : self._told])
        return self._codec.decode(self._ids[self._from :])[len(before) :]
