"""The build: the same store whatever the workers, restarts and kills; nothing left of a build that failed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.foreign_tokenizers import saved, sentencepiece
from tests.data.users import unprivileged
from truestep.data import build as build_module
from truestep.data.build import build, open_built
from truestep.data.inspect import inspect_store
from truestep.data.merge import _report
from truestep.data.parts import Amount
from truestep.data.sample import even_sample, make_tokenizer
from truestep.data.store import TokenStore
from truestep.data.tokenizer import bytes_tokenizer, load_tokenizer, train_bpe
from truestep.errors import DataError, StorageError
from truestep.recipe.data import DataSection, TokenizerSection

ROOT = Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Nine files that make nine shards, with copies across them."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    rng = np.random.default_rng(3)
    for i in range(9):
        rows = [f"row {i} {j} " + " ".join(map(str, rng.integers(0, 50, 40))) for j in range(20)] + ["the same row"]
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": r}) + "\n" for r in rows))
    return folder


def section(corpus: Path, **changes) -> DataSection:
    return DataSection(source="jsonl", path=str(corpus), **({"dedup": "near"} | changes))


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.*")}


def test_the_store_is_the_same_with_any_number_of_workers(corpus, tmp_path):
    stores = [build(section(corpus), bytes_tokenizer(), tmp_path / f"s{n}", workers=n) for n in (1, 3)]
    assert stores[0].num_documents == 9 * 20 + 1
    assert content(tmp_path / "s1") == content(tmp_path / "s3")
    stores[1].verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "s1", "s3"]


def test_documents_are_in_the_order_of_files_and_lines(corpus, tmp_path):
    store = build(section(corpus, dedup="exact"), bytes_tokenizer(), tmp_path / "s", workers=2)
    first = [bytes(store.document(i).astype("u1")).split()[:3] for i in range(store.num_documents) if i != 20]
    assert [(int(a[1]), int(a[2])) for a in first] == [(i, j) for i in range(9) for j in range(20)]


SCRIPT = """
import os, resource, signal, sys
from truestep.data.build import build
from truestep.data.store import StoreWriter
from truestep.data.tokenizer import bytes_tokenizer
from truestep.recipe.data import DataSection

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(now):
    {progress}

