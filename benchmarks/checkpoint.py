"""Saving and loading beside plain torch.distributed.checkpoint (DCP), on the same state and disk.

    python benchmarks/checkpoint.py            30M parameters and Adam's state (360 MB), about 3 minutes
    python benchmarks/checkpoint.py --smoke    2 MB: tries the harness, measures nothing

Both sides sync their files before a save counts as done (DCP's sync_files, on by default). DCP saves in two ways: as it
comes, and with a stager of its own that keeps its buffers from save to save, as ours does. Loads fill tensors in place
from files that the page cache holds; ours verifies every byte, DCP's none. A save of ours includes fingerprints of the
state, as a run's save does.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import OUT, Clock, by_turns, machine, median, model_section, ratio, save, show

# isort: split
import torch
from tests.dist import run_ranks
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from truestep.checkpoint.catalogue import Committed, begin_epoch, list_committed
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.load import load
from truestep.models.build import build_model
from truestep.recipe.checkpoint import Checkpoint
from truestep.storage.interface import Store
from truestep.storage.store import open_store

State = dict[str, torch.Tensor]
KEPT = "dcp, kept buffers"


def made_up_state(shape: str) -> State:
    """Parameters and Adam's two moments of a shape, random."""
    section = model_section(shape)
    shapes = {name: value.shape for name, value in build_model(section, section.vocab_size).named_parameters()}
    random = torch.Generator().manual_seed(0)
    kinds = {"model.{}": shapes, "optim.{}.exp_avg": shapes, "optim.{}.exp_avg_sq": shapes}
    return {
        kind.format(name): torch.randn(shape, generator=random)
        for kind, shapes in kinds.items()
        for name, shape in shapes.items()
    }


class Ours:
    """truestep's checkpointer, one attempt."""

    def __init__(self, folder: Path, state: State):
        self.state, self.store, self.step = state, open_store(str(folder)), 0
        settings = Checkpoint()
        self.writer = Checkpointer(
            self.store,
            attempt=begin_epoch(self.store).number,
            rank=0,
            world=1,
            kv=None,
            block_bytes=settings.block,
            deadline_s=settings.deadline,
        )

    def save(self, asynchronous: bool) -> dict[str, float]:
        self.step += 1
        clock = Clock()
        save = self.writer.save(self.step, self.state, {"step": self.step}, asynchronous, list(self.state))
        stall_s = clock.read()["seconds"]
        result = save.result()
        took = clock.read()
        assert result.ok, result.error
        self._drop(keep=self.step)
        return took | {"stall_s": stall_s}

    def load(self) -> dict[str, float]:
        clock = Clock()
        load(self.store, self.newest, self.state)
        return clock.read()

    @property
    def newest(self) -> Committed:
        return list_committed(self.store)[-1]

    def _drop(self, keep: int) -> None:
        """Remove the data of older steps, so that the disk does not fill."""
        for folder in Path(self.store.url, "steps").iterdir():
            if not folder.name.startswith(f"{keep:012d}"):
                shutil.rmtree(folder)


class Plain:
    """DCP with its own file storage, one new folder a save. `stager` None: staged by the writer, as by default."""

    def __init__(self, folder: Path, state: State, stager: DefaultStager | None):
        self.state, self.folder, self.step, self.stager = state, folder, 0, stager

    def save(self, asynchronous: bool) -> dict[str, float]:
        self.step += 1
        writer = FileSystemWriter(self.folder / str(self.step))
        clock = Clock()
        if asynchronous:
            future: Any = async_save(self.state, storage_writer=writer, async_stager=self.stager, no_dist=True)
            stall_s = clock.read()["seconds"]
            getattr(future, "upload_completion", future).result()
        else:
            dcp_save(self.state, storage_writer=writer, no_dist=True)
            stall_s = clock.read()["seconds"]
        took = clock.read()
        shutil.rmtree(self.folder / str(self.step - 1), ignore_errors=True)
        return took | {"stall_s": stall_s}

    def load(self) -> dict[str, float]:
        clock = Clock()
        dcp_load(self.state, storage_reader=FileSystemReader(self.folder / str(self.step)), no_dist=True)
        return clock.read()


