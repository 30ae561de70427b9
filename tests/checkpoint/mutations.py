"""The safety checks of the checkpoint package, each with one change to its source that takes it away.

A change is made in memory: the mutated source of the module is compiled, and every function and method of the module in
use gets the code of its mutated twin, so that all who have imported it run the mutant. A text that is not found exactly
once fails: find where that check is done now.
"""

import importlib
import inspect
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoint import quick, test_commit, test_fire_disk, test_retention, test_save

LONGEST_S = 90.0


@dataclass(frozen=True)
class Mutation:
    """In `module`, `old` becomes `new`; then `check(folder)` must fail."""

    module: str
    old: str
    new: str
    check: Callable[[Path], object]


def without(module: str, old: str, check: Callable[[Path], object]) -> Mutation:
    """`old` is taken away."""
    return Mutation(module, old, "", check)


def never(module: str, condition: str, check: Callable[[Path], object]) -> Mutation:
    """What is done if `condition` holds is not done."""
    return Mutation(module, f"if {condition}:", "if False:", check)


def mutate(mutation: Mutation) -> None:
    """Change the running code of this process."""
    module = importlib.import_module(f"truestep.{mutation.module}")
    source = inspect.getsource(module)
    assert source.count(mutation.old) == 1, f"{source.count(mutation.old)} times in {module.__file__}: {mutation.old}"
    twin = types.ModuleType(module.__name__)
    twin.__file__ = module.__file__
    try:
        # Dataclasses look their own module up while it runs.
        sys.modules[module.__name__] = twin
        exec(compile(source.replace(mutation.old, mutation.new), str(module.__file__), "exec"), vars(twin))
    finally:
        sys.modules[module.__name__] = module
    changed = 0
    for mine, theirs in _functions(module, twin):
        changed += mine.__code__ != theirs.__code__
        mine.__code__ = theirs.__code__
    assert changed, "the change is in no function"


def _functions(module: object, twin: object) -> Iterator[tuple[types.FunctionType, types.FunctionType]]:
    """The functions of a module, and the methods of its classes, with those of its twin of the same name."""
    for name in vars(module).keys() & vars(twin).keys():
        mine, theirs = _bare(vars(module)[name]), _bare(vars(twin)[name])
        alike = type(mine) is type(theirs) and getattr(mine, "__module__", 0) == getattr(theirs, "__module__", 1)
        if mine is theirs or not alike:
            continue  # imported, or data
        if isinstance(mine, type):
            yield from _functions(mine, theirs)
        elif isinstance(mine, types.FunctionType) and mine.__code__.co_freevars == theirs.__code__.co_freevars:
            yield mine, theirs


def _bare(member: object) -> Any:
    """The function in a property or a static method."""
    return getattr(member, "__func__", None) or getattr(member, "fget", None) or member