{before}
section = DataSection(source="jsonl", path=sys.argv[1], dedup="near")
build(section, bytes_tokenizer(), sys.argv[2], workers={workers}, progress=progress)
"""


def build_elsewhere(
    corpus: Path, out: Path, *, workers: int = 1, progress: str = "pass", before: str = ""
) -> subprocess.CompletedProcess:
    """A build in a process of its own, in which `before` runs first and `progress` at every shard."""
    code = SCRIPT.format(progress=progress, before=before, workers=workers)
    return subprocess.run([sys.executable, "-c", code, str(corpus), str(out)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_killed_again_and_again_ends_as_if_undisturbed(corpus, tmp_path, workers):
    undisturbed = build(section(corpus), bytes_tokenizer(), tmp_path / "calm")
    out = tmp_path / "store"
    for after in (2, 9):
        killed = build_elsewhere(corpus, out, workers=workers, progress=f"now.shards_done == {after} and die()")
        assert killed.returncode == -signal.SIGKILL and not out.exists()
    done = []
    store = build(section(corpus), bytes_tokenizer(), out, progress=lambda p: done.append(p.shards_done))
    assert done == [] and store.fingerprint == undisturbed.fingerprint  # all nine shards were kept
    assert content(out) == content(tmp_path / "calm")
    assert not (tmp_path / "store.building").exists()


def test_a_build_killed_while_it_merges_is_no_store_and_goes_on(corpus, tmp_path):
    out = tmp_path / "store"
    killed = build_elsewhere(corpus, out, progress="if now.shards_done == 9: StoreWriter.finish = die")
    assert killed.returncode == -signal.SIGKILL
    assert (out / "tokens.bin").exists() and open_built(out, section(corpus), bytes_tokenizer()) is None
    build(section(corpus), bytes_tokenizer(), out)
    build(section(corpus), bytes_tokenizer(), tmp_path / "calm")
    assert content(out) == content(tmp_path / "calm")


def test_a_damaged_or_outdated_shard_is_done_again(corpus, tmp_path):
    calm = build(section(corpus), bytes_tokenizer(), tmp_path / "calm")
    out = tmp_path / "store"
    assert build_elsewhere(corpus, out, progress="now.shards_done == 6 and die()").returncode == -signal.SIGKILL
    work = tmp_path / "store.building"
    flip(work / "000001" / "tokens.bin")
    flip(work / "000002" / "signatures.npy")
    (work / "000003" / "header.json").unlink()
    stat = (corpus / "4.jsonl").stat()
    os.utime(corpus / "4.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    done = []
    store = build(section(corpus), bytes_tokenizer(), out, progress=lambda p: done.append(p.shards_done))
    assert done == [3, 4, 5, 6, 7, 8, 9] and store.fingerprint == calm.fingerprint  # 0 and 5 were kept


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_an_interruption_keeps_the_work_and_bad_input_removes_it(corpus, tmp_path):
    out = tmp_path / "deep" / "store"

    def interrupt(progress):
        if progress.shards_done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(section(corpus), bytes_tokenizer(), out, workers=2, progress=interrupt)
    assert (tmp_path / "deep" / "store.building").is_dir() and not out.exists()
    (corpus / "7.jsonl").write_text("{broken\n")
    for workers in (2, 1):
        with pytest.raises(DataError, match=r"7\.jsonl, line 1: not JSON"):
            build(section(corpus), bytes_tokenizer(), out, workers=workers)
        assert sorted(p.name for p in tmp_path.rglob("*") if corpus not in (p, p.parent)) in (["deep"], [])


def test_a_finished_store_is_opened_again_and_another_is_never_overwritten(corpus, tmp_path):
    out = tmp_path / "s"
    assert open_built(out, section(corpus), bytes_tokenizer()) is None
    first = build(section(corpus), bytes_tokenizer(), out)
    calls = []
    again = build(section(corpus), bytes_tokenizer(), out, progress=calls.append)
    assert again.fingerprint == first.fingerprint and not calls
    assert open_built(out, section(corpus, packing="best-fit"), bytes_tokenizer()) is not None
    before = content(out)
    with pytest.raises(DataError, match="holds a token store of another data section or tokenizer"):
        build(section(corpus, dedup="none"), bytes_tokenizer(), out)
    with pytest.raises(DataError, match="holds a token store of another data section or tokenizer"):
        build(section(corpus), train_bpe(["a few words"] * 9, 260), out)
    (corpus / "new.jsonl").write_text(json.dumps({"text": "new"}) + "\n")
    with pytest.raises(DataError, match="was built from other input files"):
        build(section(corpus), bytes_tokenizer(), out)
    assert content(out) == before


def test_two_builds_of_one_store_at_once_are_refused(corpus, tmp_path):
    def again(progress):
        with pytest.raises(DataError, match="another process is building it"):
            build(section(corpus), bytes_tokenizer(), tmp_path / "s")

    assert build(section(corpus), bytes_tokenizer(), tmp_path / "s", progress=again).num_documents == 181


def test_heldout_and_train_share_no_document_and_lose_none(corpus, tmp_path):
    halves = {
        split: build(section(corpus, dedup="none", split=split, holdout=0.3), bytes_tokenizer(), tmp_path / split)
        for split in ("train", "heldout")
    }
    texts = {split: [bytes(s.document(i).astype("u1")) for i in range(s.num_documents)] for split, s in halves.items()}
    assert not set(texts["train"]) & set(texts["heldout"])
    assert len(texts["train"]) + len(texts["heldout"]) == 9 * 21
    assert 0.15 < len(texts["heldout"]) / 189 < 0.45
    report = halves["heldout"].header["report"]
    assert report["other_split"]["documents"] == len(texts["train"])
    assert report["other_split"]["bytes"] == halves["train"].num_bytes
    with pytest.raises(DataError, match="set holdout to the share"):
        build(section(corpus, split="heldout"), bytes_tokenizer(), tmp_path / "none")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_c01_tokens_in_are_tokens_out_and_tokens_reported_dropped(corpus, tmp_path, kind):
    tokenizer = bytes_tokenizer() if kind == "bytes" else train_bpe(["row 1 2 3 the same row"] * 9, 262)
    store = build(section(corpus), tokenizer, tmp_path / "s")
    report = store.header["report"]
    rows = [json.loads(line)["text"] for path in sorted(corpus.iterdir()) for line in path.open()]
    assert report["in"]["tokens"] == sum(len(tokenizer.encode(row)) + 1 for row in rows)
    for unit in ("documents", "bytes", "tokens"):
        assert report["in"][unit] == report["out"][unit] + sum(amount[unit] for amount in report["dropped"].values())
    assert report["out"] == {"documents": store.num_documents, "bytes": store.num_bytes, "tokens": store.num_tokens}
    with pytest.raises(RuntimeError, match="5 tokens came in, but 4 are accounted for"):
        _report({"in": Amount(1, 1, 5), "other_split": Amount()}, Amount(1, 1, 4))


def test_c03_the_width_of_ids_follows_the_largest_id(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    narrow = build(DataSection(source="text", path=str(tmp_path / "a.txt")), bytes_tokenizer(), tmp_path / "n")
    assert np.dtype(narrow.header["id_type"]) == np.dtype("<u2")
    spec = json.loads(json.dumps(bytes_tokenizer()._spec))
    spec["model"]["vocab"] |= {f"unused {i}": i for i in range(257, 70_001)} | {"xy": 70_001}
    spec["model"]["merges"] = [["x", "y"]]
    (tmp_path / "big.json").write_text(json.dumps(spec))
    big = load_tokenizer(tmp_path / "big.json", eod="<|endoftext|>")
    (tmp_path / "b.txt").write_text("axy")
    wide = build(DataSection(source="text", path=str(tmp_path / "b.txt")), big, tmp_path / "w")
    assert np.dtype(wide.header["id_type"]) == np.dtype("<u4")
    assert wide.document(0).tolist() == [ord("a"), 70_001, 256]


def test_c08_every_document_ends_with_one_end_token(corpus, tmp_path):
    (corpus / "0.jsonl").write_text(json.dumps({"text": "ends with <|endoftext|>"}) + "\n")
    store = build(section(corpus, dedup="none"), bytes_tokenizer(), tmp_path / "s")
    for i in range(store.num_documents):
        assert (np.flatnonzero(store.document(i) == 256) == len(store.document(i)) - 1).all()
    assert store.document(0).tolist() == [*b"ends with <|endoftext|>", 256]


def test_bytes_that_ids_do_not_stand_for_are_counted(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path / "t", sentencepiece()))
    (tmp_path / "c.jsonl").write_text('{"text": "ab a"}\n{"text": "b"}\n')
    store = build(DataSection(source="jsonl", path=str(tmp_path / "c.jsonl")), tokenizer, tmp_path / "s")
    report = store.header["report"]
    assert (store.num_bytes, report["bytes_by_ids"], report["documents_not_lossless"]) == (5, 7, 2)


def test_many_parts_do_not_need_many_open_files(corpus, tmp_path):
    before = (
        "import truestep.data.sources.jsonl as jsonl; jsonl.file_shards.__defaults__ = (100,); "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    )
    done = build_elsewhere(corpus, tmp_path / "s", progress="print(now.shards)", before=before)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 200 and TokenStore.open(tmp_path / "s").num_documents == 181


# What the operating system refuses


@pytest.mark.parametrize("file_bytes", [1500, 30_000])  # too little for a shard; for the merged store
def test_a_full_disk_is_one_sentence_and_leaves_nothing(corpus, tmp_path, file_bytes):
    before = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes}))"
    for workers in (1, 2):
        done = build_elsewhere(corpus, tmp_path / "new" / "s", workers=workers, before=before)
        last = done.stderr.strip().splitlines()[-1]
        assert "StorageError" in last and "cannot write (File too large); free space" in last
        assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus"]


def test_no_write_permission_is_one_sentence(corpus, tmp_path, monkeypatch):
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "a.txt").write_text("x")
        closed = Path(name) / "closed"
        closed.mkdir(mode=0o555)
        with unprivileged():
            one = DataSection(source="text", path=f"{name}/a.txt")
            if os.geteuid() != 65534:
                closed.chmod(0o555)
            with pytest.raises(StorageError, match=r"closed/s: cannot write \(Permission denied\)"):
                build(one, bytes_tokenizer(), closed / "s")
        assert not list(closed.iterdir())


def test_a_build_process_that_dies_is_one_sentence(corpus, tmp_path, monkeypatch):
    (tmp_path / "dying.py").write_text(
        "import os\nclass Source:\n    def documents(self):\n        os._exit(7)\n        yield\n"
        "class Shards(Source):\n    notes = {}\n    def shards(self):\n        return [self, self]\n"
        "    name = stamp = ''\n    size = 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"a build process died \(exit code 7\)"):
        build(DataSection(source="dying:Shards"), bytes_tokenizer(), tmp_path / "s", workers=2)
    assert not (tmp_path / "s").exists() and not (tmp_path / "s.building").exists()


def test_build_and_tokenizer_do_not_import_torch():
    code = (
        "import sys; sys.modules['torch'] = None;"
        "import truestep.data.build, truestep.data.tokenizer, truestep.data.processes, truestep.data.sample, "
        "truestep.data.inspect, truestep.cli.data; print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


# Tokenizers of a recipe


def test_the_sample_is_even_and_does_not_depend_on_order():
    texts = [f"{kind} {i} " * 300 for i in range(200) for kind in ("a", "b")]
    sample = even_sample(texts, 100_000)
    assert even_sample(reversed(texts), 100_000) == sample
    assert 90_000 < sum(len(t) for t in sample) <= 100_000
    share = sum(t.count("a ") for t in sample) / sum(t.count("a ") + t.count("b ") for t in sample)
    assert 0.3 < share < 0.7
    assert sorted(even_sample(texts, 10**9)) == sorted(texts)
    assert "".join(sorted(even_sample(["x" * 10_000], 10**9))) == "x" * 10_000


def test_a_tokenizer_is_trained_on_the_split_alone(corpus, tmp_path):
    one = section(corpus, split="train", holdout=0.5)
    made = make_tokenizer(TokenizerSection(kind="train-bpe", vocab_size=280), [one], tmp_path)
    again = make_tokenizer(TokenizerSection(kind="train-bpe", vocab_size=280), [one], tmp_path)
    other = make_tokenizer(
        TokenizerSection(kind="train-bpe", vocab_size=280), [one.model_copy(update={"split": "heldout"})], tmp_path
    )
    assert made.fingerprint == again.fingerprint != other.fingerprint
    made.save(tmp_path / "t")
    loaded = make_tokenizer(TokenizerSection(kind="file", path=str(tmp_path / "t")), [], tmp_path)
    assert loaded.fingerprint == made.fingerprint
    assert make_tokenizer(TokenizerSection(), [], tmp_path).vocab_size == 257
    with pytest.raises(DataError, match=r"needs tokenizer\.path"):
        make_tokenizer(TokenizerSection(kind="file"), [], tmp_path)


def test_the_tokenizer_lies_beside_the_store(corpus, tmp_path):
    store = build(section(corpus), bytes_tokenizer(), tmp_path / "s")
    beside = load_tokenizer(tmp_path / "s" / "tokenizer")
    assert beside.fingerprint == store.header["report"]["tokenizer"]["fingerprint"] == bytes_tokenizer().fingerprint


# Looking into a store


def test_inspection_counts_what_is_there(corpus, tmp_path, capsys):
    from rich.console import Console

    from truestep.cli.data import show

    store = build(section(corpus), bytes_tokenizer(), tmp_path / "s")
    found = inspect_store(tmp_path / "s", samples=2, common=5)
    ids = np.concatenate([store.document(i) for i in range(store.num_documents)])
    values, counts = np.unique(ids, return_counts=True)
    best = sorted(zip(-counts, values))[:5]
    assert [(i, round(share * len(ids))) for _, i, share in found.common] == [(v, -n) for n, v in best]
    assert sum(n for _, _, n in found.lengths) == 181 == found.num_measured
    assert found.bytes_per_token == store.num_bytes / store.num_tokens
    assert [s.document for s in found.samples] == [0, 180] and found.samples[0].text.startswith("row 0 0 ")
    show(found, Console(width=120), verified=True)
    printed = capsys.readouterr().out
    for word in (
        "181",
        f"{store.num_tokens:,}",
        "near duplicate",
        "exact duplicate",
        "every block verified",
        "row 0 0",
    ):
        assert word in printed
    with pytest.raises(DataError, match="does not exist"):
        inspect_store(tmp_path / "none")
    assert TokenStore.open(tmp_path / "s").fingerprint == store.fingerprint and build_module.HEADER == "header.json"


# The verbs


def test_data_build_and_data_inspect(corpus, tmp_path):
    from typer.testing import CliRunner

    from truestep.cli.data import app

    (tmp_path / "r.toml").write_text(
        f"""
        [run]
        name = "r"
        dir = "{tmp_path}/runs"
        [model]
        family = "llama"
        hidden_size = 16
        num_layers = 1
        num_heads = 2
        [data.one]
        source = "jsonl"
        path = "{corpus}"
        [[stages]]
        name = "base"
        kind = "pretrain"
        data = "one"
        tokens = 8192
        batch_tokens = 1024
        context = 64
        gate = {{ kind = "none", reason = "a test" }}
        """
    )
    built = CliRunner().invoke(app, ["build", str(tmp_path / "r.toml"), "one", "--set", "data.one.dedup=exact"])
    assert built.exit_code == 0, built.output
    path = built.stdout.strip().splitlines()[-1]
    assert TokenStore.open(path).num_documents == 181
    shown = CliRunner().invoke(app, ["inspect", path, "--verify"])
    assert shown.exit_code == 0 and "exact duplicate" in shown.output and "every block verified" in shown.output
    wrong = CliRunner().invoke(app, ["build", str(tmp_path / "r.toml"), "two"])
    assert "has no [data.two]; its data sections: one" in str(wrong.exception)
