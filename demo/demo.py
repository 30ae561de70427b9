"""Four processes train, and things break: `make demo` shows in a few minutes what becomes of the run.

1. an undisturbed run, for comparison
2. the same run, in which a bit flips on rank 2 and later rank 1 is killed
3. both end with the same weights, bit for bit
4. steps of the disturbed run done again on one process
5. one flipped bit in a checkpoint: torch's own format loads it, ours names it
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

HERE = Path(__file__).parent
FOLDER = Path("runs/demo")
BIT = 3
console = Console(highlight=False)


def main() -> None:
    """The five parts, and where to look further."""
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    say("1", "An undisturbed run", "Four processes train a small model on Python's own library; sums are exact.")
    truestep("run", recipe(), "--set", "run.name=calm")
    say(
        "2",
        "The same run, and things break",
        "Before step 50 a bit of a weight flips in the memory of rank 2: no crash, no NaN, no spike of the loss.\n"
        "At step 100 rank 1 is killed. What truestep finds and does stands below.",
    )
    truestep("chaos", recipe(), "--plan", str(HERE / "plan.toml"), "--set", "run.name=stormy")
    say("3", "Do both runs have the same weights?", "Compared is the digest of every bit of every weight.")
    same_weights()
    say(
        "4",
        "Can anybody check what the run says of itself?",
        "Steps of the disturbed run are done again, on one process instead of four and three.",
    )
    truestep("replay", str(FOLDER / "stormy"), "--steps", "81:120")
    say(
        "5",
        "A bit flips in a checkpoint on the disk",
        "First in one that torch.distributed.checkpoint wrote, then the same in one of ours.",
    )
    flipped_checkpoint()
    report = FOLDER / "stormy" / "report.html"
    console.print(f"\n[bold]{time.monotonic() - began:.0f} s in all.[/bold] The run with its pictures: {report}")


def recipe() -> str:
    return str(HERE / "recipe.toml")


def say(number: str, title: str, words: str) -> None:
    console.print(Panel(words, title=f"[bold]{number}. {title}[/bold]", title_align="left", border_style="cyan"))


def truestep(*arguments: str) -> None:
    """Run the command line as a user would, in the demo's folder of runs."""
    dir_ = ["--set", f"run.dir={FOLDER}"] if arguments[0] in ("run", "chaos") else []
    console.print(f"[dim]$ truestep {' '.join(arguments)}[/dim]")
    ended = subprocess.run([sys.executable, "-m", "truestep", *arguments, *dir_])
    if ended.returncode:
        sys.exit(f"demo: truestep {arguments[0]} ended with exit code {ended.returncode}")


def same_weights() -> None:
    table = Table("run", "digest of the weights", box=None)
    digests = {}
    for name in ("calm", "stormy"):
        manifest = json.loads((FOLDER / name / "models" / "base" / "manifest.json").read_text())
        digests[name] = manifest["weights"]
        table.add_row(name, digests[name])
    console.print(table)
    if digests["calm"] != digests["stormy"]:
        sys.exit("demo: the weights differ")
    console.print("[bold green]equal, bit for bit[/bold green]")


def flipped_checkpoint() -> None:
    """The newest weights in torch's own format and in ours: one bit of each is flipped, then both are loaded."""
    import torch
    import torch.distributed.checkpoint as dcp

    from truestep.checkpoint.catalogue import list_committed, read_manifest
    from truestep.checkpoint.load import load
    from truestep.errors import CheckpointError
    from truestep.storage.local import LocalStore

    folder = FOLDER / "copies"
    shutil.copytree(FOLDER / "stormy" / "checkpoints" / "base", folder / "ours")
    store = LocalStore(folder / "ours")
    newest = list_committed(store)[-1]
    manifest = read_manifest(store, newest)
    name = "model.embed.weight"
    entry = manifest.tensors[name]
    (chunk, *_) = entry.chunks
    good = torch.zeros(entry.shape)
    load(store, newest, {name: good}, strict=False)

    dcp.save({"weight": good}, checkpoint_id=folder / "theirs", no_dist=True)
    file = next((folder / "theirs").glob("*.distcp"))
    flip(file, file.read_bytes().index(good.numpy().tobytes()))
    target = torch.zeros_like(good)
    dcp.load({"weight": target}, checkpoint_id=folder / "theirs", no_dist=True)
    wrong = (target != good).nonzero()[0].tolist()
    was, now = good[tuple(wrong)].item(), target[tuple(wrong)].item()
    loaded = "[bold red]loaded without a word[/bold red]"
    console.print(f"torch.distributed.checkpoint: {loaded}; {name}{wrong} is {now!r}, was {was!r}")

    flip(store.root / chunk.object, chunk.start)
    before = torch.full(entry.shape, 7.0)
    target = before.clone()
    try:
        load(store, newest, {name: target}, strict=False)
    except CheckpointError as error:
        console.print(f"truestep: [bold green]refused[/bold green]: {error}")
    else:
        sys.exit("demo: the flipped checkpoint was loaded")
    assert torch.equal(target, before), "the target has changed"


def flip(file: Path, byte: int) -> None:
    data = bytearray(file.read_bytes())
    data[byte + 3] ^= 1 << BIT
    file.write_bytes(data)


if __name__ == "__main__":
    main()
