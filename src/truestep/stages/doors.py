"""What can be seen to fail before time is spent on it: looked at before anything is built or written."""

from pathlib import Path

import torch

from truestep.checkpoint.of_run import checkpoint_place
from truestep.errors import ModelError
from truestep.imports import is_import_path, load_object
from truestep.losses.base import open_loss
from truestep.models.hf import check_directory
from truestep.models.hub import is_hub_id
from truestep.parallel.mesh import Limits, resolve
from truestep.recipe.model import ModelSection
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import TRAINED, Stage
from truestep.stages.corpora import stage_data
from truestep.storage.probe import require_safe
from truestep.storage.store import open_store
from truestep.train.build import require_gpu


def check_doors(recipe: Recipe, stages: list[Stage], world: int, device: torch.device) -> None:
    """Raise a UserError for what `stages`, those that are not done yet, name and cannot have: the mesh, what a GPU has,
    code of the user's own, a model to start from, a store for checkpoints. One process of the job calls this."""
    resolve(recipe.machine.mesh, world, Limits.of(recipe))
    require_gpu(recipe.machine, device)
    if recipe.model is not None and recipe.model.module is not None:
        load_object(recipe.model.module, "model")
    for stage in stages:
        if stage.kind in TRAINED:
            open_loss(stage, recipe.machine.head_chunk_tokens)
        if is_import_path(stage.optim.kind):
            load_object(stage.optim.kind, "optimizer")
        for section in (recipe.data[name] for name in stage_data(stage)):
            if is_import_path(section.source):
                load_object(section.source, "data source")
        model = _start(stage)
        if model is not None:
            resolve(recipe.machine.mesh, world, Limits.of(recipe, model))
        if recipe.checkpoint.url and stage.kind in TRAINED:
            place = checkpoint_place(recipe, recipe.directory, stage.name)
            require_safe(open_store(place, recipe.checkpoint.storage_options))


def _start(stage: Stage) -> ModelSection | None:
    """The model that a stage starts from, where it lies here already. Its teacher is looked at as well."""
    if stage.distill is not None:
        _directory(stage.distill.teacher, f"stages.{stage.name}.distill.teacher", stage.context)
    return None if stage.start == "init" else _directory(stage.start, f"stages.{stage.name}.start", stage.context)


def _directory(model: str, field: str, context: int) -> ModelSection | None:
    """A model that a field names, where it lies here already."""
    if model.startswith("stage:") or is_hub_id(model):
        return None
    if not Path(model).is_dir():
        others = '"stage:NAME" or a hub id org/name@commit'
        also = f'"init", {others}' if field.endswith(".start") else others
        raise ModelError(f"{field} is {model!r}, which is no model directory; correct it, or write {also}.")
    return check_directory(Path(model), context)
