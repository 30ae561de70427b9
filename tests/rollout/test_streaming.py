"""Text that comes token by token is the text of all tokens, and never half a character."""

import numpy as np
import pytest

from truestep.data.tokenizer import bytes_tokenizer, train_bpe
from truestep.rollout.streaming import TextStream

TEXT = "naïve café 🙂🙂 日本語 done"


def stream(codec, ids) -> list[str]:
    text = TextStream(codec)
    return [*(text.add(int(id)) for id in ids), text.rest()]


@pytest.mark.parametrize("codec", [bytes_tokenizer(), train_bpe([TEXT * 3], 270)], ids=["bytes", "bpe"])
def test_pieces_are_whole_characters(codec):
    pieces = stream(codec, codec.encode(TEXT))
    assert "".join(pieces) == TEXT and "\ufffd" not in "".join(pieces) and pieces[-1] == ""
    assert pieces[2:4] == ["", "ï"] if codec.eod_id == 256 else len(pieces) > 5


def test_what_never_becomes_a_character_is_told_at_the_end_or_before_the_next_one():
    codec = bytes_tokenizer()
    assert stream(codec, [97, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]
    assert stream(codec, [97, 0xF0, 98]) == ["a", "", "\ufffdb", ""]


def test_any_ids_give_what_they_decode_to_together():
    codec = bytes_tokenizer()
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = random.integers(0, 257, 40)
        assert "".join(stream(codec, ids)) == codec.decode(ids)


class Joined:
    """A decoder that drops the space before the first word, as SentencePiece's do."""

    eod_id = 0
    words = ("", "▁the", "▁cat", "s")

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids) -> str:
        return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")


def test_spaces_between_words_stay():
    assert stream(Joined(), [1, 2, 3, 1]) == ["the", " cat", "s", " the", ""]
