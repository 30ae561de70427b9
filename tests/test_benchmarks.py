"""Every benchmark runs at its tiny size and writes what it promises. The figures themselves say nothing here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script: str, out: Path, *arguments: str) -> dict:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *arguments, "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_train(tmp_path):
    asked = ("--smoke", "--threads", "1", "--only", "truestep", "plain")
    check_train(run("train.py", tmp_path / "out.json", *asked), ["truestep", "plain"])


@pytest.mark.slow
def test_train_with_transformers(tmp_path):
    pytest.importorskip("accelerate")
    names = ["truestep", "trainer", "plain", "plain-hf"]
    check_train(run("train.py", tmp_path / "out.json", "--smoke", "--threads", "1"), names)


def check_train(result: dict, names: list[str]) -> None:
    assert list(result["contenders"]) == names
    assert result["loss_spread"] < 1e-3, "the contenders did not do the same work"
    for name, figures in result["contenders"].items():
        assert figures["tokens_per_s"] > 0 and figures["peak_bytes"] > 2**20 and len(figures["losses"]) == 2
        assert figures["where_s_per_step"]["matrix products"] > 0
        for key in ("speed_ratio", "cpu_ratio", "memory_ratio"):
            assert (name in result[key]) == (name != "truestep")
    assert result["machine"]["versions"]["torch"] and result["settings"]["shape"] == "tiny"


def test_ceiling(tmp_path):
    result = run("ceiling.py", tmp_path / "out.json", "--smoke")
    assert set(result["threads"]) == {"1", "2"} and "multiply-add is 2 FLOP" in result["rule"]
    for figures in result["threads"].values():
        assert figures["share_of_peak"] > 0 and len(figures["shares"]) == 2


def test_checkpoint(tmp_path):
    result = run("checkpoint.py", tmp_path / "out.json", "--smoke", "--folder", str(tmp_path / "saves"))
    assert set(result["ratio"]) >= {"stall", "async save", "save", "load", "load, CPU time"}
    assert {"dcp"} <= set(result["ratio"]["stall"]) <= {"dcp", "dcp, kept buffers"} and set(
        result["ratio"]["load"]
    ) == {"dcp"}
    assert result["reshard"]["ranks"] == 4 and result["reshard"]["read_to_state"] >= 1
    assert not list((tmp_path / "saves").iterdir())


def test_loader(tmp_path):
    result = run("loader.py", tmp_path / "out.json", "--smoke")
    assert list(result["stores"]) == ["1 MB", "100 MB"]
    for figures in result["stores"].values():
        assert figures["rows_per_s"]["warm"] > 0 and figures["open_s"] > 0
    assert result["large_to_small"]["anonymous_bytes_more"] < 64 * 2**20


def test_gpu_train_dry(tmp_path):
    result = run("gpu_train.py", tmp_path / "out.json", "--dry")
    assert result["device"] == "CPU" and result["peak"] is None and result["best"]["mfu"] is None
    assert result["best"] in result["tries"] and result["best"]["tokens_per_s"] > 0 and result["profile"]


def test_gpu_posttrain_dry(tmp_path):
    result = run("gpu_posttrain.py", tmp_path / "out.json", "--dry")
    assert result["device"] == "CPU" and set(result["tries"]) == {"sft", "sft, 8 samples a row", "dpo"}
    assert all(found["tokens_per_s"] > 0 for found in result["tries"].values())


def test_gpu_parallel_dry(tmp_path):
    result = run("gpu_parallel.py", tmp_path / "out.json", "--dry")
    assert result["dry"] and result["device"] == "CPU"
    sections = result["sections"]
    assert set(sections) == {"units", "moe", "fp8", "activations", "exact", "context"}
    for name, section in sections.items():
        assert section["error"] is None and section["rows"], name
        assert not any(row["good"] is False for row in section["rows"]), name
    figures = {name: section["figures"] for name, section in sections.items()}
    assert figures["moe"]["ratio"] is None and figures["exact"]["ratio"] is None
    assert set(figures["fp8"]["kinds"]) == {"fp8-tensorwise", "fp8-rowwise", "mxfp8"}
    for found in figures["fp8"]["kinds"].values():
        assert found["ratio"] is None and 0 < abs(found["gap"]) < 0.05
    first, second = figures["exact"]["runs"]["exact"]
    assert first == second and len(first[1]) == figures["exact"]["steps"]


def test_gpu_replay_dry(tmp_path):
    result = run("gpu_replay.py", tmp_path / "out.json", "--dry")
    rows = [row for section in result["sections"].values() for row in section["rows"]]
    assert [row["good"] for row in rows if row["section"] != "cost"] == [True] * 4 and len(rows) == 7
    assert result["conditions"]["torch"] and result["conditions"]["cublas_workspace"] == ":4096:8"
    assert result["sections"]["cost"]["figures"]["exact / fast"] is None, "a dry run measures nothing"


def test_gpu_parallel_tells_a_failed_section_and_goes_on(tmp_path):
    """No time is left for the first, and the command fails."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "gpu_parallel.py"), "--dry", "--only", "moe", "--seconds", "0", "--json"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert json.loads(done.stdout) == json.loads(out.read_text())
    assert "--only moe" in json.loads(done.stdout)["sections"]["moe"]["error"]


