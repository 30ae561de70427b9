"""Per-rank columns: exact, compact, crash-safe, and merged so that steps done again count once."""

import resource
import signal

import numpy as np
import pyarrow as pa
import pytest

from truestep.errors import LogError, StorageError
from truestep.runlog.log import RunLog
from truestep.runlog.metrics import RankMetrics, _encoded, _table, read_metrics


@pytest.fixture
def run_dir(tmp_path):
    RunLog(tmp_path, 1).close()
    return tmp_path


def fill(metrics: RankMetrics, steps, stage="base", microbatches=2, mark=0.0):
    for step in steps:
        for microbatch in range(microbatches):
            metrics.append(stage, step, microbatch, step + mark, 8.0, 0.1 * step)


def steps_of(table: pa.Table, **where) -> list[int]:
    rows = [r for r in table.to_pylist() if all(r[k] == v for k, v in where.items())]
    return [r["step"] for r in rows]


def test_rows_of_all_ranks_and_stages_come_back_exactly(run_dir):
    for rank in range(3):
        metrics = RankMetrics(run_dir, 1, rank, rows=5)
        fill(metrics, range(1, 5))
        fill(metrics, range(1, 3), stage="more")
        metrics.close()
    table = read_metrics(run_dir)
    assert table.schema.names == ["stage", "attempt", "rank", "step", "microbatch", "loss_sum", "weight", "grad_norm"]
    assert len(table) == 3 * (8 + 4)
    for row in table.to_pylist():
        assert row["loss_sum"] == row["step"] and row["weight"] == 8.0 and row["grad_norm"] == 0.1 * row["step"]
    assert steps_of(read_metrics(run_dir, "more"), rank=1) == [1, 1, 2, 2]
    assert len(read_metrics(run_dir, "absent")) == 0
    assert not list((run_dir / "log").rglob("*.partial"))


def test_nan_and_infinity_are_kept(run_dir):
    metrics = RankMetrics(run_dir, 1, 0)
    metrics.append("base", 1, 0, float("nan"), 1.0, float("inf"))
    metrics.close()
    row = read_metrics(run_dir).to_pylist()[0]
    assert np.isnan(row["loss_sum"]) and row["grad_norm"] == float("inf")


def test_a_later_attempt_wins_whatever_the_world_size_was(run_dir):
    for rank in range(4):
        metrics = RankMetrics(run_dir, 1, rank)
        fill(metrics, range(1, 11))
        metrics.close()
    for rank in range(2):  # resumed from step 6 at another size, killed at 8: steps 9, 10 no longer stand
        metrics = RankMetrics(run_dir, 2, rank)
        fill(metrics, range(7, 9), mark=0.5)
        metrics.close()
    table = read_metrics(run_dir)
    assert steps_of(table, rank=3, microbatch=0) == [1, 2, 3, 4, 5, 6]
    assert steps_of(table, rank=0, microbatch=0) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {r["loss_sum"] for r in table.to_pylist() if r["step"] == 7} == {7.5}


@pytest.mark.parametrize("again", [(4, 5, 6), (6,), (5, 6, 7, 8)])
def test_a_roll_back_inside_an_attempt_counts_once(run_dir, again):
    for rank in range(2):
        metrics = RankMetrics(run_dir, 1, rank, rows=7)
        fill(metrics, range(1, 7))
        fill(metrics, again, mark=0.5)
        metrics.close()
    table = read_metrics(run_dir)
    for rank in range(2):
        assert steps_of(table, rank=rank, microbatch=1) == list(range(1, again[-1] + 1))
    assert all((r["loss_sum"] % 1 == 0.5) == (r["step"] >= again[0]) for r in table.to_pylist())


