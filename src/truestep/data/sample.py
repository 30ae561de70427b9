"""The tokenizer of a recipe: raw bytes, one from a file or a model, or a BPE trained on a sample of the data."""

import heapq
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from truestep.data.chat.template import CHATML, CHATML_TOKENS, template_source
from truestep.data.hub import look_up
from truestep.data.shard_work import in_split, text_hash
from truestep.data.sources.registry import open_source, read
from truestep.data.tokenizer import FILES, Tokenizer, bytes_tokenizer, load_tokenizer, train_bpe
from truestep.errors import DataError
from truestep.recipe.data import DataSection, TokenizerSection

_PIECE_CHARACTERS = 4096


def make_tokenizer(
    section: TokenizerSection, data: Iterable[DataSection], cache: Path, start: str | None = None
) -> Tokenizer:
    """The tokenizer that `section` asks for; `data` are the sections to train a BPE on, `cache` a folder for what has
    to be fetched, and `start` the model that the first stage starts from. The same inputs give the same tokenizer."""
    tokenizer = _without_template(section, data, cache, start)
    if section.chat_template is None:
        return tokenizer
    return with_template(tokenizer, section.chat_template)


def with_template(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """The tokenizer with the template that `name` stands for: chatml, or a file of Jinja."""
    missing = [token for token in CHATML_TOKENS if token not in tokenizer.special]
    if name == CHATML and missing:
        raise DataError(
            f"the tokenizer ({tokenizer.origin}) has no special token {missing[0]}, which chatml needs; name it in "
            f"tokenizer.special, or give a file as tokenizer.chat_template."
        )
    return tokenizer.with_chat_template(template_source(name))


def _without_template(
    section: TokenizerSection, data: Iterable[DataSection], cache: Path, start: str | None
) -> Tokenizer:
    if section.kind == "bytes":
        return bytes_tokenizer(section.special)
    if section.kind in ("file", "start"):
        path = section.path if section.kind == "file" else start
        if path is None:
            raise DataError("tokenizer.kind = 'file' needs tokenizer.path: a file, a folder or owner/name@revision.")
        if "@" in path and not Path(path).exists():
            return _of_hub(path, section.eod, cache)
        return load_tokenizer(path, eod=section.eod)
    texts = (text for one in data for text in section_texts(one, cache))
    return train_bpe(even_sample(texts, section.sample), section.vocab_size, section.special)


def _of_hub(name: str, eod: str | None, cache: Path) -> Tokenizer:
    """owner/name@revision; the commit becomes part of the tokenizer's origin."""
    repo, _, revision = name.rpartition("@")
    found = look_up(repo, revision, "model", cache)
    wanted = [file for file in found.files if file.name in FILES]
    if FILES[0] not in (file.name for file in wanted):
        raise DataError(f"hub repository {repo}@{found.commit} has no {FILES[0]}; name another repository.")
    with ExitStack() as stack:
        paths = [stack.enter_context(file.here()) for file in wanted]
        return load_tokenizer(paths[0].parent, eod=eod, origin=f"{repo}@{found.commit}")


def section_texts(section: DataSection, cache: Path) -> Iterator[str]:
    """The texts of a section's split."""
    for document in read(open_source(section, cache)):
        if document.text is None:
            raise DataError(f"{document.origin}: is tokenised already, so no tokenizer can be trained on it; use text.")
        if in_split(text_hash(document.text.encode("utf-8", "surrogatepass")), section.split, section.holdout):
            yield document.text


def even_sample(texts: Iterable[str], sample_bytes: int) -> list[str]:
    """About `sample_bytes` bytes of text, evenly from all of it: texts are cut in pieces of 4,096 characters, and those
    with the smallest hashes are kept. So every piece has the same chance, whatever the order of the texts, and only the
    sample is held in memory."""
    kept: list[tuple[int, int, str]] = []  # a heap with the largest hash on top
    size = 0
    for text in texts:
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            data = piece.encode("utf-8", "surrogatepass")
            heapq.heappush(kept, (-text_hash(data), len(data), piece))
            size += len(data)
            while size > sample_bytes and len(kept) > 1:
                size -= heapq.heappop(kept)[1]
    return [piece for _, _, piece in sorted(kept, reverse=True)]
