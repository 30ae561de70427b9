"""How a forked worker ends: by the same exit codes as the command line, whatever it runs into."""

import signal

import pytest

from truestep.elastic.attempt import AGAIN, CRASHED
from truestep.elastic.forkserver import _run


@pytest.mark.parametrize(
    "text, code",
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        (f"raise SystemExit({AGAIN})", AGAIN),
        ("raise ValueError('not seen coming')", CRASHED),
        ("import nowhere_to_be_found", CRASHED),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT),
    ],
)
def test_no_end_is_taken_for_a_gate(text, code, tmp_path, monkeypatch):
    name = f"work_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert _run(name) == code
