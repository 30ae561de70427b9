"""What keeps a stage from undoing the one before: averages of weights, a pull to the start, data mixed in again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import small_run
from tests.dist import run_job
from tests.stages.test_distill import NO_GATE, body, metrics_of, taught
from tests.stages.test_run import losses, same_bits
from truestep.cli import verbs
from truestep.errors import UserError
from truestep.runlog.log import read
from truestep.train import loop

__all__ = ["taught"]
ROWS = 12 * 32
OPTIM = {"lr": 1e-2, "schedule": {"kind": "constant", "warmup": 0}}


def own(folder: Path, name: str, teacher: Path, steps: int = 3, mesh=None, **changes):
    """The teacher learns on from its own teacher's text, by plain cross-entropy."""
    hard = {"hard": 0.99}
    changes = {"start": str(teacher), "tokens": steps * ROWS, "optim": OPTIM, "gate": NO_GATE} | changes
    return body(folder, name, teacher, hard, mesh, **changes)


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "models" / "student" / "model.safetensors")


def _carry_out(rank, world, body):
    return verbs.run(body).reason


@pytest.fixture(scope="module")
def averaged(taught) -> Path:
    folder, teacher = taught
    return verbs.run(own(folder, "averaged", teacher, remember={"ema": 0.6})).directory


def test_the_average_is_exported_and_judged(averaged, taught):
    """e = 0.6 e + 0.4 w after every update, from the start's weights on: here of the weights of shorter runs."""
    folder, teacher = taught
    average = load_file(teacher / "model.safetensors")
    for steps in (1, 2, 3):
        weights = exported(verbs.run(own(folder, f"plain-{steps}", teacher, steps)).directory)
        average = {name: 0.6 * e + 0.4 * weights[name] for name, e in average.items()}
    last, found = weights, exported(averaged)
    for name, e in average.items():
        torch.testing.assert_close(found[name], e, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(last["lm_head.weight"], found["lm_head.weight"], atol=1e-4)
    plain, ours = (
        [r.data.loss for r in read(run_dir) if r.kind == "eval"][-1]
        for run_dir in (folder / "runs" / "plain-3", averaged)
    )
    assert ours != pytest.approx(plain, rel=1e-4)
    assert losses(averaged) == losses(folder / "runs" / "plain-3")  # it has no part in training


@pytest.mark.parametrize(
    ("world", "mesh"),
    [(2, {"dp_replicate": 2, "dp_shard": 1}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})],
    ids=["ddp", "fsdp", "tp", "pp"],
)
def test_an_average_lies_where_its_weights_do(averaged, taught, world, mesh):
    folder, teacher = taught
    name = f"average-{'-'.join(mesh) or 'fsdp'}"
    made = own(folder, name, teacher, mesh=mesh, remember={"ema": 0.6})
    assert set(run_job(_carry_out, world, made)) == {"finished"}
    found = exported(folder / "runs" / name)
    for key, value in exported(averaged).items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=2e-5)


def test_an_average_goes_on_after_a_stop(averaged, taught, monkeypatch):
    """It is part of a checkpoint: a run that was stopped ends with the same bits."""
    folder, teacher = taught
    made = own(folder, "stopped", teacher, remember={"ema": 0.6})
    taken, step = [], loop.train_step

    def once(*args, **kwargs):
        taken.append(1)
        if len(taken) == 3:
            raise RuntimeError("lights out")
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", once)
    made["checkpoint"] |= {"every": 2, "asynchronous": False}
    with pytest.raises(RuntimeError, match="lights out"):
        verbs.run(made)
    assert verbs.run(made).reason == "finished"
    assert len(taken) == 4  # two steps, the one that was cut off, and that one again
    assert same_bits(exported(folder / "runs" / "stopped"), exported(averaged))


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"pp": 2}], ids=["fsdp", "tp", "pp"])
def test_a_pull_to_the_start_holds_back(taught, mesh):
    folder, teacher = taught
    name = f"pull-{'-'.join(mesh) or 'fsdp'}"
    if not (folder / "runs" / "pulled").exists():
        verbs.run(own(folder, "pulled", teacher, 6, remember={"kl": 2.0}))
        verbs.run(own(folder, "free", teacher, 6, remember={"kl": 1e-6}))
    pulled, free = folder / "runs" / "pulled", folder / "runs" / "free"
    assert metrics_of(pulled, 1)["kl_to_start"] == 0.0
    assert metrics_of(pulled, 6)["kl_to_start"] < 0.5 * metrics_of(free, 6)["kl_to_start"]
    assert set(run_job(_carry_out, 2, own(folder, name, teacher, 6, mesh, remember={"kl": 2.0}))) == {"finished"}
    for step in (2, 6):
        ours, theirs = metrics_of(folder / "runs" / name, step), metrics_of(pulled, step)
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-6)


def test_data_of_before_is_mixed_in(taught):
    folder, teacher = taught
    made = own(folder, "again", teacher, remember={"replay": [{"data": "before", "weight": 1.0}]})
    small_run.write_text(folder / "before", 10, seed=5)
    made["data"]["before"] = {"source": "text", "path": str(folder / "before")}
    run_dir = verbs.run(made).directory
    assert {r.data.name for r in read(run_dir) if r.kind == "data"} == {"train", "heldout", "before"}
    assert losses(run_dir) != losses(folder / "runs" / "averaged")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": "init", "remember": {"kl": 0.1}}, "knows nothing"),
        ({"remember": {"ema": 1.0}}, "ema"),
        ({"remember": {"replay": [{"data": "nothing"}]}}, "nothing"),
    ],
)
def test_bad_input_is_one_sentence(taught, changes, words):
    folder, teacher = taught
    with pytest.raises(UserError, match=words):
        verbs.run(body(folder, "bad", teacher, **changes))
