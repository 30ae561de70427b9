"""The build of samples: the same store whatever the workers and kills; rows that are refused, copies, splits and
contaminated rows are counted, and what comes in goes out or is counted (C01)."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.data.sample_fakes import ROWS
from tests.data.test_build import content
from truestep.data import build as build_module
from truestep.data.build import build, open_built
from truestep.data.packing import IGNORE
from truestep.data.sample_packing import SamplePacking, Supervision
from truestep.data.sample_store import SampleStore
from truestep.data.tokenizer import bytes_tokenizer
from truestep.errors import DataError
from truestep.recipe.data import DataSection

BYTES = bytes_tokenizer()


def row(number: int) -> dict[str, str]:
    return {"prompt": f"what is {number} and {number * 7}? ", "completion": f"it is {number * 8}"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Five files of eight rows; the last one of each is the same."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for file in range(5):
        rows = [*(row(file * 8 + n) for n in range(7)), row(999)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


def section(corpus: Path, **changes) -> DataSection:
    return DataSection(source=ROWS, path=str(corpus), **({"format": "prompt-completion"} | changes))


def build_samples(given: DataSection, out: Path, workers: int = 1) -> SampleStore:
    store = build(given, BYTES, out, workers=workers)
    assert isinstance(store, SampleStore)
    return store


def texts(store: SampleStore) -> list[str]:
    return [BYTES.decode(unit[0].ids) for n in range(store.num_documents) for unit in store.document(n)]


def whole(one: dict[str, str]) -> str:
    return f"{one['prompt']}{one['completion']}<|endoftext|>"


def test_the_store_is_the_same_with_any_number_of_workers(corpus: Path, tmp_path: Path):
    one, three = (build_samples(section(corpus, dedup="exact"), tmp_path / f"s{n}", n) for n in (1, 3))
    assert content(tmp_path / "s1") == content(tmp_path / "s3")
    three.verify()
    numbers = [file * 8 + n for file in range(5) for n in range(7)]
    assert texts(one) == [whole(row(number)) for number in [*numbers[:7], 999, *numbers[7:]]]
    assert open_built(tmp_path / "s1", section(corpus, dedup="exact"), BYTES) is not None


def test_c01_every_target_comes_out_or_is_counted(corpus: Path, tmp_path: Path):
    """Of all rows of the source, the bytes of every completion and its end are trained on once in a pass."""
    store = build_samples(section(corpus), tmp_path / "s")
    report = store.header["report"]
    assert report["in"]["documents"] == 40 == report["out"]["documents"] and not any(
        amount["documents"] for amount in report["dropped"].values()
    )
    packing = SamplePacking(store, 64, "refuse", Supervision())
    labels = packing.rows(np.arange(packing.num_rows)).labels_BT
    said = sorted(BYTES.decode(labels[labels != IGNORE]).split("<|endoftext|>")[:-1])
    rows = [row(999 if n == 7 else f * 8 + n) for f in range(5) for n in range(8)]
    assert len(said) == 40 and "".join(sorted("".join(said))) == "".join(sorted("".join(r["completion"] for r in rows)))
    assert packing.report["targets"] == sum(len(r["completion"]) + 1 for r in rows)


def test_copies_are_told_by_the_text_of_the_row(corpus: Path, tmp_path: Path):
    (corpus / "9.jsonl").write_text(json.dumps(row(0) | {"source": "elsewhere"}) + "\n")  # another field, the same text
    store = build_samples(section(corpus, dedup="exact"), tmp_path / "s")
    assert store.header["report"]["dropped"]["exact_duplicate"]["documents"] == 5
    assert len(texts(store)) == len(set(texts(store))) == 36


def test_splits_share_no_row_and_lose_none(corpus: Path, tmp_path: Path):
    parts = {
        split: texts(build_samples(section(corpus, split=split, holdout=0.3), tmp_path / split))
        for split in ("train", "heldout")
    }
    assert not set(parts["train"]) & set(parts["heldout"]) and all(parts.values())
    assert sorted(parts["train"] + parts["heldout"]) == sorted(texts(build_samples(section(corpus), tmp_path / "all")))


def test_rows_that_overlap_evaluation_texts_are_left_out(corpus: Path, tmp_path: Path):
    (tmp_path / "test.txt").write_text("what is 3 and 21? it is 24")
    against = {"against": [str(tmp_path / "test.txt")], "ngram": 6}
    store = build_samples(section(corpus, decontaminate=against), tmp_path / "s")
    assert store.header["report"]["dropped"]["contaminated"]["documents"] == 1
    assert whole(row(3)) not in texts(store) and len(texts(store)) == 39


def test_near_copies_are_left_out(tmp_path: Path):
    prompt = " ".join(f"word{n}" for n in range(15))
    rows = [{"prompt": prompt, "completion": end} for end in (" end", " end!", " quite another ending of it")]
    (tmp_path / "rows").write_text("".join(json.dumps(one) + "\n" for one in rows))
    store = build_samples(section(tmp_path / "rows", dedup="near", near_threshold=0.7), tmp_path / "s")
    assert store.header["report"]["dropped"]["near_duplicate"]["documents"] == 1 and len(texts(store)) == 2


def spoil(corpus: Path, count: int) -> None:
    """As many rows without text, from the second line of the second file on."""
    lines = (corpus / "1.jsonl").read_text().splitlines()
    for number in range(1, 1 + count):
        lines[number] = json.dumps({"prompt": "p", "completion": None})
    (corpus / "1.jsonl").write_text("\n".join(lines) + "\n")


def test_a_bad_row_ends_the_build_by_file_row_and_field(corpus: Path, tmp_path: Path):
    spoil(corpus, 1)
    with pytest.raises(DataError, match=r"^1.jsonl, line 2: .*completion.*"):
        build_samples(section(corpus), tmp_path / "s", workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


def test_refused_rows_are_counted_and_told_up_to_a_share(corpus: Path, tmp_path: Path):
    spoil(corpus, 2)
    store = build_samples(section(corpus, max_refused=0.05), tmp_path / "s")  # 2 of 40
    report = store.header["report"]
    assert report["dropped"]["refused"]["documents"] == 2 and report["out"]["documents"] == 38
    assert [sentence.split(":")[0] for sentence in report["refused"]] == ["1.jsonl, line 2", "1.jsonl, line 3"]
    spoil(corpus, 3)
    says = r"^1.jsonl, line 2: .*\(3 of 40 rows are refused, more than max_refused = 0.05; repair them, or raise it\)"
    with pytest.raises(DataError, match=says):
        build_samples(section(corpus, max_refused=0.05), tmp_path / "t")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "s"]


@pytest.mark.parametrize("at", [1, 4])
def test_a_build_that_was_killed_goes_on_with_the_shards_it_lacks(corpus: Path, tmp_path: Path, at: int):
    calm = build_samples(section(corpus), tmp_path / "calm")
    child = os.fork()
    if child == 0:

        def die(progress: build_module.Progress) -> None:
            if progress.shards_done == at:
                os.kill(os.getpid(), signal.SIGKILL)

        build(section(corpus), BYTES, tmp_path / "s", progress=die)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    done: list[int] = []
    store = build(section(corpus), BYTES, tmp_path / "s", progress=lambda now: done.append(now.shards_done))
    assert done == list(range(at + 1, 6)) and store.fingerprint == calm.fingerprint
    assert content(tmp_path / "s") == content(tmp_path / "calm")


def test_another_format_or_field_is_another_store(corpus: Path, tmp_path: Path):
    build_samples(section(corpus), tmp_path / "s")
    with pytest.raises(DataError, match="of another data section or tokenizer"):
        build_samples(section(corpus, fields={"completion": "prompt"}), tmp_path / "s")
    swapped = build_samples(section(corpus, fields={"completion": "prompt", "prompt": "completion"}), tmp_path / "t")
    assert texts(swapped)[0].startswith("it is 0what is 0")


def test_a_source_of_text_cannot_give_rows(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="rows"):
        build(DataSection(source="text", path=str(tmp_path / "a.txt"), format="messages"), BYTES, tmp_path / "s")


def test_shards_of_another_format_are_not_taken_up(corpus: Path, tmp_path: Path):
    out = tmp_path / "s"

    def interrupt(progress: build_module.Progress) -> None:
        if progress.shards_done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(section(corpus, fields={"completion": "prompt", "prompt": "completion"}), BYTES, out, progress=interrupt)
    assert (tmp_path / "s.building").exists()
    assert texts(build_samples(section(corpus), out))[0] == whole(row(0))
