"""Rows a second, start-up and memory of the loader on a small and on a huge token store: they must not grow with it.

    python benchmarks/loader.py            10 MB and 10 GB, under a minute
    python benchmarks/loader.py --smoke    1 MB and 100 MB

The huge store is sparse: its ids are zeros that take no disk, with checksums and real document offsets. Each store is
read in a process of its own. "Cold" reads rows of blocks that were not touched before (so each is hashed, once), after
the page cache was told to forget the files; "warm" reads the same rows again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import machine, made_up_store, median, resident_bytes, save, scratch, show

# isort: split
import numpy as np

ID_BYTES, VOCAB = 2, 50_000


def measure(path: str, context: int, rows: int, num_batches: int) -> dict[str, Any]:
    """Start-up, speed and memory in this process."""
    from truestep.data.loader import Corpus, Loader
    from truestep.data.store import TokenStore

    forget(Path(path))
    before, began = resident_bytes(), time.perf_counter()
    loader = Loader([Corpus(TokenStore.open(path))], context, seed=1)
    opened_s = time.perf_counter() - began
    loader.rows(np.arange(rows))
    first_batch_s = time.perf_counter() - began
    opened = resident_bytes()
    speeds = {name: speed(loader, rows, num_batches) for name in ("cold", "warm")}
    after = resident_bytes()
    return {
        "open_s": opened_s,
        "first_batch_s": first_batch_s,
        "rows_per_s": speeds,
        "tokens_per_s": {name: value * context for name, value in speeds.items()},
        "anonymous_growth_bytes": {
            "opening": opened["anonymous"] - before["anonymous"],
            "reading": after["anonymous"] - opened["anonymous"],
        },
        "mapped_file_bytes": after["file"] - before["file"],
    }


def speed(loader: Any, rows: int, num_batches: int) -> float:
    began = time.perf_counter()
    for index in range(num_batches):
        loader.rows(np.arange(rows * index, rows * (index + 1)))
    return rows * num_batches / (time.perf_counter() - began)


def forget(folder: Path) -> None:
    """Ask the kernel to drop the files from its page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def in_child(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def middle(found: list[Any]) -> Any:
    """Medians of numbers that lie in equal nested dictionaries."""
    if isinstance(found[0], dict):
        return {key: middle([one[key] for one in found]) for key in found[0]}
    return median(found)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--small", type=float, default=10, help="MB of ids in the small store")
    parse.add_argument("--large", type=float, default=10_000, help="MB of ids in the huge store")
    parse.add_argument("--context", type=int, default=1024)
    parse.add_argument("--rows", type=int, default=8, help="rows in a batch")
    parse.add_argument("--batches", type=int, default=250)
    parse.add_argument("--document-tokens", type=int, default=1000, help="length of a document")
    parse.add_argument("--rounds", type=int, default=5)
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--out", type=Path)
    parse.add_argument("--child", help=argparse.SUPPRESS)
    asked = parse.parse_args()
    if asked.child:
        print(json.dumps(measure(*json.loads(asked.child))))
        return
    if asked.smoke:
        asked.small, asked.large, asked.batches, asked.rounds = 1, 100, 20, 1
    facts = machine()
    with scratch() as folder:
        stores = make_stores(Path(folder), asked)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in stores}
        for _ in range(asked.rounds):
            for name, path in stores.items():
                found[name].append(in_child(str(path), asked.context, asked.rows, asked.batches))
    result = {"stores": {name: middle(runs) for name, runs in found.items()}}
    small, large = result["stores"].values()
    own = [sum(store["anonymous_growth_bytes"].values()) for store in (small, large)]
    result["large_to_small"] = {
        "open_s": large["open_s"] / small["open_s"],
        "first_batch_s": large["first_batch_s"] / small["first_batch_s"],
        "warm_rows_per_s": large["rows_per_s"]["warm"] / small["rows_per_s"]["warm"],
        "anonymous_bytes_more": own[1] - own[0],
    }
    report(result)
    settings = {name: value for name, value in vars(asked).items() if name not in ("out", "child")}
    save("loader", result | {"settings": settings, "machine": facts}, asked.out)


def make_stores(folder: Path, asked: argparse.Namespace) -> dict[str, Path]:
    from tests.data.fakes import sparse_store

    length = asked.document_tokens
    made_up_store(folder / "small", VOCAB, int(asked.small * 1e6) // ID_BYTES, length)
    offsets = np.arange(0, int(asked.large * 1e6) // ID_BYTES + 1, length)
    sparse_store(folder / "large", offsets, VOCAB)
    return {f"{asked.small:,.0f} MB": folder / "small", f"{asked.large:,.0f} MB": folder / "large"}


def report(result: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f["open_s"] * 1e3,
            f["first_batch_s"] * 1e3,
            f["rows_per_s"]["cold"],
            f["rows_per_s"]["warm"],
            f["anonymous_growth_bytes"]["opening"] / 2**20,
            f["anonymous_growth_bytes"]["reading"] / 2**20,
            f["mapped_file_bytes"] / 2**20,
        ]
        for name, f in result["stores"].items()
    ]
    columns = ["store", "open ms", "first batch ms", "rows/s cold", "rows/s warm", "opening", "reading", "mapped"]
    show(
        "loader",
        columns,
        rows,
        ["opening, reading: MiB that the process's own memory grew by; mapped: MiB of the files"],
    )


if __name__ == "__main__":
    main()
