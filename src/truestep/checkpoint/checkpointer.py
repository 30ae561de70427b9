"""Saves training state: copies it at once, writes it in the background, commits it when every rank's part is there."""

import atexit
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from truestep.checkpoint.catalogue import Committed, Superseded
from truestep.checkpoint.codec import plan_from_json, plan_to_json
from truestep.checkpoint.control import Group, KeyValue
from truestep.checkpoint.manifest import FINGERPRINTS, plain
from truestep.checkpoint.pending import Pending, Save, SaveResult
from truestep.checkpoint.plans import StagedPlanner, owned_plans
from truestep.checkpoint.staging import Stage, as_they_are
from truestep.checkpoint.upkeep import Upkeep
from truestep.checkpoint.writer import BlockWriter, result_from_json, result_to_json
from truestep.errors import CheckpointError, UserError
from truestep.numerics.fingerprint import added, fingerprints
from truestep.numerics.pieces import Piece, find_aliases, pieces_of
from truestep.storage.interface import Store

LAST_WORDS_S = 10.0


@dataclass(frozen=True)
class _Job:
    pending: Pending
    planner: StagedPlanner
    writer: BlockWriter
    printed: dict[str, Piece]  # what fingerprints are made of, under all names
    first: Callable[[], None] | None


class Checkpointer:
    """Writes the checkpoints of one attempt. All ranks construct it and call `save` together.

    store: where to. attempt: number from `begin_epoch`, the same on all ranks. kv: the job's c10d store (None for one
    process). block_bytes: most bytes one checksum covers. deadline_s: a save that takes longer is abandoned by all.
    facts: plain JSON for every manifest (what digest, mesh, versions). stopped: once set, no save waits any longer.
    """

    def __init__(
        self,
        store: Store,
        *,
        attempt: int,
        rank: int,
        world: int,
        kv: KeyValue | None,
        block_bytes: int,
        deadline_s: float,
        facts: Mapping[str, Any] | None = None,
        stopped: threading.Event | None = None,
    ):
        if block_bytes < 16 or block_bytes % 16:
            raise CheckpointError(f"a block of {block_bytes} bytes is not a multiple of 16; correct checkpoint.block")
        self.store, self.attempt, self.rank, self.block_bytes = store, attempt, rank, block_bytes
        own = None if kv is None else kv.clone()  # a connection of its own: the caller must never wait for it
        self.group = Group.of(own, rank, world, deadline_s, f"save-{attempt}", stopped)
        self.facts = {"torch": torch.__version__, "world": world, **plain(dict(facts or {}), "facts")}
        self.stage = Stage()
        self.pending: Pending | None = None
        self.thread: threading.Thread | None = None
        self.results: SimpleQueue[SaveResult] = SimpleQueue()
        self.upkeep: Upkeep | None = None  # on rank 0, where what is committed is to be verified and retained
        atexit.register(self._abandon)

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | Piece],
        extra: dict[str, Any],
        asynchronous: bool,
        unchanged: Collection[str] = (),
        first: Callable[[], None] | None = None,
    ) -> Save:
        """Save what this rank holds of `tensors` (pieces, DTensors, or plain tensors, which all ranks hold whole) and,
        from rank 0, `extra` (plain JSON). Names may differ between ranks. What several ranks hold is written by one.

        When this returns, the caller may change everything (asynchronous) or the save has ended; but for the tensors
        `unchanged`, which it promises to change only after `release`. Their fingerprints are made of them, and so show
        damage to the copies as well; those of others are made of the copies. `first` is done in the background before
        this rank's part counts. A save first waits for the one before, whose buffers it uses again.
        """
        began = time.monotonic()
        self.wait()
        if self.pending is not None and self.pending.given_up:
            self.stage = Stage()  # a thread that is stuck may still read the old one
        self.pending = pending = Pending(step, self.group.round("save"), began, None)
        pending.future.add_done_callback(self._ended)
        try:
            job = self._prepare(pending, tensors, extra, asynchronous, unchanged, first)
        except Exception as error:
            pending.released.set()
            pending.end(self._failed(pending, error))
        else:
            self.store.event("staged")
            pending.stall_s = time.monotonic() - began if asynchronous else None
            # In a thread that never keeps a failing process from ending.
            self.thread = threading.Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
            self.thread.start()
            if not asynchronous:
                pending.result()
        return Save(step, time.monotonic() - began, pending)

    def _ended(self, future: Future[SaveResult]) -> None:
        if future.exception() is None:  # else whoever waits for it gets it
            self.results.put(future.result())

    def finished(self) -> list[SaveResult]:
        """Results of saves that ended since the last call."""
        if self.pending is not None and self.pending.overdue:
            self.pending.give_up()
        found = []
        while True:
            try:
                found.append(self.results.get_nowait())
            except Empty:
                return found

    def wait(self) -> None:
        """Wait until no save is under way: at most until the deadline of the one that is."""
        if self.pending is not None:
            self.pending.result()

    def release(self) -> None:
        """Wait until the save under way has no more need of tensors that were to stay unchanged."""
        if self.pending is not None:
            self.pending.released.wait()

    def close(self) -> None:
        """Wait for the last save and give back the staging buffers.

        A process that ends without this loses a save under way; none is half-committed.
        """
        self.wait()
        atexit.unregister(self._abandon)
        self.stage.buffers.clear()

    def abandon(self) -> None:
        """Give a save under way up without waiting for it. After `close` there is nothing to give up."""
        self.group.stopped.set()
        atexit.unregister(self._abandon)
        if self.thread is not None and self.thread.is_alive():
            atexit.register(self.thread.join, LAST_WORDS_S)

    def _abandon(self) -> None:
        """The process ends, perhaps by an error, while other ranks may never answer: do not wait for them."""
        self.group.stopped.set()
        if self.thread is not None:
            # To its very end: a thread that drops a C++ object when the interpreter is gone aborts the process.
            self.thread.join(LAST_WORDS_S)

    def _prepare(
        self,
        pending: Pending,
        tensors: Mapping[str, torch.Tensor | Piece],
        extra: dict[str, Any],
        asynchronous: bool,
        unchanged: Collection[str],
        first: Callable[[], None] | None,
    ) -> _Job:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor | Piece):
                raise CheckpointError(f"{name} is a {type(tensor).__name__}, not a tensor; put plain values into extra")
        committed, serial = Committed(pending.step, self.attempt), self.group.rounds
        writer = BlockWriter(self.store, committed, serial, self.rank, self.block_bytes, pending.round.check)
        pieces = pieces_of(tensors)
        aliases = find_aliases(pieces)
        writer.extra, writer.facts, writer.aliases = plain(extra, "extra"), self.facts, dict(aliases)
        parts = {name: piece.local.detach() for name, piece in pieces.items() if name not in aliases}
        staged = self.stage.copy(parts) if asynchronous else as_they_are(parts)
        copies = {name: replace(piece, local=staged[aliases.get(name, name)]) for name, piece in pieces.items()}
        printed = copies | {name: replace(pieces[name], local=pieces[name].local.detach()) for name in unchanged}
        # Planning looks at nothing but where the pieces lie, so it can wait for the background.
        planner = StagedPlanner({name: piece for name, piece in pieces.items() if name not in aliases}, staged)
        return _Job(pending, planner, writer, printed, first)

    def _run(self, job: _Job) -> None:
        """The background part; every failure becomes a result and a message to the other ranks."""
        pending = job.pending
        try:
            with ThreadPoolExecutor(1, "fingerprints") as beside:
                prints = beside.submit(_fingerprints, job.printed, pending.released)
                written = self._write(job, prints)
            result = SaveResult(pending.step, True, commit=job.writer.committed.key, **written)
        except Exception as error:
            result = self._failed(pending, error)
        except BaseException as error:
            pending.future.set_exception(error)
            return
        pending.end(result)

    def _write(self, job: _Job, prints: Future[dict[str, int]]) -> dict[str, Any]:
        talk, writer, planner, event = job.pending.round, job.writer, job.planner, self.store.event
        proposal = writer.prepare_local_plan(planner.create_local_plan())
        items = plan_to_json(proposal)
        talk.post(f"plan/{self.rank}", {"items": items, "copies": planner.copies, "aliases": writer.aliases})
        event("plan sent")
        if self.rank == 0:
            metadata = self._assign(job)
        plan = planner.finish_plan(plan_from_json(talk.take_once(f"assign/{self.rank}")))
        event("part assigned")
        if job.first is not None:
            job.first()
        chunks = result_to_json(writer.write_data(plan, planner).wait())
        talk.post(f"report/{self.rank}", {"chunks": chunks, FINGERPRINTS: prints.result()})
        event("report sent")
        if self.rank > 0:
            return talk.take("verdict")
        reports = talk.gather("report")
        whole = added(report[FINGERPRINTS] for report in reports)
        writer.facts = writer.facts | {FINGERPRINTS: whole}
        writer.finish(metadata, [result_from_json(report["chunks"]) for report in reports])
        verdict = {"manifest_sha256": writer.manifest_sha256, "num_bytes": writer.manifest.num_bytes}
        talk.post("verdict", verdict)
        event("verdict sent")
        return verdict | {FINGERPRINTS: whole}

    def _assign(self, job: _Job) -> Metadata:
        """Rank 0: merge all plans (what several ranks hold goes to one of those that have least to write), check that
        they cover every tensor, give them out."""
        proposals = job.pending.round.gather("plan")
        plans = [plan_from_json(proposal["items"]) for proposal in proposals]
        for proposal in proposals:
            job.writer.aliases.update(proposal["aliases"])
        for rank, plan in enumerate(plans):
            for item in plan.items:
                if item.index.fqn in job.writer.aliases:
                    raise CheckpointError(
                        f"{item.index.fqn}: rank {rank} holds it apart, another rank ties it to a tensor"
                    )
        plans = owned_plans(job.writer.prepare_global_plan(plans), [proposal["copies"] for proposal in proposals])
        plans, metadata = job.planner.create_global_plan(plans)
        for rank, plan in enumerate(plans):
            job.pending.round.post(f"assign/{rank}", plan_to_json(plan))
        self.store.event("parts assigned")
        return metadata

    def _failed(self, pending: Pending, error: Exception) -> SaveResult:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        text, superseded = " ".join(text.split()), isinstance(error, Superseded)
        try:
            pending.round.fail(text, superseded)
        except RuntimeError as lost:
            text = f"{text}; the other ranks could not be told ({lost})"
        return SaveResult(pending.step, False, error=text, superseded=superseded)


def _fingerprints(pieces: Mapping[str, Piece], done: threading.Event) -> dict[str, int]:
    """Of this rank's share of every tensor that it holds. `done` is set when the tensors were read."""
    try:
        return dict(zip(pieces, fingerprints(pieces, list(pieces)).tolist()))
    finally:
        done.set()
