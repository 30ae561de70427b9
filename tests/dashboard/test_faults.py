"""What status, report and card show of failures: bands in the order of time, tables, drills, skips, quarantine."""

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from tests.ledger.test_goodput import outbox, three_attempts
from tests.runlog.made_up import Clock, MadeUpRun, full_run
from truestep.cli.status import table
from truestep.dashboard.bands import BINS, WIDTH, bands
from truestep.dashboard.report import render
from truestep.dashboard.status import status
from truestep.ledger.card import build_card
from truestep.ledger.card_text import card_text
from truestep.ledger.goodput import goodput
from truestep.ledger.history import collect
from truestep.ledger.incidents import incidents
from truestep.runlog.log import read


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def said(path, now_s: float) -> str:
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(table(status(path, now_s)))
    return console.export_text()


def troubled(path, clock, **start) -> MadeUpRun:
    """A fault on a host that is quarantined, a drill, a skipped update, a roll-back."""
    run = three_attempts(path, clock)
    run.begin(startup_s=3.0, stages=["base"], **start)
    run.stage(start_step=22)
    run.steps(23, 30)
    run.save(30)
    text = "the state of rank 1 changed between steps"
    run.say("fault", kind="state", text=text, stage="base", step=30, rank=1, host="b", named=True, since=29)
    run.say("decision", action="quarantine", reason="its memory changed by itself", host="b", rank=1)
    run.say("decision", action="roll back", reason=text, stage="base", step=30, to_step=20)
    outbox(run, "drill", clock.now_s - 5, stage="base", step=30, checkpoint="30-5", ok=True, seconds=4.0, level="load")
    run.say(
        "step", stage="base", step=31, tokens=1, targets=1, loss=9.0, grad_norm=99.0, lr=1.0, step_s=0.0, skipped=True
    )
    return run


def test_status(tmp_path, clock):
    run = troubled(tmp_path, clock, drill_every_s=3600.0)
    clock.wait(60.0)
    text = said(tmp_path, clock.now_s)
    assert "quarantined  b\n" in re.sub(" +\n", "\n", text)
    assert re.search(r"goodput +22\.0 %, ETTR 27\.7 %, 2 failures", text)  # 13.5 and 17 of 61.4 s
    assert "the checkpoint of base, step 30, 1 min 00 s old: load, in 4.0 s: good" in text
    assert "1 update left out" in text
    assert (
        "3; the last, 1 min 00 s ago: the state of rank 1 changed between steps; results may be wrong since step 29"
        in text
    )
    assert "(rank 1, host b)" in text
    run.say("member", host="b", event="joined", processes=1)
    assert "quarantined" not in said(tmp_path, clock.now_s)


def test_that_drills_are_off_is_said_everywhere(tmp_path, clock):
    full_run(tmp_path, clock, drill_every_s=0.0).end("finished")
    assert "OFF: no restore is tried out" in said(tmp_path, clock.now_s)
    card = build_card(tmp_path, "base")
    assert card["faults"]["drills"]["state"] == "OFF"
    assert "restores of this run were not tried out" in card_text(card)
    assert "<dt>drills</dt><dd>OFF</dd>" in render(tmp_path)


