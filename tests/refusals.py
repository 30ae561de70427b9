"""The command line in this process, and what is asked of every refusal: a sentence, exit code 2."""

import fnmatch
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from truestep.cli.main import main
from truestep.recipe.dump import dump
from truestep.recipe.load import load
from truestep.runlog.log import read, verify


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def sentences(self) -> list[str]:
        return [line.removeprefix("truestep: ") for line in self.err.splitlines()]

    def refused(self, *parts: str, times: int = 1) -> str:
        """Assert exit code 2 and exactly `times` sentences on stderr, which hold all `parts`; return stderr."""
        assert self.code == 2, f"exit code {self.code}: {self.err}{self.out[-500:]}"
        lines = self.err.splitlines()
        assert len(lines) == times and all(line.startswith("truestep: ") for line in lines), self.err
        for part in parts:
            assert part in self.err, f"{part!r} is not in: {self.err}"
        return self.err


def truestep(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run the command line in this process. An exception that it does not turn into a sentence is raised here."""
    before, sys.argv = sys.argv, ["truestep", *map(str, arguments)]
    code: Any = 0
    capsys.readouterr()
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
    return Ended(code, *capsys.readouterr())


def write_recipe(folder: Path, body: dict[str, Any]) -> Path:
    """A sound recipe as a file."""
    file = folder / "recipe.toml"
    file.write_text(dump(load(body)))
    return file


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def holds_only(folder: Path, patterns: Iterable[str]) -> None:
    """Assert that every pattern matches a file below the folder, and that there is nothing else, no empty folder."""
    patterns = list(patterns)
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() or not any(p.iterdir())}
    unexpected = {name for name in found if not any(fnmatch.fnmatch(name, p) for p in patterns)}
    missing = [p for p in patterns if not fnmatch.filter(found, p)]
    assert not unexpected and not missing, f"unexpected {sorted(unexpected)}, missing {missing}"


BEGUN = ("small/run.json", "small/log/events-*.jsonl")
TOKENIZER = (".data/tokenizer-*/tokenizer.json", ".data/tokenizer-*/tokenizer_config.json")
"""What an attempt leaves in runs/ that was refused by its data: its log, which says so, and a finished tokenizer."""
STORE = tuple(f".data/*-*/{name}" for name in ("tokens.bin", "offsets.bin", "checksums.bin", "header.json"))
STORE += (".data/*-*/tokenizer/*.json",)


def last_word(run_dir: Path) -> str:
    """The sentence that the log's last attempt ended with; the log itself must be sound."""
    verify(run_dir)
    end = [record for record in read(run_dir)][-1]
    assert end.kind == "attempt_end" and end.data.reason == "failed"
    return end.data.error
