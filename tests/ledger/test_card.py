"""The card: recomputable byte for byte, readable, and honest about what is unknown."""

import hashlib
import json
import os

import pytest

from tests.runlog.made_up import Clock, MadeUpRun, full_run
from truestep.errors import LogError, StorageError
from truestep.ledger.card import build_card, canonical, write_card
from truestep.ledger.words import count, duration, power_of_ten, size
from truestep.runlog.log import segments


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def walk(value, path=""):
    """All figures of a card."""
    if isinstance(value, dict):
        if set(value) == {"value", "unit", "method", "source"}:
            yield path, value
        else:
            for key, item in value.items():
                yield from walk(item, f"{path}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}/{index}")


def test_a_card_is_recomputed_byte_for_byte_after_the_run_went_on(tmp_path, clock):
    run = full_run(tmp_path, clock, pue=1.2, grid_region="SE3")
    out = tmp_path / "models" / "base"
    out.mkdir(parents=True)
    card = build_card(tmp_path, "base")
    digest = write_card(out, card)
    assert digest == hashlib.sha256((out / "card.json").read_bytes()).hexdigest()
    run.say("note", text="between building the card and saying so")
    assert build_card(tmp_path, "base") != card
    assert build_card(tmp_path, "base", records=card["log"]["records"]) == card
    run.say("card", stage="base", path="models/base", digest=digest, records=card["log"]["records"])
    run.stage("more", steps=5, start="stage:base", parent="0123456789abcdef")
    run.steps(1, 5, "more")
    run.end("finished")
    assert canonical(build_card(tmp_path, "base")) == (out / "card.json").read_bytes()
    assert json.loads((out / "card.json").read_bytes()) == card
    assert sorted(p.name for p in out.iterdir()) == ["card.json", "card.md"]


def test_every_figure_has_value_unit_method_and_source(tmp_path, clock):
    full_run(tmp_path, clock).end("finished")
    card = build_card(tmp_path, "base")
    figures = dict(walk(card))
    assert len(figures) > 40
    for path, figure in figures.items():
        assert figure["value"] is not None and figure["method"] and figure["source"], path
    assert figures["/evaluation/bits_per_byte"]["value"] == pytest.approx(1.5)
    assert figures["/evaluation/yardsticks/xz -9e"]["value"] == 1.71
    assert figures["/training/tokens"]["value"] == 40 * 1024
    for name in ("electricity", "carbon", "water", "pue", "grid_region"):
        assert figures[f"/energy/{name}"]["value"] == "not recorded"
    assert figures["/money/cost"]["value"] == "not recorded"
    assert {check["outcome"] for check in card["checks"]} == {"holds"}


def test_declared_facts_of_the_place_are_on_the_card(tmp_path, clock):
    full_run(tmp_path, clock, pue=1.2, grid_region="SE3", price_per_device_hour=3.5, currency="SEK").end("finished")
    figures = dict(walk(build_card(tmp_path, "base")))
    assert figures["/energy/pue"]["value"] == 1.2 and figures["/energy/grid_region"]["value"] == "SE3"
    assert figures["/money/cost"]["unit"] == "SEK" and figures["/money/cost"]["value"] > 0
    assert figures["/energy/electricity"]["value"] == "not recorded"


def test_the_page_reads_well(tmp_path, clock):
    full_run(tmp_path, clock).end("finished")
    write_card(tmp_path, build_card(tmp_path, "base"))
    assert [a["end"] for a in build_card(tmp_path, "base")["attempts"]] == ["killed", "finished"]
    page = (tmp_path / "card.md").read_text()
    assert page.startswith("# made-up/base\n\n> **✅ PASS** · held-out 1.500 bits per byte <= 1.71\n")
    positions = [page.index(word) for word in ("gzip -9", "xz -9e", "**this model**")]
    assert positions == sorted(positions)
    for words in (
        "return a + b",
        "parameters | 1.31 M |",
        "attempt",
        "matmul-2",
        "goodput",
        "PUE | not recorded",
        "rework",
    ):
        assert words in page


