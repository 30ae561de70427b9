"""Fingerprints of tensors by step: written in segments, read back by attempt, stage and step."""

import pytest

from truestep.errors import LogError
from truestep.runlog.digests import DigestLog, read_digests


def test_written_rows_come_back_and_the_last_of_a_step_counts(tmp_path):
    log = DigestLog(tmp_path, 2, rows=5)
    for step in range(1, 6):
        log.append("base", step, "gradient", {"a": step, "b": -step})
        log.append("base", step, "state", {"a": step + 100})
    log.append("more", 3, "state", {"a": 7})
    log.append("base", 3, "state", {"a": -(2**63)})  # rolled back, and done again
    log.close()
    assert len(list(tmp_path.glob("log/digests/0002/*.parquet"))) > 2
    assert read_digests(tmp_path, 2, "base", 3) == {"gradient": {"a": 3, "b": -3}, "state": {"a": -(2**63)}}
    assert read_digests(tmp_path, 2, "more", 3) == {"state": {"a": 7}}
    assert read_digests(tmp_path, 2, "base", 9) == read_digests(tmp_path, 1, "base", 3) == {}


def test_what_was_not_flushed_is_not_there_and_a_damaged_segment_is_named(tmp_path):
    log = DigestLog(tmp_path, 1)
    log.append("base", 1, "state", {"a": 1})
    assert read_digests(tmp_path, 1, "base", 1) == {}
    log.flush()
    path = tmp_path / "log" / "digests" / "0001" / "00000.parquet"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogError, match=r"00000\.parquet is damaged"):
        read_digests(tmp_path, 1, "base", 1)
