"""A real S3 server behind a network that slows down, breaks, repeats, answers late or not at all: no save that was
reported well is lost, nothing is silently wrong, failures are one sentence, later saves work."""

import uuid
from datetime import timedelta

import pytest
import torch

from tests.checkpoint.attempts import attempt, blank, check, cut, extra, same, state
from tests.fronts import front_of, hold, keep, lose_answer, path, reset, slow_down, stale, twice
from truestep.checkpoint.catalogue import Committed, begin_epoch
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.load import load_newest
from truestep.checkpoint.sweep import plan_sweep, sweep
from truestep.errors import StorageError
from truestep.storage import objects
from truestep.storage.objects import ObjectStore

pytestmark = pytest.mark.s3
BIG = {"model.big": torch.arange(5 << 20, dtype=torch.int32)}
PARTS = 4


@pytest.fixture
def front(seaweed):
    with front_of(seaweed) as front:
        yield front
        assert not front.unused()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few retries, small parts: the same code, sooner."""
    retries = {
        "max_retries": 3,
        "retry_timeout": timedelta(seconds=5),
        "backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2},
    }
    monkeypatch.setattr(objects, "RETRIES", retries)
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)


class Run:
    """A run whose store is behind the front, and the same bucket without it."""

    def __init__(self, front, seaweed, deadline_s=30.0):
        folder = uuid.uuid4().hex
        self.true = ObjectStore(f"{seaweed.url}/{folder}", seaweed.options)
        assert attempt(self.true, [1])[1][0].ok
        self.store = ObjectStore(f"{front.server.url}/{folder}", front.server.options)
        number = begin_epoch(self.store).number
        self.checkpointer = Checkpointer(
            self.store, attempt=number, rank=0, world=1, kv=None, block_bytes=512, deadline_s=deadline_s
        )

    def save(self, step, tensors=None):
        return self.checkpointer.save(step, tensors or cut(state(step), 0, 1), extra(step), asynchronous=True)

    def ends(self, must, may=()):
        """The next save works, and what must be there is there."""
        saved = self.save(9).result()
        assert saved.ok, saved.error
        self.checkpointer.close()
        check(self.true, {*must, 9}, may)


@pytest.fixture
def run(front, seaweed):
    return Run(front, seaweed)


DATA, MANIFEST, COMMIT = r"rank-00000\.bin", r"manifest\.json", r"commits/000000000002"


@pytest.mark.parametrize("what", [DATA, MANIFEST, COMMIT, "list-type=2"])
@pytest.mark.parametrize(("times", "well"), [(2, True), (20, False)])
def test_slow_down(run, front, what, times, well):
    front.on(path(what), slow_down, times)
    saved = run.save(2).result()
    assert saved.ok == well, saved.error
    if not well:
        assert "SlowDown" in saved.error and "\n" not in saved.error
    front.forget()
    run.ends({1, *([2] if well else [])})


@pytest.mark.parametrize("what", [DATA, MANIFEST, COMMIT])
@pytest.mark.parametrize("act", [reset, lose_answer])
def test_the_connection_breaks_once(run, front, what, act):
    """A put of bytes is repeated by itself; a commit is looked for when its answer is lost."""
    front.on(path(what, "PUT"), act)
    saved = run.save(2).result()
    assert saved.ok or (what == COMMIT and act is reset), saved.error
    run.ends({1, *([2] if saved.ok else [])})


@pytest.mark.parametrize("act", [reset, lose_answer])
def test_the_connection_breaks_for_a_while(run, front, act):
    front.on(path(COMMIT), act, 50)
    saved = run.save(2).result()
    assert not saved.ok and "\n" not in saved.error
    front.forget()
    run.ends({1}, may={2})


@pytest.mark.parametrize("what", [DATA, MANIFEST, COMMIT])
def test_a_request_that_the_network_repeats(run, front, what):
    front.on(path(what, "PUT"), twice)
    assert run.save(2).result().ok
    run.ends({1, 2})


def _big(run, front):
    """The bytes of a save of step 2 in several parts come back right; whether it was reported well."""
    saved = run.save(2, BIG).result()
    assert saved.ok or "\n" not in saved.error
    front.forget()
    if saved.ok:
        target = {name: torch.zeros_like(x) for name, x in BIG.items()}
        loaded = load_newest(run.true, target)
        assert loaded.step == 2 and torch.equal(target["model.big"], BIG["model.big"])
    run.checkpointer.close()
    return saved


@pytest.mark.parametrize("act", [slow_down, reset, lose_answer, twice])
def test_one_part_of_an_upload(run, front, act):
    front.on(lambda request: request.is_part and "partNumber=2" in request.path, act)
    assert _big(run, front).ok
    assert len({request.path for request in front.seen if request.is_part}) == PARTS


@pytest.mark.parametrize("act", [reset, lose_answer])
def test_the_end_of_an_upload(run, front, act):
    """Its lost answer: the repeated request finds no such upload, so the save may fail, but nothing is wrong."""
    front.on(lambda request: request.completes_upload, act)
    saved = _big(run, front)
    assert saved.ok or act is lose_answer, saved.error


def test_an_upload_that_fails_leaves_no_parts_behind(run, front):
    front.on(lambda request: request.is_part and "partNumber=2" in request.path, slow_down, 50)
    saved = _big(run, front)
    assert not saved.ok and "SlowDown" in saved.error
    begun = [request for request in front.seen if request.method == "POST" and "uploads" in request.path]
    ended = [request for request in front.seen if request.method == "DELETE" and "uploadId=" in request.path]
    assert len(begun) == len(ended) == 1


def test_an_upload_that_cannot_even_be_given_up(run, front):
    """The network is gone from the second part on: the parts stay in the bucket, harm nobody, and the sweeper finds and
    takes them."""
    front.on(lambda request: request.is_part and "partNumber=2" in request.path, reset, 50)
    front.on(lambda request: request.method == "DELETE" and "uploadId=" in request.path, reset, 50)
    saved = run.save(2, BIG).result()
    assert not saved.ok and "\n" not in saved.error
    front.forget()
    (orphan,) = plan_sweep(run.true, older_s=0.0).uploads
    assert "steps/000000000002-000002" in orphan.key
    run.ends({1})
    assert attempt(run.true, [10])[0] == 9
    sweep(run.true, plan_sweep(run.true, older_s=0.0))
    assert plan_sweep(run.true, older_s=0.0).uploads == []
    check(run.true, {1, 9, 10})


def test_a_list_from_before(run, front, seaweed):
    """The next attempt is shown what was there before the newest commit: it asks again until it sees its own fence."""
    front.on(lambda request: request.lists and "commits" in request.path, keep)
    begin_epoch(run.store)  # remembers a list without step 2
    run.checkpointer.close()
    assert attempt(run.true, [2])[1][0].ok
    front.on(lambda request: request.lists and "commits" in request.path, stale, 3)
    resumed, (saved,) = attempt(run.store, [3])
    assert resumed == 2 and saved.ok, saved.error
    check(run.true, {1, 2, 3})


def test_lists_that_stay_behind_are_refused(run, front, monkeypatch):
    monkeypatch.setattr("truestep.checkpoint.catalogue.LATE_LISTS_S", (0.0, 0.01))
    commits = lambda request: request.lists and "commits" in request.path  # noqa: E731
    front.on(commits, keep)
    assert run.save(2).result().ok
    front.on(commits, stale, 1000)
    saved = run.save(3).result()
    assert not saved.ok and "lists what was there before" in saved.error
    with pytest.raises(StorageError, match="lists what was there before"):
        begin_epoch(run.store)
    front.forget()
    run.checkpointer.close()
    check(run.true, {1, 2}, may={3})


@pytest.mark.parametrize("what", [DATA, COMMIT])
def test_an_answer_that_comes_after_the_deadline(front, seaweed, what):
    run = Run(front, seaweed, deadline_s=0.5)
    front.on(path(what, "PUT"), hold)
    save = run.save(2)
    assert front.arrived.wait(30)
    saved = save.result()
    assert not saved.ok and saved.error == "the store has not taken it within 0.5 s"
    thread, run.checkpointer.group.deadline_s = run.checkpointer.thread, 30.0
    assert run.save(3).result().ok
    front.freed.set()
    thread.join(30)
    run.ends({1, 3}, may={2} if what == COMMIT else ())


def test_reads_that_break(run, front):
    """Resets and slow-downs of reads are repeated; if the newest cannot be read at all, the older one, loudly."""
    assert run.save(2).result().ok
    front.on(path(DATA, "GET"), reset, 2)
    front.on(path(MANIFEST, "GET"), slow_down, 2)
    targets = blank()
    loaded = load_newest(run.store, targets)
    assert loaded.step == 2 and loaded.fell_back == []
    same(targets, 2)
    front.on(path("steps/.*000002", "GET"), slow_down, 50)
    loaded = load_newest(run.store, targets)
    assert loaded.step == 1 and "SlowDown" in loaded.fell_back[0] and Committed(2, 2).key in loaded.fell_back[0]
    same(targets, 1)
    front.forget()
    run.ends({1, 2})
