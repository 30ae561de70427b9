"""The run log: chained, torn tails tolerated and said, any other change named by file and line."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from truestep.errors import LogError, StorageError
from truestep.runlog.log import LogReader, RunLog, is_locked, next_attempt, read, segments, verify
from truestep.runlog.records import KINDS, Note, Segment, Step


def step(log: RunLog, number: int, **more):
    values = dict(tokens=64, targets=63, loss=2.0, grad_norm=1.0, lr=1e-3, step_s=0.1) | more
    log.append("step", stage="base", step=number, **values)


def write_run(path, attempts: int = 1, steps: int = 3) -> None:
    for _ in range(attempts):
        log = RunLog(path, next_attempt(path))
        for number in range(1, steps + 1):
            step(log, number)
        log.close()


def change(path, line: int, old: bytes, new: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path.write_bytes(b"".join(lines))


def test_records_come_back_typed_and_in_order(tmp_path):
    log = RunLog(tmp_path, 1)
    step(log, 1, loss=float("nan"), grad_norm=float("inf"), clip=0.5)
    log.append("note", text="zażółć \ud800\n", values={"x": [1, float("-inf")]})
    log.close()
    first, second, third = read(tmp_path)
    assert isinstance(first.data, Segment) and first.data.pid == os.getpid()
    assert (
        isinstance(second.data, Step) and second.data.loss != second.data.loss and second.data.grad_norm == float("inf")
    )
    assert second.data.data_s is None and second.data.skipped is False
    assert third.data == Note(text="zażółć \ud800\n", values={"x": [1, "-inf"]})
    assert [r.seq for r in (first, second, third)] == [0, 1, 2] and {r.attempt for r in (first, second)} == {1}


def test_every_line_is_strict_json(tmp_path):
    log = RunLog(tmp_path, 1)
    step(log, 1, loss=float("nan"))
    log.close()

    def refuse(word):
        raise AssertionError(word)

    for line in segments(tmp_path)[0].read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize(
    "kind, values", [("step", {"stage": "a"}), ("note", {"text": "a", "colour": "red"}), ("note", {"text": None})]
)
def test_missing_and_unknown_fields_are_refused_and_leave_nothing(tmp_path, kind, values):
    log = RunLog(tmp_path, 1)
    with pytest.raises(TypeError):
        log.append(kind, **values)
    with pytest.raises(TypeError):
        log.append("note", text=object())
    log.close()
    assert [r.kind for r in read(tmp_path)] == ["segment"]


def test_attempts_and_full_segments_continue_the_chain(tmp_path):
    for _ in range(3):
        log = RunLog(tmp_path, next_attempt(tmp_path), segment_bytes=1500)
        for number in range(1, 11):
            step(log, number)
        log.close()
    assert len(segments(tmp_path)) > 3
    assert verify(tmp_path).remarks == []
    records = list(read(tmp_path))
    assert [r.seq for r in records] == list(range(len(records)))
    assert [r.data.step for r in records if r.kind == "step"] == [*range(1, 11)] * 3


@pytest.mark.parametrize("line", [1, 2, 3, 4])
def test_a_changed_byte_is_named_by_file_and_line(tmp_path, line):
    write_run(tmp_path)
    path = segments(tmp_path)[0]
    change(path, line, b'"attempt":1', b'"attempt":2')
    with pytest.raises(LogError, match=rf"events-0001-0\.jsonl line {line}: the hash chain breaks here"):
        verify(tmp_path)
    with pytest.raises(LogError, match=f"line {line}"):
        list(read(tmp_path))


def test_a_record_edited_together_with_its_hash_breaks_at_the_next_line(tmp_path):
    write_run(tmp_path)
    path = segments(tmp_path)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2], lines[3] = lines[3], lines[2]
    path.write_bytes(b"".join(lines))
    with pytest.raises(LogError, match="line 3"):
        verify(tmp_path)
    path.write_bytes(b"".join([lines[0], lines[1], lines[2]]))  # record 2 removed
    with pytest.raises(LogError, match="line 3"):
        verify(tmp_path)


def test_a_missing_segment_and_a_cut_one_are_named(tmp_path):
    write_run(tmp_path, attempts=3)
    first, second, _ = segments(tmp_path)
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(LogError, match=r"events-0003-0\.jsonl line 1: .* follows the end of events-0001-0"):
        verify(tmp_path)
    second.write_bytes(b"".join(kept.splitlines(keepends=True)[:-1]))
    with pytest.raises(LogError, match=r"events-0003-0\.jsonl line 1"):
        verify(tmp_path)
    second.write_bytes(kept)
    first.unlink()
    with pytest.raises(LogError, match=r"events-0002-0\.jsonl line 1: .* the beginning of a log"):
        verify(tmp_path)


def test_only_outside_heads_show_that_the_end_was_cut(tmp_path):
    log = RunLog(tmp_path, 1)
    step(log, 1)
    head = log.head()
    step(log, 2)
    log.close()
    assert verify(tmp_path, heads=[head]).records == 3
    path = segments(tmp_path)[0]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    assert verify(tmp_path).records == 1
    with pytest.raises(LogError, match=f"does not contain the chain head {head[:12]} that a commit names"):
        verify(tmp_path, heads=[head])


@pytest.mark.parametrize("torn", [1, 40, 10_000])
def test_a_torn_last_line_is_said_and_the_next_attempt_goes_on_before_it(tmp_path, torn):
    write_run(tmp_path)
    path = segments(tmp_path)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-1][:torn])
    verified = verify(tmp_path)
    assert verified.records == 3 and "events-0001-0.jsonl line 4 is incomplete" in verified.remarks[0]
    write_run(tmp_path)
    verified = verify(tmp_path)
    assert verified.records == 7 and "events-0001-0.jsonl from line 4 on" in verified.remarks[0]
    assert [r.data.step for r in read(tmp_path) if r.kind == "step"] == [1, 2, 1, 2, 3]
    change(path, 3, b'"loss":2.0', b'"loss":1.0')
    with pytest.raises(LogError, match=r"events-0001-0\.jsonl line 3"):
        verify(tmp_path)


def test_what_a_zombie_writes_after_a_newer_attempt_began_does_not_count(tmp_path):
    zombie = RunLog(tmp_path, 1)
    step(zombie, 1)
    copy = segments(tmp_path)[0].read_bytes()
    step(zombie, 2)
    late = segments(tmp_path)[0].read_bytes()
    zombie.close()
    segments(tmp_path)[0].write_bytes(copy)
    write_run(tmp_path)
    (tmp_path / "log" / "events-0001-0.jsonl").write_bytes(late)
    assert "from line 3 on" in verify(tmp_path).remarks[0]
    assert [(r.attempt, r.data.step) for r in read(tmp_path) if r.kind == "step"] == [(1, 1), (2, 1), (2, 2), (2, 3)]


def test_an_empty_segment_of_an_attempt_killed_at_birth_is_passed_over(tmp_path):
    write_run(tmp_path)
    (tmp_path / "log" / "events-0002-0.jsonl").write_bytes(b'{"chain":"ab')
    assert next_attempt(tmp_path) == 3
    write_run(tmp_path)
    assert verify(tmp_path).records == 8


def test_kill_minus_9_between_any_two_records_leaves_a_log_that_goes_on(tmp_path):
    code = (
        "import sys; from truestep.runlog.log import RunLog; log = RunLog(sys.argv[1], 1)\n"
        "for n in range(10**6): log.append('note', text='x' * (n % 5000)); n == 50 and print('go', flush=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    assert is_locked(segments(tmp_path)[0])
    with pytest.raises(LogError, match="is in use: another process writes events-0001-0"):
        RunLog(tmp_path, 2)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not is_locked(segments(tmp_path)[0])
    before = verify(tmp_path).records
    write_run(tmp_path)
    assert before > 50 and verify(tmp_path).records == before + 4


def test_the_same_attempt_cannot_begin_twice(tmp_path):
    RunLog(tmp_path, 1).close()
    with pytest.raises(LogError, match=r"events-0001-0\.jsonl exists: attempt 1 was already begun"):
        RunLog(tmp_path, 1)


def test_a_full_disk_is_one_sentence_and_the_log_stays_whole(tmp_path):
    log = RunLog(tmp_path, 1)
    step(log, 1)
    size = segments(tmp_path)[0].stat().st_size
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, old[1]))
        with pytest.raises(StorageError, match=r"cannot write to .*log: File too large; free space there"):
            step(log, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert segments(tmp_path)[0].stat().st_size == size
    step(log, 2)
    log.close()
    assert verify(tmp_path).records == 3


def test_not_a_run_directory_and_an_empty_log_are_said(tmp_path):
    with pytest.raises(LogError, match="is not a run directory: it does not exist; give the folder"):
        list(read(tmp_path / "nowhere"))
    with pytest.raises(LogError, match="is not a run directory: it has no folder log"):
        list(read(tmp_path))
    (tmp_path / "log").mkdir()
    for reader in (lambda: list(read(tmp_path)), lambda: verify(tmp_path)):
        with pytest.raises(LogError, match="has no records: the run has not begun"):
            reader()
    (tmp_path / "log" / "events-0001-0.jsonl").write_text("[]\n")
    with pytest.raises(LogError, match="line 1 is not the start of a log segment"):
        list(read(tmp_path))


def test_a_reader_follows_a_growing_log(tmp_path):
    log = RunLog(tmp_path, 1, segment_bytes=1200)
    reader, seen = LogReader(tmp_path), []
    for number in range(1, 20):
        step(log, number)
        seen += [r.data.step for r in reader.records() if r.kind == "step"]
        assert seen == [*range(1, number + 1)]
    log.close()
    write_run(tmp_path)
    assert [r.data.step for r in reader.records() if r.kind == "step"] == [1, 2, 3]


def test_records_of_a_later_version_stay_readable(tmp_path, monkeypatch):
    from dataclasses import dataclass

    @dataclass(frozen=True, kw_only=True)
    class Later(Note):
        more: int

    monkeypatch.setitem(KINDS, "note", Later)
    monkeypatch.setitem(KINDS, "future", Later)
    log = RunLog(tmp_path, 1)
    log.append("note", text="a", more=1)
    log.append("future", text="a", more=1)
    log.close()
    monkeypatch.undo()
    _, note, future = read(tmp_path)
    assert note.data == Note(text="a") and future.data == {"text": "a", "more": 1}
