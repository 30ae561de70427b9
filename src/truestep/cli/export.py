"""`truestep export`: a model, or the newest checkpoint of a run, as a new Hugging Face directory."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from truestep.cli.arguments import Module


class Dtype(StrEnum):
    """What floating-point weights are written as."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


Source = Annotated[
    str,
    typer.Argument(
        help="a model directory, a hub id org/name@revision, a run's directory, or (with --like) a plain DCP checkpoint"
    ),
]
Like = Annotated[
    Path | None,
    typer.Option(
        "--like", help="for a DCP checkpoint: a model directory with its config and tokenizer", metavar="MODEL"
    ),
]
Target = Annotated[Path, typer.Argument(help="the directory to make; nothing is overwritten")]
Wanted = Annotated[Dtype | None, typer.Option("--dtype", help="cast the weights; by default they stay as they are")]
ShardSize = Annotated[str, typer.Option("--shard-size", help="largest size of a weights file", metavar="BYTES")]
StageName = Annotated[
    str | None, typer.Option("--stage", help="a run's stage; by default the last one begun", metavar="NAME")
]
Cache = Annotated[Path, typer.Option("--cache", help="where hub models are kept")]


def export(
    source: Source,
    target: Target,
    dtype: Wanted = None,
    shard_size: ShardSize = "4GiB",
    stage: StageName = None,
    module: Module = None,
    like: Like = None,
    cache: Cache = Path("~/.cache/truestep"),
) -> None:
    """Write SOURCE to TARGET in Hugging Face layout: weights, configuration, tokenizer, generation settings.

    Of a run, the newest checkpoint is taken; finished stages lie in RUN/models already.
    """
    import torch

    from truestep.errors import UserError
    from truestep.models.hf import read_generation
    from truestep.models.hf_save import save_hf
    from truestep.models.hub import fetch, is_hub_id
    from truestep.models.load import load_model, tensors_of
    from truestep.recipe.units import parse_bytes
    from truestep.stages.from_dcp import is_dcp, model_from_dcp

    try:
        shard_bytes = parse_bytes(shard_size)
    except ValueError as error:
        raise UserError(f"--shard-size: {error}") from None
    options = {"dtype": getattr(torch, dtype) if dtype else None, "shard_bytes": shard_bytes}
    if (Path(source) / "run.json").exists():
        from truestep.stages.from_checkpoint import model_from_run

        found = model_from_run(Path(source), stage, module)
        save_hf(
            target,
            tensors_of(found.model),
            found.section,
            tokenizer_dir=found.tokenizer_dir,
            generation=found.token_ids,
            **options,
        )
        print(f"wrote step {found.step} of stage {found.stage} to {target}")
        return
    if is_dcp(Path(source)):
        if like is None:
            raise UserError(
                f"{source} is a plain DCP checkpoint, which has no config; name a model directory with --like"
            )
        model, section = model_from_dcp(Path(source), like)
        save_hf(target, tensors_of(model), section, tokenizer_dir=like, generation=read_generation(like), **options)
        print(f"wrote the model of {source} to {target}")
        return
    if like is not None:
        raise UserError(f"--like is for a plain DCP checkpoint, and {source} is none; leave it out")
    if stage is not None:
        raise UserError(f"--stage names a stage of a run, but {source} is no run directory; leave it out")
    hub = fetch(source, cache.expanduser() / "hub") if is_hub_id(source) else None
    folder = hub.directory if hub else Path(source)
    model = load_model(folder, own_module=module)
    save_hf(
        target,
        tensors_of(model),
        model.section,
        tokenizer_dir=folder,
        generation=read_generation(folder),
        **options,
    )
    print(f"wrote {hub.pinned if hub else source} to {target}")