def fails(check: Callable[[Path], object], folder: Path, mutation: Mutation | None = None) -> str:
    """Run a check in a forked process, mutated or not: how it failed, or nothing. One that never ends is no finding."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b""
        try:
            os.close(ours)
            folder.mkdir(parents=True)
            if mutation:
                mutate(mutation)
            check(folder)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".encode()
        finally:
            os.write(theirs, said[:4000])
            os._exit(0)
    os.close(theirs)
    until = time.monotonic() + LONGEST_S
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"the check did not end within {LONGEST_S} s")
        time.sleep(0.005)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the check's process ended with {os.waitstatus_to_exitcode(status)}"
    with open(ours, "rb") as pipe:
        return pipe.read().decode(errors="replace")


STORE, CATALOGUE, MANIFEST = "storage.local", "checkpoint.catalogue", "checkpoint.manifest"
LOAD, WRITER, CHECKPOINTER = "checkpoint.load", "checkpoint.writer", "checkpoint.checkpointer"
RETENTION = "checkpoint.retention"

MUTATIONS = {
    # What survives a power cut.
    "a file is not synced": without(STORE, "                self.disk.sync(handle)\n", test_fire_disk.power_cuts),
    "synced before all is written": Mutation(
        STORE,
        '                written = self._append(handle, key, parts)\n                self.event(f"{key}: written")\n'
        "                self.disk.sync(handle)\n",
        "                self.disk.sync(handle)\n                written = self._append(handle, key, parts)\n"
        '                self.event(f"{key}: written")\n',
        test_fire_disk.power_cuts,
    ),
    "the folder of a new name is not synced": Mutation(
        STORE,
        "            self.disk.unlink(temporary)\n            self.disk.sync_folder(path.parent)\n",
        "            self.disk.unlink(temporary)\n",
        test_fire_disk.power_cuts,
    ),
    "the folder of a new folder is not synced": without(
        STORE, "        self.disk.sync_folder(parent)\n", test_fire_disk.power_cuts
    ),
    "a folder that is there counts as synced": Mutation(
        STORE, "(there and folder in self._durable)", "there", quick.power_cuts_after_kills
    ),
    "a name that may not survive counts": without(CATALOGUE, "    except Undurable:\n        raise\n", quick.undurable),
    # What a name holds.
    "create overwrites": Mutation(
        STORE,
        "            self.disk.link(temporary, path)\n",
        "            path.unlink(missing_ok=True)\n            self.disk.link(temporary, path)\n",
        quick.taken_name,
    ),
    "a taken name counts as created": Mutation(
        CATALOGUE, "        if present != data:\n", "        if not present:\n", quick.begin_at_once
    ),
    "serials are not part of names": without("checkpoint.sealed", "-{serial:04d}", quick.saved_again),
    # Who may commit.
    "no look for fences before a commit": without(
        CATALOGUE, '    _require_newest(store, committed, "")\n', test_commit.test_a_superseded_attempt_commits_nothing
    ),
    "no look for fences after a commit": without(
        CATALOGUE,
        "    _require_newest(store, committed, committed.key)\n",
        test_commit.test_a_commit_that_slipped_through_is_void,
    ),
    "commits are read before the fence is there": Mutation(
        CATALOGUE,
        "    number = _fence_off(store)\n    commits = read_catalogue(store, number).commits\n",
        "    commits = read_catalogue(store).commits\n    number = _fence_off(store)\n",
        test_commit.test_a_commit_between_the_look_and_the_epoch_is_not_lost,
    ),
    "every commit counts": Mutation(
        CATALOGUE,
        "if c.epoch == epoch.number or c.key in epoch.honours",
        "if c",
        test_commit.test_a_commit_that_slipped_through_is_void,
    ),
    "an attempt honours nothing": Mutation(
        CATALOGUE, "for commit in commits if commit.key not in quarantine]", "for commit in commits[:0]]", quick.resumes
    ),
    "the newest epoch is sorted as text": Mutation(
        CATALOGUE,
        "for number in sorted(begun, reverse=True):",
        "for number in sorted(begun, key=str, reverse=True):",
        quick.resumes,
    ),
    "a late list is believed": Mutation(
        CATALOGUE, "        if not expected or expected in keys:\n", "        if True:\n", quick.late_lists
    ),
    "a zombie goes on after SIGSTOP": Mutation(
        CATALOGUE, "    if newest > committed.epoch and created", "    if False and created", quick.zombie
    ),
    "a save that was given up commits": without(WRITER, "        self.check()\n", quick.hung_before_commit),
    "no deadline": never(
        "checkpoint.control",
        "time.monotonic() > self.deadline",
        test_save.test_a_silent_rank_is_given_up_at_the_deadline,
    ),
    # What is loaded.
    "blocks are not compared": Mutation("checkpoint.reader", "!= want.chunk.digest(block)", "== ''", quick.damaged),
    "the manifest's SHA-256 is not compared": Mutation(
        CATALOGUE, "hexdigest() != record.sha256", "hexdigest() == ''", quick.damaged
    ),
    "records are not compared with their seal": Mutation(
        "checkpoint.sealed", "isinstance(body, dict) and seal(body) == data", "isinstance(body, dict)", quick.damaged
    ),
    "the commit's step is not compared": Mutation(
        CATALOGUE,
        '(body["step"], body["epoch"]) != (committed.step, committed.epoch)',
        "False",
        quick.damaged,
    ),
    "the manifest's step is not compared": Mutation(
        CATALOGUE,
        "(manifest.step, manifest.epoch) != (committed.step, committed.epoch)",
        "False",
        quick.manifest_of_another_step,
    ),
    "the epoch's number is not compared": without(CATALOGUE, ' or body["epoch"] != number', quick.damaged),
    "the epoch is gone and nobody asks": Mutation(
        CATALOGUE, "if commit.epoch > epoch.number}", "if False}", quick.damaged
    ),
    "coverage is not checked": never(
        MANIFEST, "problem := cover_problem(entry.shape, [chunk.box for chunk in entry.chunks])", quick.uncovered
    ),
    "objects may have gaps": without(MANIFEST, "        if chunk.start != stop:\n            return None\n", quick.gap),
    "digests may be missing": never(MANIFEST, "len(chunk.blocks) != DIGEST_CHARS * chunk.num_blocks", quick.no_digests),
    "a start from nothing though there are commits": never(LOAD, 'notes or found["lost"]', quick.nothing_whole),
    "older steps without a note": Mutation(
        LOAD, "fell_back=[*lost, *uncommitted, *notes])", "fell_back=[])", quick.damaged
    ),
    "a commit that is gone is not missed": Mutation(
        LOAD, "        if each.key not in void\n", "        if False\n", quick.gone
    ),
    "shapes are not compared": never(LOAD, "have != want", quick.other_shape),
    "missing names are left as they are": never(LOAD, "missing", quick.missing_name),
    "ties are not compared": never(
        LOAD, "strict and apart and wanted[name].local.numel()", test_save.test_c41_shared_tensors
    ),
    "a rank that finds damage keeps it to itself": Mutation(
        LOAD,
        'if failures := group.agree("load", problem):',
        'if failures := group.agree("load", None):',
        quick.damage_on_one_rank,
    ),
    "quarantine is forgotten": Mutation(
        LOAD,
        "reversed(catalogue.commits) if c.key not in quarantine | marked.keys()]",
        "reversed(catalogue.commits)]",
        test_commit.test_quarantine_is_passed_over_and_forgotten_by_the_next_epoch,
    ),
    "a scrub compares nothing": Mutation("checkpoint.verify", "!= digest:", "== '':", quick.damaged),
    # What is saved.
    "objects are not looked at before the commit": never(WRITER, "present.get(key) != entry.size", quick.object_cut),
    "ranks may disagree about a shape": never(
        WRITER, "seen.setdefault(item.index.fqn, mine) != mine", test_save.test_ranks_that_disagree_about_a_shape
    ),
    "nobody owns a part and nobody asks": never(
        "checkpoint.plans", "problem := cover_problem(shapes[name], list(boxes))", quick.unowned
    ),
    "a tie of one rank alone": never(CHECKPOINTER, "item.index.fqn in job.writer.aliases", quick.tied_on_one_rank),
    "live tensors are written": Mutation(
        CHECKPOINTER,
        "self.stage.copy(parts) if asynchronous else as_they_are(parts)",
        "as_they_are(parts)",
        test_save.test_c37_async_save_keeps_the_state_of_the_call,
    ),
    "buffers are used again too soon": Mutation(
        CHECKPOINTER,
        "        began = time.monotonic()\n        self.wait()\n",
        "        began = time.monotonic()\n",
        test_save.test_c37_second_save_waits_for_the_staging_buffers,
    ),
    "buffers of a thread that hangs are used again": Mutation(
        CHECKPOINTER, "            self.stage = Stage()  # a", "            pass  # a", quick.hung_write
    ),
    "a save waits for ever": Mutation(
        "checkpoint.pending", "max(0.0, self._latest - time.monotonic())", "7.0", quick.hung_write
    ),
    "a store that overwrites is accepted": never("storage.probe", "not found.create_only", quick.lax_store),
    # What is deleted.
    "a commit takes another save's folder along": never(
        RETENTION, 'not folder.startswith(f"steps/{committed.name}-")', quick.folder_of_another
    ),
    "no look at marks before a deletion": never(RETENTION, "reason", quick.pinned_meanwhile),
    "what is gone is marked as kept": Mutation(
        RETENTION,
        '        raise CheckpointError(f"{store.url}/{committed.key}: is gone already")\n',
        '        fate = Fate(committed, "it is gone", Standing())\n',
        test_retention.test_two_that_delete_the_same,
    ),
}
