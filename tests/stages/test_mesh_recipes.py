"""The recipes of recipes/mesh: eight processes train the quickstart corpus, stop, and go on as another mesh; what comes
out is a model of `transformers`."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from truestep.models.load import load_model

ROOT = Path(__file__).parents[2]
OTHER = {
    "dp-tp-pp": "{dp_replicate = 2, dp_shard = 1}",
    "dp-ep-tp": "{dp_shard = 1, pp = 2}",
    "dp-cp-tp": "{dp_shard = 1, tp = 2}",
    "hsdp-pp-ep": "{dp_shard = 1, tp = 2, ep = 2}",
}
"""The mesh of two processes that each goes on with."""


def _command(recipe: Path, folder: Path, *more: str) -> list[str]:
    settings = {
        "run.dir": folder / "runs",
        "machine.cache": folder / "cache",
        "stages.base.optim.schedule.warmup": 2,
        "stages.base.gate.max_bits_per_byte": 3.2,
        "stages.base.tokens": 98304 if recipe.stem == "dp-cp-tp" else 196608,
        "stages.base.evaluate.every": 1000,
    }
    sets = [f"{field}={value}" for field, value in settings.items()]
    flags = [flag for one in (*sets, *more) for flag in ("--set", one)]
    return [sys.executable, "-m", "truestep", "run", str(recipe), *flags]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mesh")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER)
def test_train_stop_and_go_on_as_another_mesh(name, folder):
    recipe = ROOT / f"recipes/mesh/{name}.toml"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    first = subprocess.Popen(
        _command(recipe, folder), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    assert first.stdout is not None
    for line in first.stdout:
        said.append(line)
        if re.search(r"step [1-9]", line) and "held-out" not in line:
            first.send_signal(signal.SIGINT)
            break
    said += first.stdout.readlines()
    assert first.wait(300) == 0, "".join(said)
    assert "stopped after step" in "".join(said)

    other = folder / recipe.name  # [machine.pipeline] without a pipeline is refused
    other.write_text(re.sub(r"\[machine\.pipeline\]\nschedule = .*\n", "", recipe.read_text()))
    command = _command(other, folder, "machine.processes=2", f"machine.mesh={OTHER[name]}")
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "goes on from step" in second.stdout and "gate: pass" in second.stdout

    directory = folder / "runs" / name / "models" / "base"
    tokens_BT = torch.arange(48).view(2, 24) * 17 % 2048
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens_BT).logits
        ours = load_model(directory)(tokens_BT)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
