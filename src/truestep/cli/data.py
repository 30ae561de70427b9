"""`truestep data`: build token stores, and look into them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from truestep.cli.arguments import Overrides, RecipePath

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column

    from truestep.data.build import Progress
    from truestep.data.inspect import Inspection, Sample

app = typer.Typer(help="Build token stores from text, and look into them.", no_args_is_help=True)


@app.command()
def build(
    recipe: RecipePath,
    names: Annotated[
        list[str] | None, typer.Argument(help="data sections; all by default", metavar="[NAME]...")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the stores, instead of the one that `run` uses")] = None,
    overrides: Overrides = None,
) -> None:
    """Build the token stores of a recipe's data sections, as `run` would. What is there already is kept; a build that
    was interrupted goes on."""
    from rich.console import Console

    from truestep.data.tokenizer import load_tokenizer
    from truestep.errors import RecipeError
    from truestep.recipe.load import load
    from truestep.stages.corpora import build_store, build_tokenizer

    console = Console(stderr=True)
    resolved = load(recipe, overrides or [])
    unknown = [name for name in names or [] if name not in resolved.data]
    if unknown:
        raise RecipeError([f"{recipe}: has no [data.{unknown[0]}]; its data sections: {', '.join(resolved.data)}."])
    folder = out or resolved.directory.parent / ".data"
    tokenizer = load_tokenizer(build_tokenizer(resolved, folder, console.print))
    for name in names or resolved.data:
        with _Bar(console, name) as bar:
            path = build_store(resolved, name, tokenizer, folder, console.print, bar.update)
        print(path)


@app.command()
def inspect(
    target: Annotated[Path, typer.Argument(help="the folder of a store, or with --stage a recipe", metavar="STORE")],
    stage: Annotated[
        str | None, typer.Option("--stage", help="show rows of this stage of a recipe as its model sees them")
    ] = None,
    samples: Annotated[int, typer.Option(help="documents to show the beginning of, or rows to show", min=1)] = 3,
    first: Annotated[int, typer.Option(help="with --stage: the first row, in the order of training", min=0)] = 0,
    page: Annotated[Path | None, typer.Option("--html", help="with --stage: write the rows to this file too")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="hash every block of the store first")] = False,
    overrides: Overrides = None,
) -> None:
    """Show what a store holds: sizes, what was dropped and why, lengths, common tokens, sample documents.

    With --stage, show rows of a stage: tokens that carry loss in colour, documents, positions. Stores that are not
    there yet are built as `run` would."""
    from rich.console import Console

    console = Console()
    if stage is not None:
        from truestep.cli.mesh_cost import stage_named
        from truestep.cli.shown_rows import show_rows, write_page
        from truestep.recipe.load import load
        from truestep.stages.shown import stage_rows

        recipe = load(str(target), overrides or [])
        say = Console(stderr=True).print
        rows = stage_rows(recipe, stage_named(recipe, stage), first, samples, say, verify=verify)
        show_rows(rows, console)
        if page is not None:
            write_page(rows, page)
            console.print(f"{page}")
        return
    from truestep.data.inspect import inspect_store
    from truestep.errors import UserError

    unused = [name for name, given in (("--first", first), ("--html", page), ("--set", overrides)) if given]
    if unused:
        raise UserError(f"{unused[0]} would not be used: it needs --stage and a recipe; remove it, or give both.")
    found = inspect_store(target, samples=samples)
    if verify:
        found.store.verify()
    show(found, console, verified=verify)


class _Bar:
    """A progress bar over the bytes of a build."""

    def __init__(self, console: "Console", name: str):
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task(name, total=None)

    def update(self, progress: "Progress") -> None:
        known = progress.bytes > 0
        done, total = (progress.bytes_done, progress.bytes) if known else (progress.shards_done, progress.shards)
        self._bars.update(self._task, completed=done, total=total)

    def __enter__(self) -> "_Bar":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()


def show(found: "Inspection", console: "Console", verified: bool = False) -> None:
    """Print an inspection."""
    from rich.columns import Columns

    console.print(_facts(found, verified))
    if flow := _flow(found):
        console.print(flow)
    console.print(Columns([_lengths(found), _common(found)], padding=(0, 4)))
    for sample in found.samples:
        console.print(_sample(sample))


def _facts(found: "Inspection", verified: bool) -> "RenderableType":
    from rich.table import Table

    from truestep.data.sample_store import SampleStore

    store, report = found.store, found.report
    table = Table(title=f"{store.path}", title_justify="left", show_header=False, box=None)
    if isinstance(store, SampleStore):
        table.add_row("rows", f"{store.num_documents:,}, {store.num_units:,} units of {store.num_samples:,} samples")
    else:
        table.add_row("documents", f"{store.num_documents:,}")
    table.add_row("tokens", f"{store.num_tokens:,} ({store.header['id_type'][1:]}, {store.vocab_size:,} ids)")
    if found.bytes_per_token is not None:
        table.add_row("text", f"{store.num_bytes:,} bytes, {found.bytes_per_token:.3f} bytes a token")
    if report.get("documents_not_lossless"):
        table.add_row("not lossless", f"{report['documents_not_lossless']:,} documents")
    for name, value in report.get("source", {}).items():
        table.add_row(name, str(value))
    for reason, count in report.get("refused_by_reason", {}).items():
        table.add_row("refused", f"{count:,}: {reason}")
    table.add_row("tokenizer", report["tokenizer"]["origin"])
    table.add_row("fingerprint", f"{store.fingerprint}{' (every block verified)' if verified else ''}")
    return table


def _flow(found: "Inspection") -> "RenderableType | None":
    from rich.table import Table

    report = found.report
    if "in" not in report:
        return None
    table = Table("", *(_right(unit) for unit in ("documents", "bytes", "tokens")), title="In and out")
    rows = [("in", report["in"]), ("other split", report["other_split"])]
    rows += [(f"dropped: {reason.replace('_', ' ')}", amount) for reason, amount in report["dropped"].items()]
    for name, amount in [*rows, ("out", report["out"])]:
        cells = (amount.get(unit) for unit in ("documents", "bytes", "tokens"))
        table.add_row(name, *("not counted" if cell is None else f"{cell:,}" for cell in cells))
    return table


def _right(title: str) -> "Column":
    from rich.table import Column

    return Column(title, justify="right")


def _lengths(found: "Inspection") -> "RenderableType":
    from rich.table import Table

    most = max(count for _, _, count in found.lengths)
    table = Table(_right("tokens"), _right("documents"), "", title=f"Lengths (median {found.median_length:,})")
    for low, high, count in found.lengths:
        table.add_row(f"{low:,}–{high:,}", f"{count:,}", "█" * -(-24 * count // most))
    return table


def _common(found: "Inspection") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table("token", _right("id"), _right("share"), title=f"Common tokens (of {found.num_counted:,})")
    for text, index, share in found.common:
        table.add_row(Text(repr(text)), str(index), f"{share:.2%}")
    return table


def _sample(sample: "Sample") -> "RenderableType":
    from rich.panel import Panel
    from rich.text import Text

    title = f"document {sample.document:,}, {sample.tokens:,} tokens"
    return Panel(Text(sample.text), title=title, title_align="left")
