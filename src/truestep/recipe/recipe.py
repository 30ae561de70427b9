"""The whole recipe: typed, torch-free. `load` reads TOML and overrides; digests tell what, where and bits apart."""

from pathlib import Path

from truestep.recipe.checkpoint import Checkpoint
from truestep.recipe.data import DataSection, TokenizerSection
from truestep.recipe.machine import Ledger, Machine, Run
from truestep.recipe.model import ModelSection
from truestep.recipe.numerics import Numerics
from truestep.recipe.section import Section, field
from truestep.recipe.sentinel import Sentinel
from truestep.recipe.stage import Stage


class Recipe(Section):
    """One run, from data to released model."""

    run: Run = field(help="name, seed and place", digest="where")
    model: ModelSection | None = field(
        None, help="the architecture; not needed if the first stage starts from a model", digest="what"
    )
    tokenizer: TokenizerSection = field(TokenizerSection(), help="how text becomes ids", digest="what")
    data: dict[str, DataSection] = field({}, help="corpora by name", digest="what")
    stages: list[Stage] = field(help="what is done, in order", min_length=1, digest="what")
    numerics: Numerics = field(Numerics(), help="sums and number formats", digest="what")
    machine: Machine = field(Machine(), help="where and how it runs", digest="where")
    checkpoint: Checkpoint = field(Checkpoint(), help="saving of training state", digest="where")
    sentinel: Sentinel = field(Sentinel(), help="what watches the numbers", digest="where")
    ledger: Ledger = field(Ledger(), help="what the card records", digest="where")

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return Path(self.run.dir).expanduser() / self.run.name

    def fresh(self, stage: Stage) -> ModelSection | None:
        """The architecture of a stage that starts from fresh weights."""
        student = stage.distill.student if stage.distill else None
        return student or self.model

    def lineage(self, stage: Stage) -> list[Stage]:
        """The stage, the stage that it starts from, and so on. The last one's `start` is "init", or a model from
        outside the recipe."""
        earlier = {f"stage:{one.name}": one for one in self.stages[: self.stages.index(stage)]}
        parent = earlier.get(stage.start)
        return [stage, *self.lineage(parent)] if parent is not None else [stage]
