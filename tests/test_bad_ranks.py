"""Bad input on several ranks: one rank says why, the others end in silence, and nobody hangs."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import small_run
from tests.dist import run_job
from tests.refusals import BEGUN, TOKENIZER, files, holds_only, last_word, truestep, write_recipe
from tests.stages.test_run import stop_after
from truestep.cli import verbs
from truestep.cli.main import main
from truestep.errors import DataError
from truestep.parallel import failure
from truestep.runlog.log import verify
from truestep.train import loop


def _main(rank: int, world: int, file: str, output: str, sabotage: str = "") -> int:
    """The command on one rank, what it says in a file of its own."""
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{output}-{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)  # also what C++ prints
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = ["truestep", "run", file]
    if sabotage:
        _spoil(rank, int(sabotage[-1]), stuck=sabotage.startswith("stuck"))
    try:
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _spoil(rank: int, victim: int, stuck: bool) -> None:
    """Only the rank `victim` meets bad data, in its third step; the others are in a collective by then, or stuck as
    one of NCCL's leaves them."""
    failure.GRACE_S = 0.2
    real = loop.train_step

    def stepping(state, *arguments):
        if rank == victim and state.step == 2:
            raise DataError(f"only rank {victim} saw this; look at it")
        if stuck and state.step == 2:
            threading.Event().wait()
        return real(state, *arguments)

    loop.train_step = stepping


def refused_once(folder: Path, file: Path, *parts: str, world: int = 2, sabotage: str = "") -> None:
    """Every rank ends with code 2 and together they say one sentence."""
    codes = run_job(_main, world, str(file), str(folder / "said"), sabotage, timeout_s=90)
    said = "".join((folder / f"said-{rank}.err").read_text() for rank in range(world))
    lines = [line for line in said.splitlines() if "[Gloo]" not in line]
    assert codes == [2] * world, said
    assert len(lines) == 1 and lines[0].startswith("truestep: "), said
    for part in parts:
        assert part in said, said


def nothing_made(folder: Path) -> None:
    assert {path.name for path in folder.iterdir() if not path.name.startswith("said-")} == {"recipe.toml", "text"}


def test_mesh(tmp_path):
    body = small_run.with_machine(small_run.recipe(tmp_path), mesh={"dp_replicate": 3})
    refused_once(tmp_path, write_recipe(tmp_path, body), "does not fit 2 processes", "does is dp_replicate = 2")
    nothing_made(tmp_path)


def test_mesh_that_the_model_does_not_allow(tmp_path):
    body = small_run.with_machine(small_run.recipe(tmp_path), mesh={"dp_shard": 1, "tp": "auto"})
    model = body["model"] | {"num_heads": 1, "num_kv_heads": 1}
    file = write_recipe(tmp_path, body | {"model": model})
    refused_once(tmp_path, file, "tp = 2, more than model.num_heads 1", "that fits is dp_shard = 2")
    nothing_made(tmp_path)


def test_what_only_a_gpu_has(tmp_path):
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("NOT TESTED: this machine has a GPU")
    body = small_run.with_machine(small_run.recipe(tmp_path), device="auto", offload_optimizer=True)
    refused_once(tmp_path, write_recipe(tmp_path, body), "machine.offload_optimizer moves state from a GPU")
    nothing_made(tmp_path)


def test_cuda_where_there_is_none(tmp_path):
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("NOT TESTED: this machine has a GPU")
    body = small_run.with_machine(small_run.recipe(tmp_path), device="cuda")
    refused_once(tmp_path, write_recipe(tmp_path, body), 'machine.device is "cuda"')
    nothing_made(tmp_path)


def test_data_that_is_not_there(tmp_path):
    body = small_run.recipe(tmp_path)
    for section in body["data"].values():
        section["path"] = "/no/such/file"
    refused_once(tmp_path, write_recipe(tmp_path, body), "/no/such/file does not exist", world=3)
    holds_only(tmp_path / "runs", [*BEGUN, *TOKENIZER])


@pytest.mark.parametrize("victim", [0, 1])
def test_what_one_rank_alone_meets_in_training(victim, tmp_path):
    """The other rank waits in a collective, which breaks: it must not say so, and the log must name the true cause."""
    file = write_recipe(tmp_path, small_run.recipe(tmp_path))
    refused_once(tmp_path, file, f"only rank {victim} saw this", sabotage=str(victim))
    if victim == 1:
        assert last_word(tmp_path / "runs" / "small") == "only rank 1 saw this; look at it"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stuck_ends_when_another_fails(victim, tmp_path):
    file = write_recipe(tmp_path, small_run.recipe(tmp_path))
    with pytest.raises(RuntimeError, match=f"rank {1 - victim} of 2 died without a word"):
        run_job(_main, 2, str(file), str(tmp_path / "said"), f"stuck{victim}")
    assert (tmp_path / f"said-{1 - victim}.err").read_text() == ""
    assert verify(tmp_path / "runs" / "small").records


def test_run_directory_below_a_file(tmp_path):
    (tmp_path / "runs").write_text("no folder")
    refused_once(tmp_path, write_recipe(tmp_path, small_run.recipe(tmp_path)), "runs/small cannot be written")


def test_damaged_token_store(tmp_path, capsys):
    file = write_recipe(tmp_path, small_run.recipe(tmp_path))
    assert truestep(capsys, "data", "build", file).code == 0
    (tokens,) = (tmp_path / "runs").glob(".data/train-*/tokens.bin")
    data = bytearray(tokens.read_bytes())
    data[1000] ^= 1
    tokens.write_bytes(data)
    refused_once(tmp_path, file, "tokens.bin: block 0", "does not match its checksum")


def test_no_checkpoint_left(tmp_path, monkeypatch):
    body = small_run.recipe(tmp_path)
    file = write_recipe(tmp_path, body)
    run_job(_stopped, 2, body)
    for part in (tmp_path / "runs" / "small").glob("checkpoints/base/steps/*/rank-*.bin"):
        part.write_bytes(part.read_bytes()[:-10])
    before = files(tmp_path / "runs" / "small" / "checkpoints" / "base" / "steps")
    refused_once(tmp_path, file, "no checkpoint can be loaded", "step 6")
    assert files(tmp_path / "runs" / "small" / "checkpoints" / "base" / "steps") == before


def _stopped(rank: int, world: int, body: dict) -> None:
    stop_after(pytest.MonkeyPatch(), 6)
    verbs.run(body)


def test_real_launcher_says_it_once(tmp_path):
    """Two processes of `truestep run`: the launcher adds nothing to what rank 0 said, and ends with its code."""
    body = small_run.with_machine(small_run.recipe(tmp_path), processes=2)
    for section in body["data"].values():
        section["path"] = "/no/such/file"
    command = [sys.executable, "-m", "truestep", "run", str(write_recipe(tmp_path, body))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    sentence = "truestep: /no/such/file does not exist; correct `path` of the data section.\n"
    assert (ended.returncode, ended.stderr) == (2, sentence)
    for event in (outbox := tmp_path / "runs" / "small" / "outbox").glob("*.json"):
        assert json.loads(event.read_bytes())["kind"] == "member"  # a host joined; the next attempt takes it in
        event.unlink()
    if outbox.is_dir():
        outbox.rmdir()
    holds_only(tmp_path / "runs", [*BEGUN, *TOKENIZER])
