"""The verbs `sample` and `export`."""

import json
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests import small_run
from tests.models.sections import small
from truestep.cli import verbs
from truestep.cli.export import export
from truestep.cli.sample import sample
from truestep.data.tokenizer import bytes_tokenizer
from truestep.errors import UserError
from truestep.models.build import build_model, init_weights
from truestep.models.hf_save import save_hf

app = typer.Typer()
app.command()(sample)
app.command()(export)


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    section = small().model_copy(update={"vocab_size": 257})
    module = build_model(section, 257).to_empty(device="cpu")
    init_weights(module, 0)
    bytes_tokenizer().save(tmp_path / "tokenizer")
    ids = {"eos_token_id": 256}
    save_hf(
        tmp_path / "model",
        dict(module.named_parameters()),
        section,
        tokenizer_dir=tmp_path / "tokenizer",
        generation=ids,
    )
    return tmp_path / "model"


def test_sample_prints_prompts_and_completions(model: Path):
    greedy = ("--temperature", "0", "--max-new-tokens", "5", "--device", "cpu")
    output = run("sample", model, "one prompt", "two", *greedy)
    assert output == run("sample", model, "one prompt", "two", *greedy)
    assert "one prompt" in output and "two" in output
    drawn = [run("sample", model, "x", "--seed", seed, "--top-p", "0.9") for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sample_says_what_is_missing(tmp_path: Path):
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        run("sample", tmp_path, "x")


def test_export_casts_and_shards(model: Path, tmp_path: Path):
    output = run("export", model, tmp_path / "out", "--dtype", "bfloat16", "--shard-size", "20KB")
    assert str(tmp_path / "out") in output
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and theirs.dtype == torch.bfloat16
    assert theirs.generation_config.eos_token_id == 256
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == [97, 98]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shard-size", "big"), "--shard-size"),
        (("--stage", "base"), "no run directory"),
    ],
)
def test_export_refuses(model: Path, tmp_path: Path, arguments: tuple[str, ...], words: str):
    with pytest.raises(UserError, match=words):
        run("export", model, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_export_of_a_run_takes_its_newest_checkpoint(tmp_path: Path):
    outcome = verbs.run(small_run.recipe(tmp_path))
    finished = outcome.models["base"]
    output = run("export", outcome.directory, tmp_path / "out")
    assert "step 20 of stage base" in output
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", finished))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads((finished / file).read_text()), file
    with pytest.raises(UserError, match="has not begun stage 'other'"):
        run("export", outcome.directory, tmp_path / "again", "--stage", "other")
