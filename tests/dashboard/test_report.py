"""The report: one page that needs nothing else, whatever parts of a run are missing."""

import re
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest

from tests.runlog.made_up import Clock, MadeUpRun, full_run
from truestep.dashboard.overlap import overlap_views
from truestep.dashboard.plots import POINTS, Curves, plots, shard_spread
from truestep.dashboard.report import write_report
from truestep.errors import LogError, StorageError
from truestep.runlog.log import RunLog, read, segments
from truestep.runlog.metrics import read_metrics
from truestep.runlog.records import Step


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Page(HTMLParser):
    """What a browser would fetch or run, the headings, and whether tags are balanced."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str):
        super().__init__()
        self.fetched, self.titles, self.open, self.scripts = [], [], [], 0
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h3":
            self.titles.append(data)


def page_of(path) -> tuple[str, Page]:
    text = write_report(path, path / "report.html").read_text()
    return text, Page(text)


def test_the_page_shows_everything_and_fetches_nothing(tmp_path, clock):
    full_run(tmp_path, clock).end("finished")
    text, page = page_of(tmp_path)
    assert page.fetched == [] and page.scripts == 0 and "@import" not in text and "url(http" not in text
    assert page.titles == [
        "Loss", "Held-out bits per byte", "Gradient norm", "Gradient norm per shard", "Learning rate", "Throughput",
        "Checkpoint stalls", "Sample",
    ]  # fmt: skip
    assert text.count("ffffffffffffffff") == 1
    for words in ("gzip -9", "xz -9e", "gate: PASS", "return a + b", "matmul-2", "rework", "not recorded", "made-up"):
        assert words in text
    assert "events-0001" not in text  # no remark about a log that ends cleanly
    assert not list(tmp_path.glob("*.partial"))


def test_the_same_log_gives_the_same_page(tmp_path, clock):
    full_run(tmp_path, clock).end("finished")
    assert page_of(tmp_path)[0] == page_of(tmp_path)[0]


def test_a_run_with_missing_parts_still_has_a_page(tmp_path, clock):
    RunLog(tmp_path / "born", 1).close()
    assert "made-up" not in page_of(tmp_path / "born")[0]
    run = MadeUpRun(tmp_path / "started", clock, ranks=0)
    run.begin(devices={})
    assert page_of(run.path)[1].titles == []
    run.stage(params={}, settings={}, start=None, batch_tokens=None, context=None, precision=None)
    assert "No step has been recorded yet" in page_of(run.path)[0]
    run.steps(1, 3, data_s=None)
    assert page_of(run.path)[1].titles == ["Loss", "Gradient norm", "Learning rate", "Throughput"]
    run.log.append("eval", stage="base", step=3, loss=2.0, targets=5, eval_s=0.1)
    text, page = page_of(run.path)
    assert "Held-out bits per byte" not in page.titles and "nats per token" in text


def test_losses_that_are_not_finite_do_not_break_the_page(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage()
    numbers = dict(tokens=1024, targets=1000, lr=0.0, step_s=0.0)
    for step in range(1, 4):
        run.say("step", stage="base", step=step, loss=float("nan"), grad_norm=float("inf"), **numbers)
        run.metrics[0].append("base", step, 0, float("nan"), 5.0, float("inf"))
    run.end("failed", error="loss is not finite")
    text, page = page_of(tmp_path)
    assert "3 steps not finite" in text and "loss is not finite" in text
    assert "Gradient norm per shard" not in page.titles


def test_text_of_the_run_is_escaped(tmp_path, clock):
    run = full_run(tmp_path, clock)
    run.say("sample", stage="base", prompt="<script>alert(1)</script>", text="\ud800&amp;")
    run.say("note", text="<img src=http://elsewhere/x.png>")
    run.end("finished")
    text, page = page_of(tmp_path)
    assert page.scripts == 0 and page.fetched == [] and "&lt;script&gt;alert(1)" in text


def test_a_damaged_rank_file_is_said_and_hides_nothing_else(tmp_path, clock):
    full_run(tmp_path, clock).end("finished")
    path = sorted((tmp_path / "log" / "ranks").rglob("*.parquet"))[0]
    path.write_bytes(path.read_bytes()[:-5])
    text, page = page_of(tmp_path)
    assert "gradient norms per shard are left out" in text and path.name in text
    assert "Gradient norm per shard" not in page.titles and "Loss" in page.titles


def test_bad_runs_are_one_sentence_and_leave_no_page(tmp_path, clock):
    (tmp_path / "empty" / "log").mkdir(parents=True)
    full_run(tmp_path / "altered", clock).end("finished")
    path = segments(tmp_path / "altered")[1]
    path.write_bytes(path.read_bytes().replace(b'"loss":2', b'"loss":1', 1))
    for name, sentence in {
        "nowhere": "is not a run directory: it does not exist",
        "empty": "has no records",
        "altered": r"events-0002-0\.jsonl line \d+: the hash chain breaks here",
    }.items():
        with pytest.raises(LogError, match=sentence):
            write_report(tmp_path / name, tmp_path / "page.html")
    with pytest.raises(
        StorageError, match=r"page\.html: cannot write \(No such file or directory\); choose another place"
    ):
        full_run(tmp_path / "good", clock)
        write_report(tmp_path / "good", tmp_path / "absent" / "page.html")
    assert not list(tmp_path.glob("page*"))


def test_shard_spread_by_hand():
    rows = pa.table(
        {
            "step": [1, 1, 1, 1, 2, 2, 2, 2],
            "weight": [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0],  # a padding microbatch touches nothing
            "grad_norm": [3.0, 1.0, 2.0, 0.0, 4.0, float("nan"), 1.0, float("inf")],
        }
    )
    spread = shard_spread(rows)
    assert spread is not None
    assert [column.tolist() for column in spread] == [[1, 2], [1.0, 1.0], [2.0, 2.5], [3.0, 4.0]]
    assert shard_spread(rows.slice(3, 1)) is None


def test_a_long_run_stays_a_small_page_and_keeps_its_spikes(tmp_path):
    RunLog(tmp_path, 1).close()
    losses = np.full(50_000, 2.0)
    losses[12_345] = 7.0
    numbers = dict(stage="base", tokens=1, targets=1, grad_norm=1.0, lr=0.1, step_s=1.0)
    steps = [Step(step=i + 1, loss=float(x), **numbers) for i, x in enumerate(losses)]
    drawn = plots(Curves(steps, [], [], [], {}, read_metrics(tmp_path)))
    assert sum(len(plot.svg) for plot in drawn) < 40 * 5 * POINTS * 4
    heights = {float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", drawn[0].svg)}
    assert len(heights) > 2  # the spike is in the range that is drawn


def test_exposed_communication_of_profiled_steps(tmp_path, clock):
    """A step of 2 s: 1.2 s of compute, which hides 0.3 of 0.8 s in collectives; 0.3 s is neither."""
    run = full_run(tmp_path, clock)
    fields = {"stage": "base", "step": 4, "steps": 3, "step_s": 2.0, "compute_s": 1.2, "communication_s": 0.8}
    groups = {"tp": {"communication_s": 0.8, "exposed_s": 0.5}}
    worst = {"worst_communication_s": 0.9, "worst_exposed_s": 0.6}
    run.log.append("profile", exposed_s=0.5, groups=groups, **fields, **worst)
    run.end("finished")
    text, _ = page_of(tmp_path)
    assert "base: mean of 3 steps up to step 4, on rank 0" in text
    (view,) = overlap_views(r.data for r in read(tmp_path) if r.kind == "profile")
    assert {part["name"]: round(part["percent"], 6) for part in view.parts} == {
        "compute": 45.0,
        "compute that hides communication": 15.0,
        "exposed communication": 25.0,
        "neither": 15.0,
    }
    assert [(name, share) for name, _, _, share in view.rows] == [
        ("all", "25.0%"),
        ("most on any rank", "30.0%"),
        ("tp", "25.0%"),
    ]
