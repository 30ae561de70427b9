"""`truestep merge`: a model and an adapter as one model."""

from pathlib import Path
from typing import Annotated

import typer

from truestep.cli.export import Dtype

Model = Annotated[Path, typer.Argument(help="the directory of the model that the adapter was trained beside")]
Adapters = Annotated[
    list[str],
    typer.Argument(help="directories of adapters in PEFT's layout; PATH=FACTOR weighs one", metavar="ADAPTER..."),
]
Target = Annotated[Path, typer.Argument(help="the directory to make; nothing is overwritten")]
Wanted = Annotated[Dtype | None, typer.Option("--dtype", help="of the weights; by default that of the model's files")]


def merge(model: Model, adapters: Adapters, target: Target, dtype: Wanted = None) -> None:
    """Add ADAPTERs to MODEL, in float32, and write TARGET; says what the cast to --dtype took of their change."""
    import torch

    from truestep.stages.merge import merge as write
    from truestep.stages.merge import words

    weights = dict(_weighted(adapter) for adapter in adapters)
    wanted = None if dtype is None else getattr(torch, dtype.value)
    print(f"{target}: {words(write(model, weights, target, wanted))}")


def _weighted(adapter: str) -> tuple[Path, float]:
    from truestep.errors import UserError

    path, equals, factor = adapter.rpartition("=")
    if not equals:
        return Path(adapter), 1.0
    try:
        return Path(path), float(factor)
    except ValueError:
        raise UserError(f"{adapter!r} ends in {factor!r}, which is no number; write PATH or PATH=FACTOR.") from None
