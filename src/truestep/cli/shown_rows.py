"""Rows of a stage in the terminal and as a page of HTML: targets coloured, documents apart, positions beside them."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truestep.dashboard.page import page, put

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from truestep.data.shown_rows import Piece, ShownDocument, ShownRow
    from truestep.stages.shown import StageRows

TARGET, PLAIN, PADDING = "black on green", "dim", "dim italic"
"""Styles of tokens with loss, of the others, and of words about the row."""
FIRST = ("documents", "units", "samples", "rows", "targets", "tokens_in", "tokens_out")
"""What a report says first."""
MARKS = "⟦{}⟧"
"""Around tokens with loss where there are no colours."""


def show_rows(found: "StageRows", console: "Console") -> None:
    """Print the rows of a stage."""
    from rich.text import Text

    mark = "{}" if console.color_system else MARKS
    legend = Text.assemble((mark.format("trained on"), TARGET), "  ", ("only read", PLAIN), f"   {found.stage.name}")
    console.print(legend.append(f" ({found.stage.kind}), rows of {found.stage.context} places"))
    for name, report in found.reports.items():
        console.print(f"{name}: {report_words(report)}", highlight=False, style="dim")
    for row in found.rows:
        console.print()
        console.print(f"[bold]{row_words(row)}[/bold]", highlight=False)
        for document in row.documents:
            console.print(Text("  " + document_words(document), style="cyan"))
            console.print(_document(document, mark))
        if row.padding:
            console.print(Text(f"  {row.padding} places of padding", style=PADDING))


def _document(document: "ShownDocument", mark: str) -> "Text":
    from rich.text import Text

    runs = groupby(document.pieces, lambda piece: piece.target)
    texts = ((target, "".join(map(_visible, pieces))) for target, pieces in runs)
    return Text.assemble(*((mark.format(text), TARGET) if target else (text, PLAIN) for target, text in texts))


def _visible(piece: "Piece") -> str:
    """A target of white space alone would be a mistake that nobody sees."""
    text = "".join(character if character.isprintable() or character == "\n" else "�" for character in piece.text)
    return text.replace("\n", "⏎\n") if piece.target else text


def report_words(report: dict[str, int]) -> str:
    """What became of a corpus: counts that are not 0."""
    names = [*(name for name in FIRST if name in report), *(name for name in report if name not in FIRST)]
    return ", ".join(f"{name.replace('_', ' ')} {report[name]:,}" for name in names if report[name])


def row_words(row: "ShownRow") -> str:
    places = sum(document.num_tokens for document in row.documents) + row.padding
    return f"row {row.number}: {places} places, {row.num_targets} targets, {len(row.documents)} documents"


def document_words(document: "ShownDocument") -> str:
    first = document.pieces[0].position
    last = first + document.num_tokens - 1
    facts = "".join(f", {name} {value:g}" for name, value in document.facts.items())
    targets = f"{document.num_targets} of {document.num_tokens} tokens are targets"
    weights = {piece.weight for piece in document.pieces if piece.weight is not None}
    each = f" of weight {weights.pop():.3g}" if len(weights) == 1 else ""
    where = f"from place {document.first_place}, positions {first} to {last}"
    return f"document {document.number} {where}: {targets}{each}{facts}"


def write_page(found: "StageRows", file: Path) -> None:
    """One self-contained page; a token tells its id, position and weight under the mouse."""
    facts = f"Kind {found.stage.kind}, rows of {found.stage.context} places"
    rows = [
        {
            "words": row_words(row),
            "padding": row.padding,
            "documents": [
                {"words": document_words(document), "pieces": list(map(_piece, document.pieces))}
                for document in row.documents
            ],
        }
        for row in found.rows
    ]
    reports = [f"{name}: {report_words(report)}" for name, report in found.reports.items()]
    put(file, page("rows.html.j2", title=f"Rows of stage {found.stage.name}", facts=facts, reports=reports, rows=rows))


def _piece(piece: "Piece") -> dict[str, Any]:
    words = f"id {' '.join(map(str, piece.ids))}, position {piece.position}{', trained on' if piece.target else ''}"
    words += f", weight {piece.weight:.6g}" if piece.weight is not None else ""
    words += ", label of the last place" if piece.outside else ""
    return {"words": words, "target": piece.target, "lines": piece.text.split("\n")}
