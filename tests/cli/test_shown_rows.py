"""`truestep data inspect --stage`: rows of a recipe's stage in the terminal and as a page."""

import json
import re
from pathlib import Path

import pytest

from tests.data.sample_fakes import ROWS
from tests.refusals import truestep, write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [{"prompt": f"say {n}: ", "completion": f"<b>{n}</b>"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = {
        "run": {"name": "r", "dir": str(tmp_path / "runs")},
        "tokenizer": {"kind": "bytes"},
        "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2},
        "data": {"tune": {"source": ROWS, "path": str(tmp_path / "rows.jsonl"), "format": "prompt-completion"}},
        "machine": {"microbatch_rows": 1, "data_workers": 1, "cache": str(tmp_path / "cache")},
        "stages": [
            {
                "name": "tuned",
                "kind": "sft",
                "data": "tune",
                "context": 48,
                "epochs": 1,
                "batch_tokens": 96,
                "gate": {"kind": "none", "reason": "a test"},
            }
        ],
    }
    return write_recipe(tmp_path, body)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_rows_are_shown_with_their_targets_marked(capsys, recipe: Path, tmp_path: Path):
    page = tmp_path / "rows.html"
    said = truestep(capsys, "data", "inspect", recipe, "--stage", "tuned", "--samples", 2, "--html", page).out
    shown = re.findall(r"^(say (\d+): )⟦<b>(\d+)</b><\|endoftext\|>⟧$", said, re.MULTILINE)
    assert all(asked == answered for _, asked, answered in shown)
    counts = re.findall(r"row (\d): 48 places, (\d+) targets, (\d) documents", said)
    assert [row for row, _, _ in counts] == ["0", "1"] and sum(int(n) for _, _, n in counts) == len(shown) > 2
    assert sum(int(n) for _, n, _ in counts) == sum(len(f"<b>{n}</b>") + 1 for _, n, _ in shown)
    assert re.search(r"tune: units 12, samples 12, rows 5, targets \d+", said)
    text = page.read_text()
    assert "<b>1" not in text and text.count("<h2>") == 2  # what the data says is text on the page, no markup
    spans = re.findall(r'<span( class="target")? title="([^"]*)">', text)
    assert all(bool(target) == ("trained on" in words) for target, words in spans) and len(spans) > 60


def test_the_same_rows_again_from_a_later_one(capsys, recipe: Path):
    shown = ("data", "inspect", recipe, "--stage", "tuned")
    both = truestep(capsys, *shown, "--samples", 2).out
    assert both.split("row 1:")[1] == truestep(capsys, *shown, "--samples", 1, "--first", 1).out.split("row 1:")[1]


def test_what_would_not_be_used_or_is_not_there_is_refused(capsys, recipe: Path, tmp_path: Path):
    truestep(capsys, "data", "inspect", recipe, "--stage", "tune").refused("is not one of the recipe's stages")
    truestep(capsys, "data", "inspect", tmp_path, "--first", 3).refused("--first would not be used")
    truestep(capsys, "data", "inspect", tmp_path, "--html", "x.html").refused("--html would not be used")


def test_a_store_of_samples_tells_what_is_in_it(capsys, recipe: Path, tmp_path: Path):
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "p"}) + "\n")
    built = truestep(capsys, "data", "build", recipe, "--set", "data.tune.max_refused=0.1")
    said = truestep(capsys, "data", "inspect", built.out.strip(), "--verify").out
    assert re.search(r"rows +12, 12 units of 12 samples", said) and "every block verified" in said
    assert re.search(r"dropped: refused .* 1 ", said) and re.search(r"refused +1: no completion", said)
    assert "say 0: <b>0</b><|endoftext|>" in said
