"""Stages of kind quantise, end to end: what lies in the directory, what it stands for, what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import small_post
from tests.dist import run_job
from truestep.cli import verbs
from truestep.errors import UserError
from truestep.models.load import load_model
from truestep.rollout.directory import sample_from
from truestep.runlog.log import read

SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "int8"},
    "int4": {"group": 8},
    "int4 asymmetric": {"group": 8, "symmetric": False},
    "gptq": {"group": 8, "method": "gptq", "calibration": "train", "calibration_rows": 16},
    "fp8": {"scheme": "fp8"},
    "fp8-static": {"scheme": "fp8-static", "calibration": "train", "calibration_rows": 4},
    "nvfp4": {"scheme": "nvfp4"},
    "nvfp4-static": {"scheme": "nvfp4-static", "calibration": "train", "calibration_rows": 4},
    "gguf": {"scheme": "int8", "format": "gguf"},
}
MAPS = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
TOKENS = torch.arange(1, 61)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a model of text whose weights are large enough for rounding to be seen in its logits."""
    made = tmp_path_factory.mktemp("quantise")
    small_post.save_base(made / "base")
    file = made / "base" / "model.safetensors"
    tensors = {name: x * (6 if x.ndim == 2 else 1) for name, x in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return made


def body(folder: Path, name: str, settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    held_out = {"evaluate": {"data": "other"}, "gate": {"margin": 0.5}, "context": 64}
    return small_post.recipe(folder, "quantise", name.replace(" ", "-"), quantise=settings, **(held_out | changes))


@pytest.fixture(scope="module")
def models(folder) -> dict[str, Path]:
    """A model directory of each scheme."""
    pytest.importorskip("gguf")
    return {name: verbs.run(body(folder, name, SCHEMES[name])).directory / "models" / "tuned" for name in SCHEMES}


def logits(directory: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_model(directory).eval()(TOKENS).float()


@pytest.mark.parametrize("name", [one for one in SCHEMES if one not in ("gguf", "nvfp4-static")])
def test_property_53_transformers_loads_it_with_equal_logits(name, models):
    """Tolerance: 1e-6 of logits up to 1 (fp32 sums in another order); NVFP4 is decoded to bfloat16 there and here, and
    its sums are bfloat16: 2^-6. Zero points reach transformers 5.24 with dequantize=True alone: else it expects them
    unpacked."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    more = {}
    if "asymmetric" in name:
        more["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(models[name], **more).eval()
    with torch.no_grad():
        found = theirs(TOKENS).logits.float()
    size = float(found.abs().max())
    assert float((found - logits(models[name])).abs().max()) <= (2**-6 if "nvfp4" in name else 1e-6) * max(size, 1)


@pytest.mark.parametrize("name", ["fp8", "fp8-static", "nvfp4", "nvfp4-static"])
def test_property_52_every_product_is_that_of_the_library(name, models):
    """Given the very inputs that transformers' maps get. Logits of nvfp4-static are not held against each other: there
    the last bit of a bfloat16 norm moves an input by up to a third of its value, from block to block."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(models[name]).eval(), load_model(models[name])
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, block in enumerate(theirs.model.layers):
        for path, mine in MAPS.items():
            module = block.get_submodule(path)
            module.register_forward_hook(
                lambda module, args, out, key=f"blocks.{layer}.{mine}": seen.update({key: (args[0], out)})
            )
    with torch.no_grad():
        theirs(TOKENS)
        assert len(seen) == 14
        for path, (x, y) in seen.items():
            assert torch.equal(ours.get_submodule(path)(x), y), path


def test_property_53_template_and_ids_are_those_of_the_start(models, folder):
    for directory in models.values():
        for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            if (folder / "base" / file).exists():
                assert (directory / file).read_bytes() == (folder / "base" / file).read_bytes()
        config, start = (json.loads((one / "config.json").read_text()) for one in (directory, folder / "base"))
        keys = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
        assert [config.get(key) for key in keys] == [start.get(key) for key in keys]


@pytest.mark.parametrize("name", SCHEMES)
def test_property_54_linear_maps_alone_are_quantised_and_every_tensor_is_listed(name, models, folder):
    listed = json.loads((models[name] / "quantised.json").read_text())
    start = load_file(folder / "base" / "model.safetensors")
    assert {*listed["quantised"], *listed["kept"]} == start.keys()
    assert all("_proj." in one and start[one].ndim == 2 for one in listed["quantised"])
    assert len(listed["quantised"]) == 14
    assert listed["kept"]["model.embed_tokens.weight"] == "a table" and listed["kept"]["lm_head.weight"] == "the head"
    whole = load_model(models[name]).state_dict()
    assert all(bool(x.any()) for x in whole.values())
    if name != "gguf":
        stored = load_file(models[name] / "model.safetensors")
        dtype = torch.bfloat16 if "nvfp4" in name else torch.float32
        assert all(torch.equal(stored[one], start[one].to(dtype)) for one in listed["kept"])


@pytest.mark.parametrize("name", SCHEMES)
def test_property_51_is_a_model_of_its_own_with_figures_of_its_own(name, models):
    run = models[name].parents[1]
    manifest = json.loads((models[name] / "manifest.json").read_text())
    gate = [record.data for record in read(run) if record.kind == "gate"][-1]
    start = [record.data for record in read(run) if record.kind == "stage_start"][-1]
    assert manifest["weights"] != start.parent and manifest["lineage"]["kind"] == "quantise"
    assert gate.verdict == "pass" and "the parent's" in gate.reason
    with torch.no_grad():
        assert float((logits(models[name]) - logits(run.parents[1] / "base")).abs().max()) > 0


def test_figures_are_those_of_the_files(models):
    """Other files, other figures: nothing is taken from the model in memory, or from the parent."""
    found = {}
    for name, directory in models.items():
        gate = [record.data for record in read(directory.parents[1]) if record.kind == "gate"][-1]
        found[name] = gate.figures["loss"]
    assert len(set(found.values())) == len(found)


def test_rounding_costs_what_the_bits_suggest(models, folder):
    want = logits(folder / "base")
    off = {name: float((logits(directory) - want).norm() / want.norm()) for name, directory in models.items()}
    assert off["int8"] < 0.02 and off["gguf"] < 0.02 and off["fp8"] < 0.1
    assert off["int8"] < off["fp8"] < off["int4"] < off["nvfp4-static"] * 1.5


def test_models_answer(models):
    for directory in models.values():
        assert len(sample_from(directory, ["ab"], 4, 0.0)) == 1


def run_two(rank: int, world: int, recipe: dict[str, Any]) -> str:
    return verbs.run(recipe).reason


def test_the_same_model_from_two_processes(models, folder):
    assert run_job(run_two, 2, body(folder, "two", SCHEMES["gptq"])) == ["finished"] * 2
    two = load_file(folder / "runs" / "two" / "models" / "tuned" / "model.safetensors")
    one = load_file(models["gptq"] / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_is_kept_is_said_and_stays(folder):
    settings = {"group": 8, "keep": ["*down*", "model.layers.0.*"]}
    made = verbs.run(body(folder, "kept", settings)).directory / "models" / "tuned"
    listed = json.loads((made / "quantised.json").read_text())
    assert len(listed["quantised"]) == 6
    assert listed["kept"]["model.layers.1.mlp.down_proj.weight"] == "keep = '*down*'"
    ignore = json.loads((made / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"} <= set(ignore)


REFUSED = {
    "a group that does not divide": ({"group": 12}, {}, r"q_proj.weight has 32 inputs, which groups of 12 .* to 8, or"),
    "a pattern of nothing": ({"group": 8, "keep": ["*gate_up*"]}, {}, r"'\*gate_up\*', which no parameter is called"),
    "everything kept": ({"group": 8, "keep": ["*"]}, {}, r"no weight of the model would be quantised"),
    "too few rows": (
        SCHEMES["gptq"] | {"calibration_rows": 1},
        {"context": 40},
        r"data.train gives \d+ tokens in 1 rows .* raise quantise.calibration_rows \(now 1\)",
    ),
    "rows longer than the model takes": (
        {"group": 8},
        {"context": 1 << 20},
        r"takes 4096 tokens, but the stage's context is 1048576; shorten",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, folder):
    settings, changes, sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        verbs.run(body(folder, f"refused-{list(REFUSED).index(name)}", settings, **changes))


@pytest.mark.parametrize("name", ["int4", "gguf"])
def test_a_quantised_model_is_not_quantised_again(name, models, folder):
    with pytest.raises(
        UserError, match="which is quantised already, and rounding adds up; start from what it was made"
    ):
        verbs.run(body(folder, f"again-{name}", {"group": 8}, start=str(models[name])))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused(bad, folder, tmp_path):
    shutil.copytree(folder / "base", tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = bad
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    recipe = small_post.recipe(tmp_path, "quantise", "bad", quantise={"group": 8})
    with pytest.raises(UserError, match=r"up_proj\.weight has 1 of 2048 elements that are not finite"):
        verbs.run(recipe)
    assert not (tmp_path / "runs" / "bad" / "models" / "tuned").exists()


def test_codes_without_their_scale_are_refused(models, tmp_path):
    shutil.copytree(models["int4"], tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_shape"]
    save_file(tensors, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight_shape, without which"):
        load_model(tmp_path / "broken")
