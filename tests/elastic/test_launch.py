"""Real processes: the launcher, torchrun with two agents, Ctrl-C, kill -9. They import torch anew, so they are few."""

import os
import signal
from pathlib import Path

import pytest

from ..dist import free_port
from .runs import TIMEOUT_S, finish, records, start, wait_for_step, weights_digest, write_recipe


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    file = write_recipe(folder)
    code, output = finish(start("truestep", "run", str(file)))
    assert code == 0, output
    return folder, file, folder / "runs" / "small"


def test_two_processes_finish(undisturbed):
    _, _, run_dir = undisturbed
    assert records(run_dir, "attempt_start")[0].world == 2
    assert records(run_dir, "attempt_end")[0].reason == "finished"
    assert (run_dir / "report.html").exists()


def test_kill_9_in_the_middle_ends_with_the_same_weights(undisturbed):
    folder, file, reference = undisturbed
    long = ["--set", "run.name=killed"]
    process = start("truestep", "run", str(file), *long)
    run_dir = folder / "runs" / "killed"
    wait_for_step(run_dir, 7, process)
    assert len(_workers_of(run_dir)) == 3  # and the process that they were forked from
    os.kill(process.pid, signal.SIGKILL)  # the launcher; its workers lie in sessions of their own
    process.communicate(timeout=TIMEOUT_S)  # ends when the last holder of its output, a worker, is gone
    assert _workers_of(run_dir) == []
    code, output = finish(start("truestep", "run", str(file), *long))
    assert code == 0, output
    assert weights_digest(run_dir) == weights_digest(reference)


def _workers_of(run_dir: Path) -> list[int]:
    """Processes that name this run's recipe file on their command line."""
    name = f".{run_dir.name}.recipe.toml"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(run_dir.parent / name) in command:
                found.append(int(entry.name))
    return found


def test_ctrl_c_once_saves_and_says_how_to_go_on(undisturbed):
    folder, file, reference = undisturbed
    process = start("truestep", "run", str(file), "--set", "run.name=polite")
    run_dir = folder / "runs" / "polite"
    wait_for_step(run_dir, 2, process)
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 0, output
    assert f"truestep run {file} --set run.name=polite" in output
    assert records(run_dir, "attempt_end")[0].reason == "stopped"
    stopped = max(s.step for s in records(run_dir, "step"))
    assert stopped < 20 and records(run_dir, "save")[-1].step == stopped
    code, output = finish(start("truestep", "run", str(file), "--set", "run.name=polite"))
    assert code == 0, output
    assert weights_digest(run_dir) == weights_digest(reference)


def test_ctrl_c_twice_stops_at_once_and_corrupts_nothing(undisturbed):
    folder, file, reference = undisturbed
    process = start("truestep", "run", str(file), "--set", "run.name=abrupt")
    run_dir = folder / "runs" / "abrupt"
    wait_for_step(run_dir, 6, process)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    code, _ = finish(process)
    assert code in (0, 128 + signal.SIGKILL, 128 + signal.SIGINT)  # 0: the step had ended between the two
    code, output = finish(start("truestep", "run", str(file), "--set", "run.name=abrupt"))
    assert code == 0, output
    assert weights_digest(run_dir) == weights_digest(reference)


def test_torchrun_with_two_agents_joins_and_equals_our_launcher(undisturbed):
    folder, file, reference = undisturbed
    common = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    common += [f"--master-port={free_port()}", "--master-addr=127.0.0.1"]
    verb = ["-m", "truestep", "run", str(file), "--set", "run.name=joined"]
    agents = [start(*common, f"--node-rank={node}", *verb) for node in range(2)]
    ended = [finish(agent) for agent in agents]
    assert [code for code, _ in ended] == [0, 0], ended
    run_dir = folder / "runs" / "joined"
    assert (run_dir / "report.html").exists()
    assert records(run_dir, "attempt_start")[0].world == 2
    assert weights_digest(run_dir) == weights_digest(reference)


def test_srun_variables_join(undisturbed):
    folder, file, reference = undisturbed
    port, tasks = free_port(), []
    for rank in range(2):
        variables = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "SLURM_STEP_ID": 0}
        variables |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": port}
        texts = {name: str(value) for name, value in variables.items()}
        tasks.append(start("truestep", "run", str(file), "--set", "run.name=slurm", environment=texts))
    ended = [finish(task) for task in tasks]
    assert [code for code, _ in ended] == [0, 0], ended
    assert weights_digest(folder / "runs" / "slurm") == weights_digest(reference)