def has_kept_buffers() -> bool:
    """torch 2.11's stager cannot copy a state that is saved without a process group (KeyError: <class 'type'>)."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def load_shards(rank: int, world: int, store: Store, committed: Committed, state: State) -> dict[str, Any]:
    """One rank's part of a load on `world` ranks, every tensor sharded by rows; checked against the state."""
    mesh = init_device_mesh("cpu", (world,))
    shards = {name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in state.items()}
    loaded = load(store, committed, shards)
    right = all(
        torch.equal(_local(shards[name]), _local(distribute_tensor(value, mesh, [Shard(0)])))
        for name, value in state.items()
    )
    return {"bytes_read": loaded.bytes_read, "right": right}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def race(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Times by contender and kind, one round of warm-up left out."""
    by_turns(contenders, 1)
    found = by_turns(contenders, rounds)
    return {name: {kind: [one[kind] for one in results] for kind in results[0]} for name, results in found.items()}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--shape", default="30m-32k", choices=["30m-32k", "30m-4k", "tiny"])
    parse.add_argument("--rounds", type=int, default=7)
    parse.add_argument("--ranks", type=int, default=4, help="ranks that read the checkpoint of one")
    parse.add_argument("--folder", type=Path, default=OUT, help="where to save: the disk that is measured")
    parse.add_argument("--threads", type=int, default=2)
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--out", type=Path)
    asked = parse.parse_args()
    if asked.smoke:
        asked.shape, asked.rounds = "tiny", 2
    torch.set_num_threads(asked.threads)
    facts, state = machine(), made_up_state(asked.shape)
    num_bytes = sum(value.nbytes for value in state.values())
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=asked.folder) as name:
        folder = Path(name)
        ours = Ours(folder / "ours", state)
        contenders: dict[str, Ours | Plain] = {
            "truestep": ours,
            "dcp": Plain(folder / "dcp", state, None),
        }
        if has_kept_buffers():
            stager = DefaultStager(StagingOptions(False, False, False, False))
            contenders[KEPT] = Plain(folder / "dcp-kept", state, stager)
        kept = {name: value.clone() for name, value in state.items()}
        times = {
            "async save": race({n: partial(c.save, True) for n, c in contenders.items()}, asked.rounds),
            "save": race({n: partial(c.save, False) for n, c in contenders.items() if n != KEPT}, asked.rounds),
            "load": race({n: c.load for n, c in contenders.items() if n != KEPT}, asked.rounds),
        }
        assert all(torch.equal(state[name], value) for name, value in kept.items()), "a load changed the state"
        ours.writer.close()
        parts = run_ranks(load_shards, asked.ranks, ours.store, ours.newest, state, timeout_s=300.0)
    assert all(part["right"] for part in parts), "a resharded load gave other values"
    result = {
        "state_bytes": num_bytes,
        "seconds": {
            kind: {n: {k: median(v) for k, v in t.items()} for n, t in found.items()} for kind, found in times.items()
        },
        "rounds": times,
        "ratio": ratios(times),
        "reshard": {"ranks": asked.ranks, "read_to_state": sum(part["bytes_read"] for part in parts) / num_bytes},
    }
    report(result)
    settings = {name: str(value) for name, value in vars(asked).items() if name != "out"}
    save("checkpoint", result | {"settings": settings, "machine": facts}, asked.out)


def medians(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {name: {key: median(values) for key, values in kinds.items()} for name, kinds in found.items()}


TABLE = {
    "stall": ("async save", "stall_s"),
    "async save": ("async save", "seconds"),
    "async save, CPU time": ("async save", "cpu_seconds"),
    "save": ("save", "seconds"),
    "save, CPU time": ("save", "cpu_seconds"),
    "load": ("load", "seconds"),
    "load, CPU time": ("load", "cpu_seconds"),
}
"""What is compared: a label, what was done, and which of its times."""


def ratios(times: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """truestep's time divided by each DCP's, round by round; below 1 ours is quicker."""
    return {
        label: {n: ratio(times[kind]["truestep"][key], t[key]) for n, t in times[kind].items() if n != "truestep"}
        for label, (kind, key) in TABLE.items()
    }


def report(result: dict[str, Any]) -> None:
    mib, seconds = result["state_bytes"] / 2**20, result["seconds"]
    rows = []
    for label, (kind, key) in TABLE.items():
        cells = [f"{found[key] * 1e3:,.0f}" for found in seconds[kind].values()]
        of = [f"{r['median']:.2f} ({r['min']:.2f}-{r['max']:.2f})" for r in result["ratio"][label].values()]
        speed = f"{mib / seconds[kind]['truestep'][key]:,.0f}" if key == "seconds" else ""
        rows.append([label, *cells, *[""] * (3 - len(cells)), speed, ", ".join(of)])
    columns = ["milliseconds", "truestep", "dcp", KEPT, "truestep MiB/s", "truestep's time / theirs"]
    reshard = result["reshard"]
    note = f"bytes read by {reshard['ranks']} ranks from one rank's save: {reshard['read_to_state']:.4f} x the state"
    show(f"{mib:,.0f} MiB of state in one process", columns, rows, [note])


if __name__ == "__main__":
    sys.exit(main())
