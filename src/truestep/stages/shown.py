"""The rows of a stage as its model will see them: built and packed as the run does it, without a model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from truestep.data.loader import Loader
from truestep.data.packing import Rows
from truestep.data.sample_store import open_store
from truestep.data.shown_rows import ShownRow, shown_rows
from truestep.data.tokenizer import load_tokenizer
from truestep.errors import UserError
from truestep.numerics.batch import Batch
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import TRAINED, Stage
from truestep.stages.corpora import Corpora, build_store, build_tokenizer, mixture, stage_data


@dataclass(frozen=True)
class StageRows:
    """`reports`: of the packing of each corpus, by the name of its section. `paths`: of the stores, by name."""

    stage: Stage
    rows: list[ShownRow]
    reports: dict[str, dict[str, int]]
    paths: dict[str, Path]


def stage_rows(
    recipe: Recipe, stage: Stage, first: int, count: int, say: Callable[[str], None] = print, verify: bool = False
) -> StageRows:
    """Rows [first, first + count) of the run's order. Stores that are not there yet are built where `run` looks for
    them; with `verify` every block of them is hashed."""
    if stage.kind not in TRAINED:
        raise UserError(f"stage {stage.name!r} ({stage.kind}) does not train, so it has no rows to show.")
    corpora = corpora_of(recipe, stage, say)
    if verify:
        for store in corpora.stores.values():
            store.verify()
    loader = Loader(corpora.training(stage), stage.context, recipe.run.seed, stage.mask_documents)
    if loader.num_rows is not None and first >= loader.num_rows:
        raise UserError(f"--first {first}: the stage's data gives {loader.num_rows:,} rows; choose an earlier one.")
    numbers = loader.global_rows(first, min(first + count, loader.num_rows or first + count))
    rows = shown_rows(_as_arrays(loader.rows(numbers)), numbers, corpora.tokenizer)
    reports = {item.data: packing.report for item, packing in zip(mixture(stage), loader.packings)}
    return StageRows(stage, rows, reports, {name: store.path for name, store in corpora.stores.items()})


def corpora_of(recipe: Recipe, stage: Stage, say: Callable[[str], None]) -> Corpora:
    """The stage's corpora where a run of the recipe keeps them, without a run."""
    folder = recipe.directory.parent / ".data"
    tokenizer_dir = build_tokenizer(recipe, folder, say)
    tokenizer = load_tokenizer(tokenizer_dir)
    stores = {name: open_store(build_store(recipe, name, tokenizer, folder, say)) for name in stage_data(stage)}
    return Corpora(recipe, tokenizer, tokenizer_dir, stores)


def _as_arrays(batch: Batch) -> Rows:
    documents_BT = (
        np.zeros(batch.tokens_BT.shape, np.int32) if batch.documents_BT is None else batch.documents_BT.numpy()
    )
    columns = {name: column.numpy() for name, column in batch.columns.items()}
    return Rows(batch.tokens_BT.numpy(), batch.labels_BT.numpy(), batch.positions_BT.numpy(), documents_BT, columns)
