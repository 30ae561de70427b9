"""The shards of a build become one store: copies are dropped, and what came in is held against what went out."""

import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from truestep.data.dedup import NUM_HASHES, SHINGLE_WORDS, exact_copies, near_copies, rows_per_band
from truestep.data.parts import SENTENCES, Amount, Part, joined, writer_of
from truestep.data.sample_store import SampleWriter, Store
from truestep.data.store import StoreWriter
from truestep.data.tokenizer import Tokenizer
from truestep.errors import DataError
from truestep.recipe.data import DataSection

_APPEND_DOCUMENTS = 4096


def merge(folder: Path, parts: list[Part], tokenizer: Tokenizer, section: DataSection, facts: dict[str, Any]) -> Store:
    """Write the documents of `parts` in order to a store at `folder`. `facts` goes into the report with the counts.
    DataError if no document is left, or if more rows were refused than may be."""
    documents = joined(parts)
    copies = _copies(parts, documents, section)
    counts = _counts(parts, documents, copies)
    _check_refused(parts, counts, section)
    keep = ~np.logical_or.reduce([np.zeros(len(documents), dtype=bool), *copies.values()])
    if not keep.any():
        raise DataError(f"{section.path or section.source}: the corpus is empty: no document is left {_sums(counts)}.")
    try:
        with writer_of(section, folder, tokenizer) as writer:
            first = 0
            for part in parts:
                _append(writer, part, keep[first : first + len(part.documents)])
                first += len(part.documents)
            out = Amount(writer.num_documents, writer.num_bytes, writer.num_tokens)
            report = _report(counts, out) | facts
            report |= _lossiness(documents[keep]) if section.format == "text" else _refusals(parts)
            if section.dedup == "near":
                report["near"] = _near_facts(section.near_threshold)
            tokenizer.save(folder / "tokenizer")
            return writer.finish(report)
    except BaseException:
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _copies(parts: list[Part], documents: np.ndarray, section: DataSection) -> dict[str, np.ndarray]:
    """For each reason, which documents it drops; no document for two reasons."""
    if section.dedup == "none" or not len(documents):
        return {}
    copies = {"exact_duplicate": exact_copies(documents["hash"])}
    if section.dedup == "near":
        starts = np.cumsum([0, *(len(part.documents) for part in parts)])

        def shingles(document: int) -> np.ndarray:
            part = int(np.searchsorted(starts, document, side="right")) - 1
            return parts[part].shingles(document - int(starts[part]))

        signatures = np.concatenate([part.signatures() for part in parts])
        alive = ~copies["exact_duplicate"] & (documents["num_shingles"] > 0)
        copies["near_duplicate"] = near_copies(signatures, shingles, alive, section.near_threshold)
    return copies


def _append(writer: StoreWriter | SampleWriter, part: Part, keep: np.ndarray) -> None:
    store: Any = part.store()  # of the kind that the writer writes, since both are of one section
    if keep.all():
        writer.append_store(store)
        return
    kept = np.flatnonzero(keep)
    for start in range(0, len(kept), _APPEND_DOCUMENTS):
        chosen = kept[start : start + _APPEND_DOCUMENTS]
        documents = [store.document(document) for document in chosen.tolist()]
        writer.append_many(documents, int(part.documents["num_bytes"][chosen].sum()))


def _check_refused(parts: list[Part], counts: dict[str, Amount], section: DataSection) -> None:
    refused, came = counts.get("refused", Amount()).documents, counts.get("in", Amount()).documents
    if refused > section.max_refused * came:
        first = next(sentence for part in parts for sentence in part.refused.sentences)
        raise DataError(
            f"{first} ({refused:,} of {came:,} rows are refused, more than max_refused = {section.max_refused:g}; "
            f"repair them, or raise it)"
        )


def _refusals(parts: list[Part]) -> dict[str, Any]:
    reasons: Counter[str] = Counter()
    for part in parts:
        reasons.update(part.refused.reasons)
    sentences = [sentence for part in parts for sentence in part.refused.sentences]
    return {"refused": sentences[:SENTENCES], "refused_by_reason": dict(sorted(reasons.items()))}


def _counts(parts: list[Part], documents: np.ndarray, copies: dict[str, np.ndarray]) -> dict[str, Amount]:
    """Amounts by reason, over all parts."""
    counts: dict[str, Amount] = {}
    for part in parts:
        for reason, amount in part.counts.items():
            counts.setdefault(reason, Amount()).add(amount.documents, amount.bytes, amount.tokens)
    for reason, dropped in copies.items():
        of = documents[dropped]
        counts[reason] = Amount(len(of), int(of["num_bytes"].sum()), int(of["num_tokens"].sum()))
    return counts


def _report(counts: dict[str, Amount], out: Amount) -> dict[str, Any]:
    """What came in, was dropped by reason, and went out. RuntimeError if that does not add up: then documents were lost
    or doubled on the way, and the store must not be used."""
    came = counts["in"]
    others = {reason: amount for reason, amount in counts.items() if reason != "in"}
    for unit in ("documents", "bytes", "tokens"):
        accounted = getattr(out, unit) + sum(getattr(amount, unit) for amount in others.values())
        if getattr(came, unit) != accounted:
            raise RuntimeError(f"{getattr(came, unit)} {unit} came in, but {accounted} are accounted for")
    other_split = others.pop("other_split")
    return {
        "in": asdict(came),
        "other_split": {"documents": other_split.documents, "bytes": other_split.bytes},
        "dropped": {reason: asdict(amount) for reason, amount in others.items()},
        "out": asdict(out),
    }


def _lossiness(documents: np.ndarray) -> dict[str, Any]:
    """Where the ids of a text do not stand for as many bytes as it has (a normalizer, an added space, unknown words):
    bits per byte must be counted with the text's bytes."""
    differ = documents["num_bytes"] != documents["bytes_by_ids"]
    return {"bytes_by_ids": int(documents["bytes_by_ids"].sum()), "documents_not_lossless": int(differ.sum())}


def _near_facts(threshold: float) -> dict[str, Any]:
    rows = rows_per_band(threshold)
    return {
        "threshold": threshold,
        "shingle_words": SHINGLE_WORDS,
        "hashes": NUM_HASHES,
        "rows_per_band": rows,
        "bands": NUM_HASHES // rows,
        "decided_by": "exact Jaccard similarity of the shingle sets",
    }


def _sums(counts: dict[str, Amount]) -> str:
    if not counts:
        return "(0 came in)"
    parts = [f"{amount.documents} {reason.replace('_', ' ')}" for reason, amount in counts.items() if reason != "in"]
    return f"({counts['in'].documents} came in; {', '.join(parts)}); check the path and the filters"