def test_a_checkpoint_counts_as_drilled_once_it_was_restored_and_until_it_is_found_damaged(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    drill(run, 10, "scrub")
    assert drilled_step(tmp_path) is None  # all bytes are there, but nothing was restored
    for step, level in ((10, "load"), (20, "replay"), (30, "scrub")):
        drill(run, step, level)
    assert drilled_step(tmp_path) == 20
    drill(run, 20, "scrub", ok=False)
    assert drilled_step(tmp_path) == 10
    run.end(None)


def drill(run: MadeUpRun, step: int, level: str, ok: bool = True) -> None:
    run.say("drill", stage="base", step=step, checkpoint=f"{step}-1", ok=ok, seconds=1.0, level=level)


def drilled_step(path) -> int | None:
    found = incidents(read(path)).drilled
    return found and found.event.step


def test_an_event_that_comes_twice_counts_once(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    for _ in range(2):
        run.say("fault", kind="lost", text="host c is gone", host="c", named=True, id="x", at_s=clock.now_s)
    run.say("fault", kind="lost", text="host c is gone", host="c", named=True, id="y", at_s=clock.now_s - 9)
    found = incidents(read(tmp_path))
    assert [one.event.id for one in found.faults] == ["y", "x"]  # in the order in which they happened
    run.end(None)


def test_card(tmp_path, clock):
    troubled(tmp_path, clock, drill_every_s=600.0)
    card = build_card(tmp_path, "base")
    faults = card["faults"]
    assert faults["failures"]["value"] == 2 and faults["skipped"]["value"] == 1 and faults["quarantined"] == ["b"]
    assert {kind: n["value"] for kind, n in faults["found"].items()} == {"exit": 1, "hang": 1, "state": 1}
    assert faults["drills"] == {"state": "every 10 min 00 s", "newest": faults["drills"]["newest"]}
    assert faults["drills"]["newest"]["value"] == 30
    text = card_text(card)
    assert "1 exit, 1 hang, 1 state" in text and "arXiv 2410.21680" in text and "| hosts in quarantine | b |" in text


def test_bands_have_the_lengths_of_the_kinds(tmp_path, clock):
    troubled(tmp_path, clock)
    history = collect(read(tmp_path))
    whole, found = goodput(history), incidents(history.records)
    drawn = bands(whole, found.events)
    assert len(drawn.bands) == 5 and drawn.left_out == 0
    for band, line in zip(drawn.bands, whole.lines, strict=True):
        widths: dict[str, float] = {}
        for width, kind in re.findall(r'width="([\d.]+)" height="22"[^>]*><title>([^<]*)<', band.svg):
            widths[kind] = widths.get(kind, 0.0) + float(width)
        wanted_s = sum(s for kind, s in line.seconds.items() if kind != "idle")
        for kind, seconds in line.seconds.items():
            if kind != "idle":
                assert widths[kind] == pytest.approx(WIDTH * seconds / wanted_s, abs=0.02 * BINS / 10)
        places = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="4" width="([\d.]+)"', band.svg)]
        assert places[0][0] == 0 and places[-1][0] + places[-1][1] == pytest.approx(WIDTH, abs=0.1)
        assert all(x + width == pytest.approx(after, abs=0.02) for (x, width), (after, _) in pairwise(places))
    assert max(band.percent for band in drawn.bands) == 100
    marks = re.findall(r"<path.*?<title>([^<]*)<", drawn.bands[1].svg)
    assert [mark.split()[0] for mark in marks] == ["rank", "restart,", "rank"]
    assert "; 16 min 40 s idle before" in drawn.bands[3].says


def test_a_long_run_is_a_small_picture(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock, ranks=0)
    run.begin()
    run.stage(steps=5000)
    run.steps(1, 5000)
    run.end("finished")
    history = collect(read(tmp_path))
    (band,) = bands(goodput(history), []).bands
    assert len(band.svg) < 150_000


def test_page_with_ranks_that_lag(tmp_path, clock):
    run = troubled(tmp_path, clock)
    seconds = {"data": [0.01, 0.02], "compute": [0.30, 0.42]}
    run.say("sections", stage="base", step=30, steps=8, seconds=seconds, slow={"1": 1.4})
    run.end("finished")
    page = render(tmp_path)
    for words in (
        "base: mean of 8 steps up to step 30", "rank 1 takes 1.40 times the median", "420.0 ms (rank 1)",
        "rank 1 was killed by signal 9", "rank 1, host b", "roll back to step 20",
        "<dt>hosts in quarantine</dt><dd>b</dd>",
    ):  # fmt: skip
        assert words in page