def test_parity(tmp_path):
    rows = run("parity.py", tmp_path / "out.json", "--smoke")["rows"]
    assert rows["one rank"]["number"] >= 1 and len(rows) >= 3
    for kind, row in rows.items():
        assert not row["faults"], kind
        assert row["float64"] <= 1e-10 and max(row["float64"], row["float32"]) > 0


def test_exact(tmp_path):
    meshes = run("exact.py", tmp_path / "out.json", "--smoke")["meshes"]
    assert set(meshes) == {"dp_shard", "dp_replicate"}
    for mesh, found in meshes.items():
        fast, exact = (found["steps"][kind] for kind in ("fast", "exact"))
        assert len(fast) == len(exact) > 0 and all(step["cpu_seconds"] > 0 for step in (*fast, *exact)), mesh


def test_low_precision(tmp_path):
    contenders = run("low_precision.py", tmp_path / "out.json", "--smoke")["contenders"]
    assert set(contenders) == {"bfloat16", "fp8-rowwise"}
    high, low = contenders["bfloat16"], contenders["fp8-rowwise"]
    assert high["gaps"] == [0.0] and high["format_costs"] is None
    assert 0 < abs(low["gaps"][0]) < 0.1 and 0 < abs(low["format_costs"]) < 0.1
    assert 0 < low["kept_bytes"] < high["kept_bytes"] and len(low["runs"][0]["losses"]) == 4
    assert low["training_loss"] == pytest.approx(high["training_loss"], abs=0.1)


@pytest.mark.slow
def test_sdc(tmp_path):
    result = run("sdc.py", tmp_path / "out.json", "--smoke")
    assert result["matrix"]["flips"] == 24 and result["default"]["flips"] == 6
    assert not result["matrix"]["wrongly_named"] and result["matrix"]["all"]["found"] > 0.8
    assert all(figures["false_alarms"] == 0 for figures in result["clean"].values())
    assert result["cost"]["share of recomputation"] > 0


@pytest.mark.slow
def test_posttrain(tmp_path):
    pytest.importorskip("trl")
    result = run("posttrain.py", tmp_path / "out.json", "--smoke", "--threads", "1")
    assert set(result["methods"]) == {"sft", "lora", "dpo", "dpo-online"}
    for figures in result["methods"].values():
        assert figures["loss_spread"] < 1e-2 and figures["memory_ratio"] > 0 and len(figures["losses"][0]) == 2
    assert result["methods"]["sft"]["loss_spread"] < 1e-4, "the two sides did not do the same work"