def test_rows_since_the_last_flush_are_all_that_a_crash_loses(run_dir):
    metrics = RankMetrics(run_dir, 1, 0, rows=6)
    fill(metrics, range(1, 5), microbatches=1)
    metrics.flush()
    fill(metrics, range(5, 9), microbatches=1)  # one full segment (1-6), 7 and 8 unflushed
    assert steps_of(read_metrics(run_dir)) == [1, 2, 3, 4, 5, 6]
    metrics.flush()
    metrics.flush()
    assert steps_of(read_metrics(run_dir)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(list((run_dir / "log" / "ranks").rglob("*.parquet"))) == 2


def test_a_full_disk_is_one_sentence_and_the_old_segment_stays(run_dir):
    metrics = RankMetrics(run_dir, 1, 0)
    fill(metrics, range(1, 5), microbatches=1)
    metrics.flush()
    rng = np.random.default_rng(0)
    for step in range(5, 2000):
        metrics.append("base", step, 0, *rng.normal(size=3))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, old[1]))
        with pytest.raises(StorageError, match=r"rank-00000-0\.parquet: cannot write .*; free space there"):
            metrics.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert steps_of(read_metrics(run_dir)) == [1, 2, 3, 4]
    assert [p.suffix for p in (run_dir / "log" / "ranks" / "0001").iterdir()] == [".parquet"]


def test_a_damaged_segment_and_a_second_writer_are_said(run_dir):
    metrics = RankMetrics(run_dir, 1, 0)
    fill(metrics, range(1, 5))
    metrics.close()
    with pytest.raises(LogError, match=r"rank-00000-0\.parquet exists: attempt 1 was already begun"):
        RankMetrics(run_dir, 1, 0)
    path = next((run_dir / "log" / "ranks").rglob("*.parquet"))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"\x28\xb5\x2f\xfd") + 12] ^= 1  # inside the first compressed column
    for damaged in (whole[:-9], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(LogError, match=r"rank-00000-0\.parquet is damaged"):
            read_metrics(run_dir)
    with pytest.raises(LogError, match="not a run directory"):
        read_metrics(run_dir / "nowhere")


def shard_rows(metrics: RankMetrics, rng, steps: int, microbatches: int = 1) -> None:
    for step in range(1, steps + 1):
        for microbatch in range(microbatches):
            loss, norm = np.float32(8192 * rng.normal(3, 0.1)), np.float32(abs(rng.normal(1, 0.1)))
            metrics.append("base", step, microbatch, float(loss), 8192.0, float(norm))


def test_16384_shards_of_100_steps_stay_compact(run_dir, capsys):
    """Segments are independent: every 128th of 16,384 ranks is written, the others have the same size."""
    rng = np.random.default_rng(0)
    for rank in range(0, 16384, 128):
        metrics = RankMetrics(run_dir, 1, rank)
        shard_rows(metrics, rng, 100)
        metrics.close()
    files = list((run_dir / "log" / "ranks").rglob("*.parquet"))
    assert len(files) == 128
    bytes_per_row = sum(f.stat().st_size for f in files) / (128 * 100)
    with capsys.disabled():
        print(f"\n16,384 shards x 100 steps: {bytes_per_row:.1f} bytes a row, {bytes_per_row * 1.6384:.1f} MB in all")
    assert bytes_per_row < 15


def test_a_full_segment_takes_seven_bytes_a_row(run_dir):
    metrics = RankMetrics(run_dir, 1, 0, rows=10**6)
    shard_rows(metrics, np.random.default_rng(0), 1024, microbatches=8)
    assert len(_encoded(_table(metrics._rows), metrics._says())) / 8192 < 7


@pytest.mark.slow
def test_all_16384_shards_are_written_and_merged(run_dir):
    rng = np.random.default_rng(0)
    for rank in range(16384):
        metrics = RankMetrics(run_dir, 1, rank)
        shard_rows(metrics, rng, 100)
        metrics.close()
    total = sum(f.stat().st_size for f in (run_dir / "log" / "ranks").rglob("*.parquet"))
    table = read_metrics(run_dir)
    assert len(table) == 1_638_400 and total / len(table) < 15
