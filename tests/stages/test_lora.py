"""Stages that train adapters as whole runs: what they write, that kills and meshes change nothing, what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small_run, tiny
from tests.dist import run_job
from truestep.adapters.peft import WEIGHTS
from truestep.checkpoint.catalogue import newest, read_manifest
from truestep.cli import verbs
from truestep.errors import CheckpointError, UserError
from truestep.models.build import build_model
from truestep.models.load import load_model
from truestep.numerics.blockwise import rounded
from truestep.numerics.low_rank import is_adapter
from truestep.recipe.degrees import Degrees
from truestep.recipe.posttrain import Lora
from truestep.rollout.adapted import load_adapters
from truestep.runlog.log import read
from truestep.stages import rollback, training
from truestep.stages.from_checkpoint import model_from_run
from truestep.storage.store import open_store
from truestep.train import loop
from truestep.train.adapt import adapt, require_one_table

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LORA = {"rank": 4, "alpha": 8, "dropout": 0.1}
STEPS = 6


def body(folder: Path, name: str, lora: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A base, and adapters beside it."""
    found = small_run.recipe(folder, name, tokens=4 * 12 * 32)
    (base,) = found["stages"]
    tuned = base | {"name": "tuned", "start": "stage:base", "tokens": STEPS * 12 * 32, "lora": LORA | (lora or {})}
    tuned |= {"optim": {"lr": 3e-2, "schedule": {"kind": "constant", "warmup": 0}}, **changes}
    found |= {"numerics": {"reduction": "exact"}, "checkpoint": {"every": 2, "every_time": "1h"}}
    return found | {"stages": [base, tuned]}


def carry_out(rank: int, world: int, recipe: dict[str, Any]) -> str:
    return verbs.run(recipe).reason


