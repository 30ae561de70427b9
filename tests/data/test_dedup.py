"""Copies, near-copies and evaluation text: what is dropped is right, and counted."""

import json
import random

import numpy as np
import pytest

from truestep.data.build import build
from truestep.data.decontaminate import runs_of_texts
from truestep.data.dedup import exact_copies, jaccard, near_copies, rows_per_band, shingles, signature
from truestep.data.ngrams import ngram_hashes, word_hashes
from truestep.data.tokenizer import bytes_tokenizer
from truestep.errors import DataError
from truestep.recipe.data import DataSection, Decontaminate

WORDS = [f"w{i}" for i in range(2000)]


def near(texts: list[str], threshold: float) -> list[int]:
    sets = [shingles(text) for text in texts]
    signatures = np.array([signature(s) for s in sets])
    return np.flatnonzero(near_copies(signatures, sets.__getitem__, np.ones(len(texts), bool), threshold)).tolist()


def naive(texts: list[str], threshold: float) -> list[int]:
    """All pairs, sets of words spelled out."""
    sets = []
    for text in texts:
        words = text.casefold().split()
        n = min(5, len(words))
        sets.append({tuple(words[i : i + n]) for i in range(len(words) - n + 1)})
    kept: list[int] = []
    for i, one in enumerate(sets):
        if not any(len(one & sets[j]) / len(one | sets[j]) >= threshold for j in kept):
            kept.append(i)
    return [i for i in range(len(texts)) if i not in kept]


def test_exact_copies_are_later_ones():
    hashes = np.array([[1, 2], [1, 3], [1, 2], [0, 2], [1, 2]], dtype=np.uint64)
    assert exact_copies(hashes).tolist() == [False, False, True, False, True]
    assert exact_copies(np.empty((0, 2), np.uint64)).tolist() == []


def edited(rng: random.Random, words: list[str], share: float) -> str:
    return " ".join(rng.choice(WORDS) if rng.random() < share else word for word in words)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_near_copies_are_those_of_the_naive_comparison(threshold):
    rng = random.Random(1)
    texts = []
    for _ in range(30):
        words = rng.choices(WORDS, k=rng.randint(1, 300))
        texts += [" ".join(words), edited(rng, words, 0.01), edited(rng, words, 0.05), " \n".join(words).upper()]
    rng.shuffle(texts)
    assert near(texts, threshold) == naive(texts, threshold)


def test_a_copy_of_a_dropped_document_is_judged_by_what_is_kept():
    words = WORDS[:104]
    chain = [" ".join(words[start : start + 60]) for start in (0, 8, 16)]  # neighbours alike, the ends less so
    sets = [shingles(text) for text in chain]
    assert jaccard(sets[0], sets[1]) > 0.7 > jaccard(sets[0], sets[2])
    assert near(chain, 0.7) == naive(chain, 0.7) == [1]


def test_minhash_estimates_jaccard_and_bands_catch_it():
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(50):
        shared, a, b = rng.integers(0, 2**63, (3, 300), dtype=np.uint64)
        one, two = np.unique(np.concatenate([shared, a[:60]])), np.unique(np.concatenate([shared, b[:60]]))
        errors.append((signature(one) == signature(two)).mean() - jaccard(one, two))
    assert abs(np.mean(errors)) < 0.02 and np.std(errors) < 0.06
    for threshold in (0.3, 0.5, 0.8, 0.9, 1.0):
        rows = rows_per_band(threshold)
        assert (1 - threshold**rows) ** (128 // rows) <= 0.01


def test_ngrams_see_order_and_ignore_how_words_are_spaced():
    hashes = word_hashes("A b\tc\n d ")
    assert hashes.tolist() == word_hashes("a B c d").tolist() and len(hashes) == 4
    runs = ngram_hashes(word_hashes("a b c a b d"), 2)
    assert len(runs) == 5 and runs[0] == runs[3] and len(set(runs.tolist())) == 4
    assert ngram_hashes(word_hashes("a b"), 2) != ngram_hashes(word_hashes("b a"), 2)
    assert len(ngram_hashes(word_hashes("a b"), 3)) == 0


def test_an_evaluation_text_broken_over_lines_is_found():
    """marin 6852: a 20-word text over two lines of 10 words escaped a 13-gram test made line by line."""
    words = WORDS[:20]
    evaluation = " ".join(words[:10]) + "\n" + " ".join(words[10:])
    runs = runs_of_texts([evaluation], 13)
    assert len(runs.runs) == 8
    found = ngram_hashes(word_hashes(" ".join(words)), 13)
    assert np.isin(found, runs.runs).sum() == 8  # 8 of 8
    assert runs.touch("before " + " ".join(words[4:17]) + " after")
    assert not runs.touch(" ".join(words[4:16]))


def corpus(tmp_path, texts: list[str]) -> dict:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return {"source": "jsonl", "path": str(tmp_path / "c.jsonl")}


def kept(store) -> list[str]:
    return [bytes(store.document(i)[:-1].astype(np.uint8)).decode() for i in range(store.num_documents)]


def dropped(store) -> dict[str, tuple[int, int, int]]:
    amounts = store.header["report"]["dropped"].items()
    return {reason: (amount["documents"], amount["bytes"], amount["tokens"]) for reason, amount in amounts}


@pytest.mark.parametrize("workers", [1, 2])
def test_drops_are_counted_by_reason_and_add_up(tmp_path, workers):
    long = " ".join(WORDS[:100])
    texts = [long, "", "short", long + " more", "short", long, "leaked " + " ".join(WORDS[500:513]), "end"]
    (tmp_path / "eval.txt").write_text("\n".join(WORDS[495:520]))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"q": "too short"}) + "\n")
    against = Decontaminate(against=[str(tmp_path / "eval.txt"), str(tmp_path / "eval.jsonl")], text_field="q")
    section = DataSection(**corpus(tmp_path, texts), dedup="near", decontaminate=against)
    store = build(section, bytes_tokenizer(), tmp_path / "s", workers=workers)
    assert kept(store) == [long, "short", "end"]
    size = len(long)
    leaked = len(texts[6])
    assert dropped(store) == {
        "empty": (1, 0, 0),
        "contaminated": (1, leaked, leaked + 1),
        "exact_duplicate": (2, 5 + size, 6 + size + 1),
        "near_duplicate": (1, size + 5, size + 6),
    }
    report = store.header["report"]
    assert report["in"] == {"documents": 8, "bytes": sum(map(len, texts)), "tokens": sum(map(len, texts)) + 7}
    assert report["out"]["tokens"] == store.num_tokens == size + 1 + 6 + 4
    assert report["evaluation_texts"] == {"texts": 2, "too_short": 1, "runs": 13}


def test_dedup_off_keeps_copies(tmp_path):
    store = build(DataSection(**corpus(tmp_path, ["a", "a"])), bytes_tokenizer(), tmp_path / "s")
    assert kept(store) == ["a", "a"] and store.header["report"]["dropped"]["empty"]["documents"] == 0


def test_evaluation_texts_that_protect_nothing_are_refused(tmp_path):
    (tmp_path / "eval.txt").write_text("only a few words")
    section = DataSection(**corpus(tmp_path, ["a"]), decontaminate=Decontaminate(against=[str(tmp_path / "eval.txt")]))
    with pytest.raises(DataError, match="no text has as many as 13 words"):
        build(section, bytes_tokenizer(), tmp_path / "s")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "eval.txt"]
