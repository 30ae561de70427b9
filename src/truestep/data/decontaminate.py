"""Drop documents that share a run of n words (13 by default) with evaluation text.

The runs cross line ends: a text of 20 words broken over two lines of 10 has eight 13-grams, not none.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from truestep.data.ngrams import ngram_hashes, word_hashes
from truestep.data.sources.inputs import Inputs
from truestep.data.sources.jsonl import JsonlSource
from truestep.data.sources.text import TextSource
from truestep.errors import DataError
from truestep.recipe.data import Decontaminate

_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")


@dataclass(frozen=True)
class EvaluationRuns:
    """The runs of words of all evaluation texts, sorted. `num_short` texts have fewer than n words: they are not
    protected, and the report says so."""

    runs: np.ndarray
    n: int
    num_texts: int = 0
    num_short: int = 0

    def touch(self, text: str) -> bool:
        """Whether the text holds any of the runs."""
        found = ngram_hashes(word_hashes(text), self.n)
        places = np.searchsorted(self.runs, found)
        return bool((self.runs[np.minimum(places, len(self.runs) - 1)] == found).any())


def runs_of_texts(texts: list[str], n: int) -> EvaluationRuns:
    """The distinct runs of n words of the texts."""
    runs = [ngram_hashes(word_hashes(text), n) for text in texts]
    short = sum(not len(r) for r in runs)
    return EvaluationRuns(np.unique(np.concatenate(runs)) if runs else np.empty(0, np.uint64), n, len(texts), short)


def evaluation_runs(section: Decontaminate, storage_options: dict[str, str], cache: Path) -> EvaluationRuns:
    """Read the evaluation texts: each row of JSON Lines files, each other file as a whole.
    DataError if none of them is long enough to be found again."""
    texts = []
    for path in section.against:
        inputs = Inputs((path,), storage_options, cache)
        lines = path.endswith(_JSON_LINES)
        source = JsonlSource(inputs, section.text_field) if lines else TextSource(inputs)
        texts += [d.text for shard in source.shards() for d in shard.documents() if d.text is not None]
    found = runs_of_texts(texts, section.ngram)
    if not len(found.runs):
        raise DataError(
            f"decontaminate.against = {section.against}: no text has as many as {section.ngram} words, so nothing "
            f"could ever match; give longer texts or lower decontaminate.ngram."
        )
    return found
