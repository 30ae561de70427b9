"""`truestep chaos` on a real run, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from tests import small_run
from tests.dist import free_port
from tests.refusals import truestep, write_recipe
from truestep.elastic.chaos import Storm, checkpoint_folders
from truestep.recipe.chaos import Chaos, Fault, load_plan
from truestep.recipe.load import load
from truestep.runlog.log import read, verify
from truestep.sentinel.inject import SITES, read_plan

KILL = '[[faults]]\nkind = "kill"\nrank = 1\nstep = 6\n'


@pytest.fixture
def recipe(tmp_path) -> Path:
    body = small_run.recipe(tmp_path)
    body["checkpoint"] |= {"asynchronous": False, "drill_every": "0s"}  # so that step 5 is there before step 6
    body["machine"] |= {"processes": 2}
    return write_recipe(tmp_path, body)


def plan_of(folder: Path, text: str) -> Path:
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


def test_a_kill_and_a_corrupted_checkpoint(capsys, recipe, tmp_path, monkeypatch):
    """The newest checkpoint is damaged, then a rank dies: it is named, the damaged one is passed over, and the run ends
    with the right model."""
    monkeypatch.setenv("COLUMNS", "250")
    text = 'hosts = ["a", "b"]\n[[faults]]\nkind = "corrupt"\nstep = 11\n' + KILL.replace("6", "12")
    ended = truestep(capsys, "chaos", recipe, "--plan", plan_of(tmp_path, text))
    assert ended.code == 0, ended.out + ended.err
    assert "2 of 2 faults as expected; the run ended with exit code 0" in ended.out
    assert re.search(r"as expected +a bit flipped in the newest checkpoint at step 1[12]", ended.out)
    assert re.search(r"as expected +SIGKILL of rank 1 at step 1[2-4]", ended.out)
    assert "passed over the checkpoint of step 10" in ended.out and "located: yes" in ended.out
    run_dir = tmp_path / "runs" / "small"
    page = (run_dir / "chaos.html").read_text()
    assert "2 of 2 faults as expected" in page and "SIGKILL of rank 1" in page and "<svg" in page
    log = [record.data for record in read(run_dir)]
    named = [(data.rank, data.host) for data in log if type(data).__name__ == "Fault" and data.kind == "exit"]
    assert named == [(1, "b")] and verify(run_dir).records > 0
    truestep(capsys, "chaos", recipe, "--plan", tmp_path / "plan.toml").refused("holds a run already", "run.name=")


@pytest.mark.slow
def test_one_of_each_on_one_machine(capsys, tmp_path):
    """Three replicas: one is stopped for a while, a bit flips on one, which is named and left out, files of one cannot
    grow, one is slow."""
    body = small_run.recipe(tmp_path, tokens=60 * 12 * 32)
    body["checkpoint"] |= {"every": 10, "drill_every": "0s"}
    mesh = {"dp_replicate": "auto", "dp_shard": 1}
    body["machine"] |= {"processes": 3, "elastic": {"min": 2}, "mesh": mesh}
    body |= {"numerics": {"reduction": "exact"}, "sentinel": {"digest_share": 1.0}}
    text = """
    [[faults]]
    kind = "stop"
    rank = 0
    step = 4
    seconds = "1s"
    [[faults]]
    kind = "flip"
    site = "state"
    rank = 1
    step = 14
    expect = "located"
    [[faults]]
    kind = "fill"
    rank = 1
    step = 28
    seconds = "3s"
    bytes = "4KiB"
    [[faults]]
    kind = "slow"
    rank = 1
    step = 45
    steps = 5
    expect = "tolerated"
    """
    ended = truestep(capsys, "chaos", write_recipe(tmp_path, body), "--plan", plan_of(tmp_path, text))
    assert "4 of 4 faults as expected; the run ended with exit code 0" in ended.out, ended.out
    assert ended.code == 0


@pytest.mark.slow
def test_a_machine_that_is_cut_off(capsys, tmp_path):
    """It is missed within ten seconds, in which rank 0 stands still, so that the run is not over by then; the run needs
    it, waits, and goes on with it when it is back."""
    body = small_run.recipe(tmp_path)
    body["checkpoint"] |= {"drill_every": "0s"}
    body["machine"] |= {"elastic": {"min": 2, "max": 2}}
    text = """
    [joining]
    b = 1
    [[faults]]
    kind = "partition"
    host = "b"
    step = 12
    seconds = "15s"
    [[faults]]
    kind = "stop"
    rank = 0
    step = 13
    seconds = "14s"
    """
    ended = truestep(capsys, "chaos", write_recipe(tmp_path, body), "--plan", plan_of(tmp_path, text))
    assert "2 of 2 faults as expected; the run ended with exit code 0" in ended.out, ended.out


@pytest.mark.parametrize(
    "text, parts",
    [
        ("faults = []", ["faults is empty; write at least one"]),
        ("[[faults]]\nkind = 'kil'\nstep = 1", ['faults.0.kind is "kil"']),
        ("[[faults]]\nkind = 'kill'\nstep = 1", ['faults.0.rank is missing, which kind = "kill" needs']),
        (KILL + "factor = 2.0", ['faults.0.factor has no effect on kind = "kill"; take it out']),
        (KILL + "stepp = 2", ["faults.0.stepp is not a field; did you mean 'step'?"]),
        (KILL.replace("6", "0"), ["faults.0.step is 0"]),
        (KILL.replace("1", "2"), ["faults.0.rank is 2, and the run has 2 processes", "name one from 0 to 1"]),
        ("[[faults]]\nkind = 'flip'\nstep = 1", ["faults.0.site is missing"]),
        ("[[faults]]\nkind='partition'\nstep=1\nhost='b'\nseconds='1s'", ["faults.0.host is 'b'", "joining: none"]),
        ("[[faults]\n", ["plan.toml is not TOML"]),
    ],
)
def test_a_plan_that_is_refused(capsys, recipe, tmp_path, text, parts):
    truestep(capsys, "chaos", recipe, "--plan", plan_of(tmp_path, text)).refused(*parts)
    assert not (tmp_path / "runs" / "small").exists()


def test_a_plan_that_is_not_there(capsys, recipe, tmp_path):
    truestep(capsys, "chaos", recipe, "--plan", tmp_path / "none.toml").refused("none.toml cannot be read")


def test_corrupting_an_object_store_is_refused(capsys, recipe, tmp_path):
    plan = plan_of(tmp_path, "[[faults]]\nkind = 'corrupt'\nstep = 1")
    ended = truestep(capsys, "chaos", recipe, "--plan", plan, "--set", "checkpoint.url=s3://bucket/prefix")
    ended.refused("needs checkpoints in a folder", "s3://bucket/prefix")


def test_flips_are_written_as_the_injector_reads_them(recipe, tmp_path):
    faults = [Fault(kind="kill", rank=0, step=1)]
    faults += [Fault(kind="flip", site=site, rank=1, step=3, tensor="embed.weight", bit=5) for site in SITES]
    storm = Storm(load(str(recipe)), [], Chaos(faults=faults))
    storm._folder = tmp_path
    planned = storm._prepare()
    read_back = read_plan(tmp_path / "flips.json")
    assert [flip.site for flip in read_back] == list(SITES)
    assert {(flip.step, flip.rank, flip.tensor, flip.bit) for flip in read_back} == {(3, 1, "embed.weight", 5)}
    notes = [one.strike.note.name for one in planned if one.fault.kind == "flip"]
    assert notes == [str(number) for number in range(len(SITES))] and planned[1].strike.begin([]) is not None
    (tmp_path / "flips.json.struck").mkdir()
    (tmp_path / "flips.json.struck" / "0").write_text("host1")
    storm._poll(planned, [])
    assert planned[1].injection.host == "host1" and planned[1].injection.step == 3 and planned[2].waiting
    assert json.loads((tmp_path / "flips.json").read_text())["faults"][0]["sticky"] is False


def test_what_takes_longer_than_the_plan_allows_is_ended(recipe, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef")
    waits = ["node", f"127.0.0.1:{free_port()}", "--token-file", str(tmp_path / "token")]  # nobody is there
    plan = Chaos.model_validate({"deadline": "1500ms", "faults": [{"kind": "kill", "rank": 0, "step": 1}]})
    ended = Storm(load(str(recipe)), waits, plan).carry_out()
    assert ended.late and ended.injections[0].at_s is None
    assert ended.injections[0].why_not == "no rank that is meant has begun step 1"


def test_where_checkpoints_lie(recipe, tmp_path):
    resolved = load(str(recipe))
    assert checkpoint_folders(resolved) == [tmp_path / "runs" / "small" / "checkpoints" / "base"]
    elsewhere = load(str(recipe), [f"checkpoint.url={tmp_path / 'else'}"])
    assert checkpoint_folders(elsewhere) == [tmp_path / "else" / "small" / "base"]


def test_the_plan_of_the_guide_is_sound(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guide" / "goodput.md").read_text()
    plans = re.findall(r"```toml plan\n(.*?)```", page, re.DOTALL)
    assert plans
    for text in plans:
        assert load_plan(plan_of(tmp_path, text)).faults
