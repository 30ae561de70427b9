"""Saves training state: copies it at once, writes it in the background, commits it when every rank's part is there."""

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from truestep.checkpoint.catalogue import Committed
from truestep.checkpoint.codec import plan_from_json, plan_to_json
from truestep.checkpoint.control import Group, KeyValue, Round
from truestep.checkpoint.manifest import plain
from truestep.checkpoint.plans import StagedPlanner, owned_plans
from truestep.checkpoint.staging import Stage, as_they_are
from truestep.checkpoint.writer import BlockWriter, result_from_json, result_to_json
from truestep.errors import CheckpointError
from truestep.numerics.pieces import Piece, find_aliases, pieces_of
from truestep.storage.interface import Store

LAST_WORDS_S = 10.0


@dataclass(frozen=True)
class SaveResult:
    """How a save ended: `stall_s` in the caller, `total_s` until the commit, bytes of all ranks, or why it failed."""

    step: int
    ok: bool
    stall_s: float
    total_s: float
    num_bytes: int = 0
    commit: str = ""
    manifest_sha256: str = ""
    error: str = ""


@dataclass(frozen=True)
class Save:
    """A save under way."""

    step: int
    stall_s: float
    future: Future[SaveResult]

    def result(self) -> SaveResult:
        """Wait for the end. A failed save is a result, not an exception: the run may go on."""
        return self.future.result()


@dataclass(frozen=True)
class _Job:
    step: int
    round: Round
    planner: StagedPlanner
    writer: BlockWriter


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
        self.pending: Future[SaveResult] | None = None
        self.thread: threading.Thread | None = None
        self.results: SimpleQueue[SaveResult] = SimpleQueue()
        atexit.register(self._abandon)

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor | Piece], extra: dict[str, Any], asynchronous: bool
    ) -> Save:
        """Save what this rank holds of `tensors` (pieces, DTensors, or plain tensors, which all ranks hold whole) and,
        from rank 0, `extra` (plain JSON). Names may differ between ranks. What several ranks hold is written by one.

        When this returns, the caller may change everything (asynchronous) or the save has ended. It first waits for
        the save before, whose buffers it uses again.
        """
        began = time.monotonic()
        self.wait()
        step_round = self.group.round("save")
        try:
            job = self._prepare(step, tensors, extra, asynchronous, step_round)
        except Exception as error:
            failed = self._failed(step, step_round, error)
            future = self._start(lambda: failed, began, None)
        else:
            self.store.event("staged")
            stall_s = time.monotonic() - began
            future = self._start(lambda: self._run(job), began, stall_s if asynchronous else None)
        self.pending = future
        if not asynchronous:
            future.result()
        return Save(step, time.monotonic() - began, future)

    def finished(self) -> list[SaveResult]:
        """Results of saves that ended since the last call."""
        found = []
        while True:
            try:
                found.append(self.results.get_nowait())
            except Empty:
                return found

    def wait(self) -> None:
        """Wait until no save is under way."""
        if self.pending is not None:
            self.pending.result()

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
        step: int,
        tensors: Mapping[str, torch.Tensor | Piece],
        extra: dict[str, Any],
        asynchronous: bool,
        step_round: Round,
    ) -> _Job:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor | Piece):
                raise CheckpointError(f"{name} is a {type(tensor).__name__}, not a tensor; put plain values into extra")
        writer = BlockWriter(self.store, Committed(step, self.attempt), self.group.rounds, self.rank, self.block_bytes)
        pieces = pieces_of(tensors)
        writer.extra, writer.facts, writer.aliases = plain(extra, "extra"), self.facts, find_aliases(pieces)
        for name in writer.aliases:
            del pieces[name]
        parts = {name: piece.local.detach() for name, piece in pieces.items()}
        # Planning looks at nothing but where the pieces lie, so it can wait for the background.
        planner = StagedPlanner(pieces, self.stage.copy(parts) if asynchronous else as_they_are(parts))
        return _Job(step, step_round, planner, writer)

    def _start(self, work: Callable[[], SaveResult], began: float, stall_s: float | None) -> Future[SaveResult]:
        """Run in a thread that never keeps a failing process from ending. Without a stall of its own, all was stall."""
        future: Future[SaveResult] = Future()

        def run() -> None:
            try:
                result = work()
                total_s = time.monotonic() - began
                result = replace(result, total_s=total_s, stall_s=total_s if stall_s is None else stall_s)
                self.results.put(result)
                future.set_result(result)
            except BaseException as error:
                future.set_exception(error)

        self.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self.thread.start()
        return future

    def _run(self, job: _Job) -> SaveResult:
        """The background part; every failure becomes a result and a message to the other ranks."""
        try:
            verdict = self._write(job)
        except Exception as error:
            return self._failed(job.step, job.round, error)
        return SaveResult(job.step, True, 0.0, 0.0, commit=job.writer.committed.key, **verdict)

    def _write(self, job: _Job) -> dict[str, Any]:
        talk, writer, planner, event = job.round, job.writer, job.planner, self.store.event
        proposal = writer.prepare_local_plan(planner.create_local_plan())
        items = plan_to_json(proposal)
        talk.post(f"plan/{self.rank}", {"items": items, "copies": planner.copies, "aliases": writer.aliases})
        event("plan sent")
        if self.rank == 0:
            metadata = self._assign(job)
        plan = planner.finish_plan(plan_from_json(talk.take_once(f"assign/{self.rank}")))
        event("part assigned")
        talk.post(f"report/{self.rank}", result_to_json(writer.write_data(plan, planner).wait()))
        event("report sent")
        if self.rank == 0:
            writer.finish(metadata, [result_from_json(rows) for rows in talk.gather("report")])
            talk.post("verdict", {"manifest_sha256": writer.manifest_sha256, "num_bytes": writer.manifest.num_bytes})
            event("verdict sent")
        return talk.take("verdict")

    def _assign(self, job: _Job) -> Metadata:
        """Rank 0: merge all plans (what several ranks hold goes to one of those that have least to write), check that
        they cover every tensor, give them out."""
        proposals = job.round.gather("plan")
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
            job.round.post(f"assign/{rank}", plan_to_json(plan))
        self.store.event("parts assigned")
        return metadata

    def _failed(self, step: int, step_round: Round, error: Exception) -> SaveResult:
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        try:
            step_round.fail(text)
        except RuntimeError as lost:
            text = f"{text}; the other ranks could not be told ({lost})"
        return SaveResult(step, False, 0.0, 0.0, error=text)