def digest(run_dir: Path) -> str:
    return json.loads((run_dir / "models" / "tuned" / "manifest.json").read_text())["weights"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("lora")
    outcome = verbs.run(body(folder, "plain"))
    assert outcome.reason == "finished"
    return folder, outcome.directory


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ask for a polite stop once so many steps were done beside adapters."""
    real = loop.train_step

    def stepping(state, batches, num_targets, questions):
        late = state.base is not None and state.step + 1 >= step
        return real(state, batches, num_targets, [1.0 if late else questions[0], *questions[1:]])

    monkeypatch.setattr(loop, "train_step", stepping)


def test_what_is_written(trained):
    """The merged model, and the adapter: PEFT's and ours compute the same with it, beside the base."""
    _, run_dir = trained
    models = run_dir / "models"
    tokens = torch.randint(0, 200, (2, 20), generator=torch.Generator().manual_seed(0))
    merged = load_model(models / "tuned")(tokens)
    beside = load_model(models / "base")
    plain = beside(tokens)
    load_adapters(beside, models / "base", {"tuned": models / "tuned" / "adapter"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, models / "tuned" / "adapter")
    for logits in (beside(tokens), theirs(tokens).logits):
        assert (logits - merged).abs().max() < 1e-5 * merged.abs().max()
    assert (plain - merged).abs().max() > 1e-2 * merged.abs().max()
    (merge,) = [r.data for r in read(run_dir) if r.kind == "merge"]
    assert 0 < merge.error < 1e-5 and merge.weights == 2 * 7
    assert len(digest(run_dir)) == 32


def test_a_checkpoint_holds_adapters_alone(trained):
    _, run_dir = trained
    store = open_store(str(run_dir / "checkpoints" / "tuned"), {})
    committed = newest(store)
    assert committed is not None
    manifest = read_manifest(store, committed)
    assert manifest.extra["base"]
    names = [name for name in manifest.tensors if name.startswith(("model.", "optim."))]
    assert names and all(is_adapter(name) for name in names)


@pytest.mark.parametrize(("world", "mesh"), [(2, {}), (2, {"tp": 2}), (2, {"pp": 2})], ids=["fsdp", "tp", "pp"])
def test_a_mesh_changes_nothing(trained, world, mesh):
    folder, run_dir = trained
    recipe = body(folder, f"mesh-{'-'.join(mesh) or 'fsdp'}")
    recipe["machine"] = recipe["machine"] | {"mesh": mesh}
    assert run_job(carry_out, world, recipe) == ["finished"] * world
    other = folder / "runs" / recipe["run"]["name"]
    if not mesh:
        assert digest(other) == digest(run_dir)  # sums are exact, draws go by the microbatch's number
    tokens = torch.randint(0, 200, (2, 20), generator=torch.Generator().manual_seed(0))
    found, wanted = (load_model(one / "models" / "tuned")(tokens) for one in (other, run_dir))
    assert (found - wanted).abs().max() < 2e-3 * wanted.abs().max()


def test_goes_on_after_a_stop(trained, monkeypatch):
    folder, run_dir = trained
    recipe = body(folder, "stopped")
    stop_after(monkeypatch, 3)
    assert verbs.run(recipe).reason == "stopped"
    monkeypatch.undo()
    assert verbs.run(recipe).reason == "finished"
    assert digest(folder / "runs" / "stopped") == digest(run_dir)


def test_another_base_is_refused(trained, monkeypatch):
    folder, _ = trained
    recipe = body(folder, "swapped")
    stop_after(monkeypatch, 3)
    assert verbs.run(recipe).reason == "stopped"
    monkeypatch.undo()
    file = folder / "runs" / "swapped" / "models" / "base" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"put that model back, or choose another run.name"):
        verbs.run(recipe)


def test_later_stages_start_from_the_merged_model(trained):
    folder, _ = trained
    recipe = body(folder, "chained")
    base, tuned = recipe["stages"]
    more = {
        "name": "more",
        "start": "stage:tuned",
        "lora": {"rank": 2, "merge": False},
        "gate": {"kind": "none", "reason": "tiny"},
    }
    recipe["stages"].append(tuned | more)
    outcome = verbs.run(recipe)
    assert outcome.reason == "finished"
    models = outcome.directory / "models"
    assert (models / "more" / "adapter" / WEIGHTS).exists() and not (models / "more" / "model.safetensors").exists()
    model = load_model(models / "tuned")
    load_adapters(model, models / "tuned", {"more": models / "more" / "adapter"})
    recipe["stages"].append(base | {"name": "last", "start": "stage:more"})
    with pytest.raises(UserError, match=r"stages.last.start.*'stage:more'.*lora.merge"):
        verbs.run(recipe | {"run": recipe["run"] | {"name": "unmerged"}})


def test_the_base_can_be_had_again(trained, monkeypatch):
    """No checkpoint holds it: whoever goes back gets it from the start model."""
    folder, run_dir = trained
    parts, real = [], loop.train_step

    def kept(*args):
        parts.append(args[1])
        return rollback.StageRewinder(*args)

    def stepping(state, batches, num_targets, questions):
        if state.base is not None and state.step == 4:
            with torch.no_grad():
                state.parallel.named_parameters()["blocks.0.mlp.up.weight"].add_(100.0)
            rollback.fill(parts[-1], state.parallel.frozen)
        return real(state, batches, num_targets, questions)

    monkeypatch.setattr(training, "StageRewinder", kept)
    monkeypatch.setattr(loop, "train_step", stepping)
    assert verbs.run(body(folder, "healed")).reason == "finished"
    assert digest(folder / "runs" / "healed") == digest(run_dir)


def test_a_quantised_base_is_merged_as_it_was_trained(trained):
    folder, _ = trained
    outcome = verbs.run(body(folder, "nf4", {"base": "nf4"}))
    assert outcome.reason == "finished"
    models = outcome.directory / "models"
    beside = load_model(models / "base")
    with torch.no_grad():
        for name, parameter in beside.named_parameters():
            if name.startswith("blocks.") and parameter.ndim == 2:
                parameter.copy_(rounded(parameter, "nf4"))
    load_adapters(beside, models / "base", {"tuned": models / "tuned" / "adapter"})
    tokens = torch.randint(0, 200, (2, 20), generator=torch.Generator().manual_seed(0))
    merged = load_model(models / "tuned")(tokens)
    assert (beside(tokens) - merged).abs().max() < 1e-5 * merged.abs().max()


def test_checkpoints_of_adapters_are_no_model(trained):
    _, run_dir = trained
    with pytest.raises(UserError, match=r"stage 'tuned' .* hold no whole model; let the stage end"):
        model_from_run(run_dir)
    assert model_from_run(run_dir, "base").stage == "base"


def test_a_tied_table_with_an_adapter_lies_in_one_part():
    section = tiny.section(tie_embeddings=True)
    model = build_model(section, section.vocab_size)
    require_one_table(model, Degrees(pp=2))
    adapt(model, Lora(targets=["embeddings"]), lambda part, pieces: None, 0)
    require_one_table(model, Degrees(pp=1))
    with pytest.raises(UserError, match=r"mesh\.pp is 2; leave embeddings and head out"):
        require_one_table(model, Degrees(pp=2))
