"""The verbs `check` and `show`."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tests.recipe.small import small
from truestep.cli import mesh_cost
from truestep.cli.check import check
from truestep.cli.show import show
from truestep.errors import UserError
from truestep.recipe import digests
from truestep.recipe.load import dump, json_schema, load

app = typer.Typer()
app.command()(check)
app.command()(show)


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if result.exception:
        raise result.exception
    return result.output


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(dump(load(small())))
    return str(path)


def test_check_says_what_a_stage_will_take(file):
    output = _run("check", file)
    recipe = load(file)
    for figure in ("base", "123", "7,872", "1,007,616", "64", digests.short(digests.what(recipe))):
        assert figure in output
    model = recipe.model.resolved(257)
    assert f"{model.train_flops(1_007_616, 128):.3g}" in output and f"{model.counts().total:,}" in output


def test_check_says_what_is_not_known_yet(file):
    assert "not known yet: your own module says" in _run("check", file, "--set", "model={module='my:Model'}")
    from_model = ["--set", "model=", "--set", "stages.base.start=some/model", "--set", "stages.base.gate.margin=0.1"]
    output = _run("check", file, *from_model)
    assert output.count("not known yet") == 2
    assert "not known yet" in _run("check", file, "--set", "tokenizer={kind='file', path='a'}")


def test_check_follows_stages_to_their_model(tmp_path):
    recipe = small()
    recipe["stages"].append(recipe["stages"][0] | {"name": "next", "start": "stage:base"})
    path = tmp_path / "recipe.toml"
    path.write_text(dump(load(recipe)))
    assert "not known" not in _run("check", str(path))


def test_check_of_stages_after_pretraining():
    """How many steps its epochs are is not known yet, nor what it takes to quantise; the rest is."""
    output = _run("check", "recipes/assistant.toml")
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in map(_cells, output.splitlines()) if cells
    }
    assert rows["base"][:2] == ["489", "3,912"] and rows["sft"] == ["2 epochs", "", "", "8", "not known yet"]
    with pytest.raises(UserError, match=r"stage 'int4' \(quantise\) does not train"):
        mesh_cost.show("recipes/assistant.toml", [], None, "int4", False)


def _cells(line: str) -> list[str]:
    return line.strip("│ ").split("│") if line.startswith("│") else []


def test_check_raises_every_error(file):
    with pytest.raises(UserError) as error:
        _run("check", file, "--set", "run.sed=1", "--set", "machine.compile=maybe")
    assert str(error.value).splitlines() == [
        "--set: run.sed is not a field; did you mean 'seed'?",
        'machine.compile is "maybe"; it takes: true or false (torch.compile every block).'.join(["--set: ", ""]),
    ]


def test_show_runs_again(file):
    output = _run("show", file, "--set", "stages.base.optim.lr=1e-3")
    assert load(output) == load(file, ["stages.base.optim.lr=1e-3"]) and "lr = 0.001  # number > 0" in output


def test_show_schema():
    assert json.loads(_run("show", "--schema")) == json_schema()


@pytest.mark.parametrize("arguments", [[], ["a.toml", "--schema"]])
def test_show_takes_one_of_the_two(arguments):
    with pytest.raises(UserError, match="takes a recipe, or --schema alone; give one of them"):
        _run("show", *arguments)
