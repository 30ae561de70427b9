"""Bad input through the command line: one sentence that says what, where, which value and what to do; exit code 2."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests import small_run
from tests.refusals import BEGUN, STORE, TOKENIZER, files, holds_only, last_word, truestep, write_recipe
from truestep.data.tokenizer import bytes_tokenizer
from truestep.models.build import build_model, init_weights
from truestep.models.hf_save import save_hf
from truestep.models.load import tensors_of
from truestep.recipe.load import load
from truestep.runlog.log import RunLog


@pytest.fixture
def recipe(tmp_path):
    """A sound recipe as a file, with its text."""
    return write_recipe(tmp_path, small_run.recipe(tmp_path))


def settings(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def nothing_made(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} <= {"recipe.toml", "text", "model"}


# The recipe itself.


def test_recipe_that_is_not_there(capsys, tmp_path):
    truestep(capsys, "run", tmp_path / "none.toml").refused("none.toml", "No such file", "check the path")
    nothing_made(tmp_path)


def test_recipe_that_cannot_be_read(capsys, tmp_path):
    (tmp_path / "recipe.toml").mkdir()
    truestep(capsys, "run", tmp_path / "recipe.toml").refused("recipe.toml cannot be read", "give the path")


def test_recipe_that_is_not_toml(capsys, tmp_path):
    (tmp_path / "recipe.toml").write_text("[run]\nname = small\n")
    truestep(capsys, "run", tmp_path / "recipe.toml").refused("recipe.toml is not TOML", "line 2", "correct it")


def test_typos_are_said_all_at_once_with_the_nearest_name(capsys, recipe, tmp_path):
    text = recipe.read_text().replace("[model]", "[modle]").replace("\ncontext =", "\ncontxt =")
    recipe.write_text(text)
    ended = truestep(capsys, "run", recipe, *settings("run.seed=-1", "machine.presicion=auto"))
    ended.refused(
        "modle is not a field; did you mean 'model'?", "stages.base.contxt", "did you mean 'context'?", times=6
    )
    assert "machine.presicion is not a field; did you mean 'precision'?" in ended.err
    assert "run.seed is -1; it takes: whole number >= 0" in ended.err
    assert "stages.base.context is missing" in ended.err
    nothing_made(tmp_path)


REFUSED_RECIPES = {
    "rows": (["stages.base.batch_tokens=100"], ["batch_tokens is 100, not a whole number of rows of 32", "try 96"]),
    "microbatches": (["machine.microbatch_rows=5"], ["12 rows", "microbatches of 5 rows", "machine.microbatch_rows"]),
    "context": (["model.max_context=16"], ["context is 32, but model.max_context is 16", "shorten the rows"]),
    "vocabulary": (["model.vocab_size=100"], ["vocab_size is 100, but the tokenizer has 257 ids", "or 0"]),
    "later stage": (["stages.base.start=stage:bse"], ["start is 'stage:bse'", "no earlier stage"]),
    "data": (["stages.base.data=trian"], ["names 'trian', which is no [data.*] section", "did you mean 'train'?"]),
    "heads": (["model.num_kv_heads=3"], ["num_kv_heads is 3, which does not divide num_heads 4", "change"]),
    "no effect": (["stages.base.optim.muon_lr=0.1"], ["muon_lr is set but will not be used", "remove it"]),
    "units": (["checkpoint.every_time=ten minutes"], ["every_time", '"ten minutes"']),
}


@pytest.mark.parametrize("case", REFUSED_RECIPES)
def test_recipe_that_does_not_add_up(case, capsys, recipe, tmp_path):
    values, parts = REFUSED_RECIPES[case]
    truestep(capsys, "run", recipe, *settings(*values)).refused(*parts)
    truestep(capsys, "check", recipe, *settings(*values)).refused(*parts)
    nothing_made(tmp_path)


# What the recipe names but this machine does not have: found before anything is built or written.


def refused_at_the_door(capsys, folder: Path, body: dict, *parts: str) -> None:
    truestep(capsys, "run", write_recipe(folder, body)).refused(*parts)
    nothing_made(folder)


def test_cuda_where_there_is_none(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    body = small_run.with_machine(small_run.recipe(tmp_path), device="cuda")
    refused_at_the_door(capsys, tmp_path, body, 'machine.device is "cuda"', "no CUDA device", 'set it to "cpu"')


@pytest.mark.parametrize("mesh", [{"dp_replicate": 3}, {"dp_replicate": 2, "dp_shard": 2}])
def test_mesh_that_does_not_fit(capsys, tmp_path, mesh):
    body = small_run.with_machine(small_run.recipe(tmp_path), mesh=mesh)
    refused_at_the_door(capsys, tmp_path, body, "machine.mesh", "does not fit 1 processes", "dp_replicate = 1")


OWN = "nowhere_at_all:Thing"
OWN_THINGS: dict[str, Callable[[dict], None]] = {
    "loss": lambda body: body["stages"][0].update(loss={"kind": OWN}),
    "optimizer": lambda body: body["stages"][0].update(optim={"kind": OWN}),
    "data source": lambda body: body["data"].update(train={"source": OWN}),
    "model": lambda body: body.update(model={"module": OWN}),
}


@pytest.mark.parametrize("kind", OWN_THINGS)
@pytest.mark.parametrize(
    "path, parts",
    [(OWN, ["no module 'nowhere_at_all'", "PYTHONPATH"]), ("json:Thing", ["no 'Thing'", "correct the name"])],
)
def test_own_code_that_is_not_there(kind, path, parts, capsys, tmp_path):
    body = small_run.recipe(tmp_path)
    OWN_THINGS[kind](body)
    text = write_recipe(tmp_path, body).read_text()
    (tmp_path / "recipe.toml").write_text(text.replace(OWN, path))
    truestep(capsys, "run", tmp_path / "recipe.toml").refused(f"{kind} {path!r} cannot be imported", *parts)
    nothing_made(tmp_path)


def from_model(folder: Path, **changes) -> dict:
    """The small recipe, started from folder/model."""
    body = small_run.recipe(folder, start=str(folder / "model"), gate={"kind": "heldout", "margin": 1.0}, **changes)
    return {name: section for name, section in body.items() if name != "model"}


def save_model(folder: Path, **changes) -> Path:
    section = load(small_run.recipe(folder)).model.model_copy(update=changes).resolved(257)
    model = build_model(section, 257).to_empty(device="cpu")
    init_weights(model, 0)
    save_hf(folder / "model", tensors_of(model), section, shard_bytes=20_000)
    return folder / "model"


def test_start_that_is_no_model(capsys, tmp_path):
    refused_at_the_door(
        capsys, tmp_path, from_model(tmp_path), "stages.base.start is", "no model directory", "correct it"
    )
    (tmp_path / "model").mkdir()
    refused_at_the_door(capsys, tmp_path, from_model(tmp_path), "model/config.json does not exist")


def test_start_with_a_missing_shard(capsys, tmp_path):
    model = save_model(tmp_path)
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.unlink()
    before = files(model)
    refused_at_the_door(capsys, tmp_path, from_model(tmp_path), shard.name, "fetch")
    assert files(model) == before


def test_start_with_a_truncated_shard(capsys, tmp_path):
    model = save_model(tmp_path)
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused_at_the_door(capsys, tmp_path, from_model(tmp_path), str(shard), "damaged", "fetch the model again")


def test_start_that_takes_shorter_rows(capsys, tmp_path):
    save_model(tmp_path, max_context=16)
    refused_at_the_door(capsys, tmp_path, from_model(tmp_path), "config.json", "takes 16 tokens", "context is 32")


# Input data.


def jsonl(folder: Path, third_line: str) -> dict:
    (folder / "text" / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n' + third_line + "\n")
    return {"source": "jsonl", "path": str(folder / "text" / "rows.jsonl")}


def parquet(folder: Path, values: list) -> dict:
    pq.write_table(pa.table({"text": values}), folder / "text" / "rows.parquet")
    return {"source": "parquet", "path": str(folder / "text" / "rows.parquet")}


def text(folder: Path, content: bytes) -> dict:
    (folder / "text" / "one").mkdir()
    (folder / "text" / "one" / "a.txt").write_bytes(content)
    return {"source": "text", "path": str(folder / "text" / "one")}


def unreadable(folder: Path) -> dict:
    """Root reads everything whatever its mode, so: a link to itself, which nobody can read."""
    section = text(folder, b"")
    file = Path(section["path"], "a.txt")
    file.unlink()
    file.symlink_to(file)
    return section


def below_a_file(folder: Path) -> dict:
    return {"source": "text", "path": str(folder / "text" / "000.txt" / "more")}


def empty_folder(folder: Path) -> dict:
    (folder / "text" / "none").mkdir()
    return {"source": "text", "path": str(folder / "text" / "none")}


REFUSED_DATA: dict[str, tuple[Callable[[Path], dict], list[str]]] = {
    "missing": (
        lambda folder: {"source": "text", "path": "/no/such/file"},
        ["/no/such/file does not exist", "correct `path`"],
    ),
    "below a file": (below_a_file, ["000.txt/more does not exist"]),
    "unreadable": (unreadable, ["a.txt cannot be read", "symbolic links", "check"]),
    "empty file": (lambda folder: text(folder, b""), ["one: the corpus is empty", "1 empty", "check the path"]),
    "empty folder": (empty_folder, ["none holds no input file", "correct the path"]),
    "not UTF-8": (lambda folder: text(folder, b"one\ntwo \xff"), ["a.txt, line 2", "0xff", "convert"]),
    "not JSON": (lambda folder: jsonl(folder, '{"text": oops'), ["rows.jsonl, line 3: not JSON", "oops", "repair"]),
    "other field": (
        lambda folder: jsonl(folder, '{"txt": "a"}'),
        ["rows.jsonl, line 3: no field 'text'", "set `text_field`"],
    ),
    "number": (lambda folder: jsonl(folder, '{"text": 3}'), ["rows.jsonl, line 3", "'text'"]),
    "NaN": (lambda folder: parquet(folder, [1.0, float("nan")]), ["rows.parquet, row", "'text'", "NaN", "repair"]),
    "null": (lambda folder: parquet(folder, ["a", None]), ["rows.parquet, row 1", "'text'", "null", "repair"]),
    "not Parquet": (lambda folder: jsonl(folder, "") | {"source": "parquet"}, ["rows.jsonl", "Parquet"]),
}


@pytest.mark.parametrize("case", REFUSED_DATA)
def test_data(case, capsys, tmp_path):
    small_run.write_text(tmp_path / "text", documents=2)
    make, parts = REFUSED_DATA[case]
    section = make(tmp_path) | {"holdout": 0.2}
    body = small_run.recipe(tmp_path)
    body["data"] = {"train": section | {"split": "train"}, "heldout": section | {"split": "heldout"}}
    file, before = write_recipe(tmp_path, body), sorted((tmp_path / "text").rglob("*"))
    said = truestep(capsys, "run", file).refused(*parts)
    holds_only(tmp_path / "runs", [*BEGUN, *TOKENIZER])
    assert said == f"truestep: {last_word(tmp_path / 'runs' / 'small')}\n"
    built = truestep(capsys, "data", "build", file, "train")  # its progress is on stderr
    assert built.code == 2 and built.err.endswith(said) and built.err.count("truestep: ") == 1
    holds_only(tmp_path / "runs", [*BEGUN, *TOKENIZER])
    assert sorted((tmp_path / "text").rglob("*")) == before and not (tmp_path / "cache").exists()


def test_what_was_refused_before_training_may_be_corrected(capsys, tmp_path):
    """Same run, other *what*: nothing was trained by the wrong recipe, so the right one may take its place."""
    small_run.write_text(tmp_path / "text", documents=2)
    body = small_run.recipe(tmp_path)
    wrong = body | {"data": {name: section | jsonl(tmp_path, "[") for name, section in body["data"].items()}}
    truestep(capsys, "run", write_recipe(tmp_path, wrong)).refused("line 3: not JSON")
    small_run.write_text(tmp_path / "text")
    (tmp_path / "text" / "rows.jsonl").unlink()
    ended = truestep(capsys, "run", write_recipe(tmp_path, body))
    assert ended.code == 0, ended.err
    run = json.loads((tmp_path / "runs" / "small" / "run.json").read_text())
    assert run["what"]["data.train.source"] == "text"


def test_tokenizer_larger_than_the_vocabulary(capsys, tmp_path):
    """Known only once the tokenizer was loaded; no text has been encoded by then."""
    bytes_tokenizer().save(tmp_path / "model")
    body = small_run.recipe(tmp_path) | {"tokenizer": {"kind": "file", "path": str(tmp_path / "model")}}
    body["model"] |= {"vocab_size": 100}
    truestep(capsys, "run", write_recipe(tmp_path, body)).refused("vocab_size is 100", "257 ids", "or to 0")
    holds_only(tmp_path / "runs", [*BEGUN, *TOKENIZER])


def test_too_little_data_for_whole_epochs(capsys, tmp_path):
    body = small_run.recipe(tmp_path, data=[{"data": "train", "max_epochs": 0.5}])
    truestep(capsys, "run", write_recipe(tmp_path, body)).refused(
        "needs 240 rows", "max_epochs", "train on fewer tokens"
    )
    begun = ("epochs/000001", "commits/fence-000001", "probe/1.json")
    built = ("small/log/ranks/0001", *(f"small/checkpoints/base/{name}" for name in begun), *STORE)
    holds_only(tmp_path / "runs", [*BEGUN, *TOKENIZER, *built])


# The run's directory.


def test_directory_of_another_recipe(capsys, recipe, tmp_path):
    short = settings("stages.base.tokens=384", "stages.base.optim.schedule.warmup=0", "stages.base.evaluate.every=0")
    assert truestep(capsys, "run", recipe, *short).code == 0
    before = files(tmp_path / "runs")
    other = truestep(capsys, "run", recipe, *short, *settings("run.seed=4", "stages.base.optim.lr=0.1"))
    other.refused("small belongs to another recipe", "run.seed: 3 → 4", "optim.lr: 0.003 → 0.1", "another run.name")
    many = truestep(capsys, "run", recipe, *short, *settings("model.family=qwen3", "model.num_layers=3", "run.seed=4"))
    many.refused("belongs to another recipe")
    assert files(tmp_path / "runs") == before


def test_directory_with_other_files(capsys, recipe, tmp_path):
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "thesis.tex").write_text("years of work")
    truestep(capsys, "run", recipe).refused("small holds other files but no run.json", "choose another run.name")
    assert files(tmp_path / "runs") == {"small/thesis.tex": b"years of work"}


def test_damaged_run_file(capsys, recipe, tmp_path):
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "run.json").write_text('{"what":')
    truestep(capsys, "run", recipe).refused("run.json is damaged", "restore it")
    assert files(tmp_path / "runs") == {"small/run.json": b'{"what":'}


def test_second_run_at_the_same_time(capsys, recipe, tmp_path):
    """The first one's log is locked for as long as it lives, and refuses the second before it does anything."""
    wrong = settings("data.train.path=/no/such/file", "data.heldout.path=/no/such/file")
    truestep(capsys, "run", recipe, *wrong).refused("does not exist")
    first = RunLog(tmp_path / "runs" / "small", attempt=2)
    before = files(tmp_path / "runs")
    truestep(capsys, "run", recipe).refused("small is in use", "events-0002-0.jsonl", "stop that run first")
    truestep(capsys, "run", recipe, *settings("run.seed=5")).refused("small is in use")
    assert files(tmp_path / "runs") == before
    first.close()


@pytest.mark.parametrize("verb", ["status", "report", "sample", "export"])
def test_other_verbs_on_what_is_not_there(verb, capsys, tmp_path):
    more = {"sample": ["a prompt"], "export": [tmp_path / "out"]}.get(verb, [])
    truestep(capsys, verb, tmp_path / "none", *more).refused("none")
    assert not list(tmp_path.iterdir())
