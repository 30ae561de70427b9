"""From a data section to a store of tokens or samples: shards in parallel, then one merge in the order of the shards.

Work in progress lies in `<store>.building/`: one small store a shard, published whole and verified when found again, so
a build that was killed goes on with the shards it lacks. The result depends on the inputs alone, not on the number of
processes or restarts. An error in the input removes the work.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from truestep.data.blocks import HEADER, digest
from truestep.data.decontaminate import EvaluationRuns, evaluation_runs
from truestep.data.merge import merge
from truestep.data.parts import open_part
from truestep.data.processes import in_processes
from truestep.data.sample_store import Store, open_store
from truestep.data.shard_work import Job, do_shard, is_finished
from truestep.data.sources.base import Shard, ShardedSource
from truestep.data.sources.registry import open_source
from truestep.data.tokenizer import Tokenizer
from truestep.errors import DataError, UserError
from truestep.files import canonical, writing
from truestep.recipe.data import DataSection


@dataclass(frozen=True)
class Progress:
    """How far a build is: shards and, where file sizes are known, bytes."""

    shards_done: int
    shards: int
    bytes_done: int
    bytes: int


Report = Callable[[Progress], None]


def build(
    section: DataSection,
    tokenizer: Tokenizer,
    out_dir: str | Path,
    *,
    workers: int = 1,
    progress: Report | None = None,
    cache: str | Path | None = None,
) -> Store:
    """Build the store of a section in `out_dir`, with the tokenizer in `out_dir/tokenizer`. A finished store of the
    same section, inputs and tokenizer is opened instead. `cache` is where remote inputs are kept, by default
    `cache` beside `out_dir`. The header's report counts documents, bytes and tokens in, dropped by reason, and out.
    DataError or StorageError in one sentence, with nothing left behind."""
    folder = Path(out_dir)
    _check(section)
    kept = Path(cache) if cache is not None else folder.parent / "cache"
    source = open_source(section, kept)
    shards = source.shards()
    runs = (
        evaluation_runs(section.decontaminate, dict(section.storage_options), kept) if section.decontaminate else None
    )
    job = _job(section, tokenizer, folder.with_name(folder.name + ".building"), runs)
    inputs = digest(canonical([[[s.name, s.size] for s in shards], job.runs_digest]))
    built = open_built(folder, section, tokenizer)
    if built is not None:
        if built.header["report"]["inputs"] != inputs:
            raise DataError(f"{folder}: was built from other input files; remove it or choose another folder.")
        return built
    with _working(job.folder, folder):
        _save_for_processes(job, tokenizer, runs)
        _do_shards(job, shards, workers, progress)
        facts = _facts(section, tokenizer, source, runs)
        facts |= {"request": _request(section, tokenizer), "inputs": inputs}
        parts = [open_part(job.part(number)) for number in range(len(shards))]
        return merge(folder, parts, tokenizer, section, facts)


def open_built(out_dir: str | Path, section: DataSection, tokenizer: Tokenizer) -> Store | None:
    """The finished store in `out_dir`, without a look at the inputs; None if there is none. DataError if the one there
    was built from another section or with another tokenizer."""
    if not (Path(out_dir) / HEADER).exists():
        return None
    store = open_store(out_dir)
    if store.header["report"].get("request") != _request(section, tokenizer):
        raise DataError(
            f"{out_dir}: holds a token store of another data section or tokenizer; remove it or choose another folder."
        )
    return store


def _request(section: DataSection, tokenizer: Tokenizer) -> str:
    """A digest of all that decides the store's content, but for the input files themselves and how they are reached."""
    decides = section.model_dump(mode="json", exclude={"path", "storage_options", "packing", "too_long"})
    return digest(canonical([decides, tokenizer.fingerprint]))


def _check(section: DataSection) -> None:
    if section.split == "heldout" and section.holdout == 0:
        raise DataError("split = 'heldout' with holdout = 0 is always empty; set holdout to the share to hold out.")


@contextmanager
def _working(work: Path, folder: Path) -> Iterator[None]:
    """Make and lock the folder for unfinished work on the store in `folder`. Success or an error in the input removes
    it; an interruption keeps it."""
    with writing(folder):
        made = [p for p in (folder.parent, *folder.parent.parents) if not p.exists()]
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work / "lock", os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another process is building it; wait, or choose another folder.") from None
        try:
            yield
        except UserError:
            shutil.rmtree(work)
            for parent in made:
                if parent.exists() and not any(parent.iterdir()):
                    parent.rmdir()
            raise
        shutil.rmtree(work)
    finally:
        os.close(lock)


def _save_for_processes(job: Job, tokenizer: Tokenizer, runs: EvaluationRuns | None) -> None:
    tokenizer.save(job.tokenizer)
    if runs is not None and job.runs is not None:
        with writing(job.runs):
            np.save(job.runs, runs.runs, allow_pickle=False)


def _job(section: DataSection, tokenizer: Tokenizer, work: Path, runs: EvaluationRuns | None) -> Job:
    return Job(
        folder=work,
        tokenizer=work / "tokenizer",
        fingerprint=tokenizer.fingerprint,
        split=section.split,
        holdout=section.holdout,
        runs=None if runs is None else work / "runs.npy",
        runs_digest="" if runs is None else digest(runs.runs.tobytes()),
        ngram=0 if runs is None else runs.n,
        near=section.dedup == "near",
        section=section,
    )


def _do_shards(job: Job, shards: list[Shard], workers: int, progress: Report | None) -> None:
    missing = [(job, n, shard) for n, shard in enumerate(shards) if not is_finished(job, n, shard)]
    total = sum(shard.size for shard in shards)
    done = total - sum(shard.size for _, _, shard in missing)
    for count, number in enumerate(in_processes(do_shard, missing, workers), len(shards) - len(missing) + 1):
        done += shards[number].size
        if progress is not None:
            progress(Progress(count, len(shards), done, total))


def _facts(
    section: DataSection, tokenizer: Tokenizer, source: ShardedSource, runs: EvaluationRuns | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "section": section.model_dump(mode="json", exclude={"storage_options"}),
        "source": source.notes,
        "tokenizer": {"origin": tokenizer.origin, "fingerprint": tokenizer.fingerprint, "eod": tokenizer.eod},
    }
    if runs is not None:
        facts["evaluation_texts"] = {"texts": runs.num_texts, "too_short": runs.num_short, "runs": len(runs.runs)}
    return facts
