"""A real run while its disk is full for a while, hangs, or another attempt takes its place."""

import errno
import os
import re

import pytest

from tests import small_run
from tests.refusals import last_word, truestep, write_recipe
from tests.test_bad_storage import sound_checkpoints
from truestep.checkpoint.catalogue import begin_epoch
from truestep.runlog.log import read
from truestep.storage import local
from truestep.storage.disk import Disk


class FullFor(Disk):
    """No space for the checkpoints of some steps, each so many times."""

    def __init__(self, steps):
        self.left = dict(steps)

    def create(self, path):
        match = re.search(r"/steps/0*(\d+)-", str(path))
        step = int(match[1]) if match else None
        if self.left.get(step, 0) > 0:
            self.left[step] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


@pytest.fixture
def full(monkeypatch):
    """From now on every store of this process is on a disk without room for these steps."""

    def fill(**steps):
        disk = FullFor({int(name[1:]): times for name, times in steps.items()})
        monkeypatch.setattr(local, "Disk", lambda: disk)

    return fill


def _run(capsys, folder, **checkpoint):
    body = small_run.recipe(folder)
    body["checkpoint"] |= checkpoint
    return truestep(capsys, "run", write_recipe(folder, body))


def _saves(folder):
    return [(r.data.step, r.data.ok) for r in read(folder / "runs" / "small") if r.kind == "save"]


def _place(folder):
    return folder / "runs" / "small" / "checkpoints" / "base"


def test_c38_full_for_a_while(capsys, tmp_path, full):
    """Fewer failures in a row than the limit: alarms, and the run ends well."""
    full(s5=1, s10=1)
    ended = _run(capsys, tmp_path, max_failures=2)
    assert ended.code == 0, ended.err
    assert _saves(tmp_path) == [(5, False), (10, False), (15, True), (20, True)]
    assert " ".join(ended.out.split()).count("no space is left on the device") >= 2
    assert sound_checkpoints(_place(tmp_path)) == [15, 20]


def test_c38_full_for_too_long(capsys, tmp_path, full):
    """The limit: the run stops with a sentence, and goes on from the newest good checkpoint once there is room."""
    full(s10=9, s15=9)
    _run(capsys, tmp_path, max_failures=1).refused("saving step 15 failed", "no space is left", "2 in a row")
    assert "saving step 15 failed" in last_word(tmp_path / "runs" / "small")
    assert sound_checkpoints(_place(tmp_path)) == [5]
    full()
    ended = _run(capsys, tmp_path, max_failures=1)
    assert ended.code == 0 and "goes on from step 5" in ended.out
    assert sound_checkpoints(_place(tmp_path)) == [5, 10, 15, 20]


def test_c38_the_last_save_is_tried_once_more(capsys, tmp_path, full):
    """A run never ends well without its last checkpoint."""
    full(s20=1)
    ended = _run(capsys, tmp_path)
    assert ended.code == 0, ended.err
    assert _saves(tmp_path)[-2:] == [(20, False), (20, True)]
    assert sound_checkpoints(_place(tmp_path))[-1] == 20


def test_another_attempt_takes_over(capsys, tmp_path, monkeypatch):
    """The run that is fenced off ends at once with one sentence, long before its limit of failures."""
    rivals = []

    class Taken(Disk):
        def create(self, path):
            if "/steps/000000000010-" in str(path) and not rivals:
                rivals.append(path)
                begin_epoch(local.LocalStore(_place(tmp_path), disk=Disk()))
            return super().create(path)

    monkeypatch.setattr(local, "Disk", Taken)
    ended = _run(capsys, tmp_path, max_failures=99)
    ended.refused("step 10 was not saved, since another attempt has taken over", "epoch 1 was superseded by 2")
    assert _saves(tmp_path)[:2] == [(5, True), (10, False)] and len(_saves(tmp_path)) == 2
    assert sound_checkpoints(_place(tmp_path)) == [5]