@pytest.mark.parametrize("gate", [None, dict(verdict="ungated", gate_kind="none", reason="a smoke test")])
def test_a_model_without_a_gate_says_ungated(tmp_path, clock, gate):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage(model={}, params={}, data=[])
    run.steps(1, 2)
    if gate:
        run.say("gate", stage="base", **gate)
    run.end("finished")
    write_card(tmp_path, build_card(tmp_path, "base"))
    card, page = json.loads((tmp_path / "card.json").read_bytes()), (tmp_path / "card.md").read_text()
    assert card["gate"]["verdict"] == "UNGATED"
    assert "⚠️ UNGATED" in page and (gate["reason"] if gate else "no gate decision") in page
    assert dict(walk(card))["/evaluation/loss"]["value"] == "not recorded"
    assert "Held-out bits per byte: not recorded" in page


def test_lineage_adds_the_compute_of_ancestors_or_says_it_is_unknown(tmp_path, clock):
    run = full_run(tmp_path, clock)
    run.stage("more", steps=5, start="stage:base", parent="0123456789abcdef")
    run.steps(1, 5, "more")
    run.stage("other", steps=5, start="org/model@" + "0" * 40)
    run.steps(1, 5, "other")
    run.end("finished")
    lineage = build_card(tmp_path, "more")["lineage"]
    assert lineage["ancestors"] == ["base"] and lineage["flops_causal"]["value"] == 51 * 1024 * 9.5e6
    lineage = build_card(tmp_path, "other")["lineage"]
    assert lineage["flops_causal"]["value"] == "not recorded"


def test_a_card_that_contradicts_itself_says_so(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage(steps=4)
    run.steps(2, 4)
    run.end("finished")
    write_card(tmp_path, build_card(tmp_path, "base"))
    assert "❌ **This card contradicts itself:** steps without a gap" in (tmp_path / "card.md").read_text()


def test_an_altered_log_gives_no_card(tmp_path, clock):
    full_run(tmp_path, clock).end("finished")
    path = segments(tmp_path)[0]
    path.write_bytes(path.read_bytes().replace(b'"tokens":1024', b'"tokens":1025', 1))
    with pytest.raises(LogError, match=r"events-0001-0\.jsonl line \d+: the hash chain breaks here"):
        build_card(tmp_path, "base")
    assert not list(tmp_path.glob("card.*"))


def test_an_unknown_stage_is_named_with_those_that_are_there(tmp_path, clock):
    full_run(tmp_path, clock).end("finished")
    with pytest.raises(LogError, match="has no stage 'bse' in its log; stages that have begun: base"):
        build_card(tmp_path, "bse")


def test_a_card_that_cannot_be_written_leaves_nothing(tmp_path, clock, monkeypatch):
    full_run(tmp_path, clock).end("finished")
    card = build_card(tmp_path, "base")
    out = tmp_path / "out"
    out.mkdir()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"card\.json: cannot write \(No space left on device\); free space"):
        write_card(out, card)
    assert not list(out.iterdir())


def test_text_that_is_no_unicode_is_kept(tmp_path, clock):
    run = full_run(tmp_path, clock)
    run.say("sample", stage="base", prompt="```", text="\ud800 | x\n")
    run.end("finished")
    write_card(tmp_path, build_card(tmp_path, "base"))
    assert json.loads((tmp_path / "card.json").read_bytes())["samples"][-1]["text"] == "\ud800 | x\n"
    assert "````text\n```" in (tmp_path / "card.md").read_text()


def test_numbers_as_people_read_them():
    assert [count(v) for v in (0, 0.12345, 950, 12_345.6, 999_999, 1_311_872, 999.7e6, 2e12)] == [
        "0", "0.1235", "950", "12,346", "999,999", "1.31 M", "1,000 M", "2 T",
    ]  # fmt: skip
    assert [duration(s) for s in (0.04, 3.2, 59.96, 125, 3599.7, 7500, 200_000)] == [
        "0.0 s", "3.2 s", "1 min 00 s", "2 min 05 s", "1 h 00 min", "2 h 05 min", "2 d 07 h",
    ]  # fmt: skip
    assert [size(n) for n in (0, 1023, 1536, 5 * 2**40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
    assert [power_of_ten(v) for v in (0.0, 1.234e18, 4.37e11)] == ["0", "1.23e18", "4.37e11"]
