"""From [tokenizer] and [data.*] to token stores that every rank can open: built once by rank 0, named by content."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape

from truestep.data.blocks import digest
from truestep.data.build import Progress, build, open_built
from truestep.data.columns import ColumnStore
from truestep.data.loader import Corpus
from truestep.data.sample import make_tokenizer
from truestep.data.sample_packing import Supervision
from truestep.data.sample_store import SampleStore, Store, open_store
from truestep.data.sources.registry import open_source
from truestep.data.tokenizer import FILES, Tokenizer, load_tokenizer
from truestep.errors import DataError
from truestep.files import canonical, publish
from truestep.imports import is_import_path, source_code
from truestep.recipe.data import DataSection, MixtureItem
from truestep.recipe.digests import what
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import Stage
from truestep.stages.context import Context

Say = Callable[[str], None]
SAY_EVERY_S = 5.0
DATA_FILE = "data.json"


@dataclass(frozen=True)
class Corpora:
    """The tokenizer of a recipe and the stores, of tokens or of samples, of the sections that a stage names. `columns`:
    stored ones, which rows of a section have as well."""

    recipe: Recipe
    tokenizer: Tokenizer
    tokenizer_dir: Path
    stores: dict[str, Store]
    columns: Mapping[str, tuple[ColumnStore, ...]] = field(default_factory=dict)

    @staticmethod
    def prepare(context: Context, stage: Stage, fits: Callable[[Tokenizer], object]) -> "Corpora":
        """Build what is missing (rank 0; the others wait) and open everything. `fits` raises for a tokenizer that the
        model cannot take, before any text is encoded with it."""
        names = stage_data(stage)

        def make() -> dict[str, str]:
            known = _recorded(context, names)
            if known:
                return known
            began = time.perf_counter()
            tokenizer_dir = build_tokenizer(context.recipe, context.data_dir, context.progress.say)
            tokenizer = load_tokenizer(tokenizer_dir)
            fits(tokenizer)
            paths = {"": str(tokenizer_dir)}
            for name in names:
                paths[name] = str(build_store(context.recipe, name, tokenizer, context.data_dir, context.progress.say))
                note_store(context, name, open_store(paths[name]))
            context.note("phase", name="data build", seconds=time.perf_counter() - began, stage=stage.name)
            return paths

        paths = {name: Path(path) for name, path in context.job.agree(f"data/{stage.name}", make).items()}
        for path in paths.values():
            if not path.is_dir():
                raise DataError(
                    f"{path} was built by rank 0 but cannot be seen by rank {context.job.rank}; "
                    f"put run.dir on a file system that all hosts share"
                )
        stores = {name: open_store(path) for name, path in paths.items() if name}
        return Corpora(context.recipe, load_tokenizer(paths[""]), paths[""], stores)

    def record(self, context: Context) -> None:
        """From here on the run stands on these stores. Rank 0 writes."""
        if context.job.first:
            folders = {name: store.path.name for name, store in self.stores.items()}
            _record(context, folders | {"": self.tokenizer_dir.name})

    def training(self, stage: Stage) -> list[Corpus]:
        return [self._corpus(stage, item) for item in [*mixture(stage), *stage.remember.replay]]

    def held_out(self, stage: Stage) -> Corpus | None:
        return self._corpus(stage, MixtureItem(data=stage.evaluate.data)) if stage.evaluate else None

    def calibration(self, stage: Stage) -> Corpus | None:
        named = stage.quantise.calibration
        return self._corpus(stage, MixtureItem(data=named)) if named else None

    def corpus(self, stage: Stage, name: str) -> Corpus:
        """A section by itself."""
        return self._corpus(stage, MixtureItem(data=name))

    def _corpus(self, stage: Stage, item: MixtureItem) -> Corpus:
        section, store = self.recipe.data[item.data], self.stores[item.data]
        shape, columns = (section.packing, section.too_long), self.columns.get(item.data, ())
        return Corpus(
            store, item.weight, item.max_epochs, *shape, supervision=supervision(stage), columns=tuple(columns)
        )


def supervision(stage: Stage) -> Supervision:
    """Which tokens of samples a stage of its kind trains on, and the columns that its loss looks at."""
    if stage.kind == "sft":
        return Supervision(stage.sft.loss_on, stage.sft.weighting == "sample", units=False)
    if stage.kind in ("preference", "reward_model"):
        return Supervision("last", units=True)
    return Supervision("assistant", units=False)


def mixture(stage: Stage) -> list[MixtureItem]:
    return [MixtureItem(data=stage.data)] if isinstance(stage.data, str) else stage.data


def stage_data(stage: Stage) -> list[str]:
    """Names of the data sections that a stage reads, each once."""
    names = [item.data for item in [*mixture(stage), *stage.remember.replay]] + (
        [stage.evaluate.data] if stage.evaluate else []
    )
    return list(dict.fromkeys([*names, *([stage.quantise.calibration] if stage.quantise.calibration else [])]))


def build_tokenizer(recipe: Recipe, folder: Path, say: Say) -> Path:
    """The folder of the recipe's tokenizer, made if it is not there."""
    section = recipe.tokenizer
    names = section.data or [item.data for item in mixture(recipe.stages[0])]
    data = [recipe.data[name] for name in names] if section.kind == "train-bpe" else []
    inputs = [_inputs(recipe, name) for name in names] if data else []
    wanted = [section.model_dump(mode="json"), [_content(one) for one in data], inputs, _stamp(section.path)]
    start = recipe.stages[0].start if section.kind == "start" else None
    if start or section.chat_template:
        wanted += [start, [_stamp(str(Path(start or "", name))) for name in FILES], _stamp(section.chat_template)]
    path = folder / f"tokenizer-{digest(canonical(wanted))[:12]}"
    if not (path / "tokenizer.json").exists():
        if section.kind == "train-bpe":
            say(f"tokenizer: training a byte-level BPE of {section.vocab_size:,} ids on {', '.join(names)}")
        make_tokenizer(section, data, _cache(recipe), start).save(path)
    return path


def build_store(
    recipe: Recipe,
    name: str,
    tokenizer: Tokenizer,
    folder: Path,
    say: Say,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """The folder of a section's store, built if it is not there. `progress` replaces spoken progress."""
    section = recipe.data[name]
    key = digest(canonical([_content(section), tokenizer.fingerprint, _inputs(recipe, name)]))[:12]
    path = folder / f"{name}-{key}"
    if open_built(path, section, tokenizer) is None:
        say(f"data: building {name} from {section.source}")
        workers = recipe.machine.data_workers or _cores()
        build(section, tokenizer, path, workers=workers, progress=progress or _teller(name, say), cache=_cache(recipe))
    return path


def build_all(recipe: Recipe, say: Say = print) -> dict[str, Path]:
    """The stores of all data sections of a recipe, in the folder that its runs use."""
    folder = Path(recipe.run.dir).expanduser() / ".data"
    tokenizer = load_tokenizer(build_tokenizer(recipe, folder, say))
    return {name: build_store(recipe, name, tokenizer, folder, say) for name in recipe.data}


def _inputs(recipe: Recipe, name: str) -> list:
    """What a section's text is made from at this moment, so that edited files are never taken for the old ones."""
    section = recipe.data[name]
    shards = open_source(section, _cache(recipe)).shards()
    against = section.decontaminate.against if section.decontaminate else []
    return [[[shard.name, shard.size, shard.stamp] for shard in shards], [_stamp(path) for path in against]]


def _stamp(path: str | None) -> list | None:
    """Size and time of change of a local file."""
    if path is None or not Path(path).is_file():
        return None
    found = Path(path).stat()
    return [found.st_size, found.st_mtime_ns]


def _recorded(context: Context, names: list[str]) -> dict[str, str] | None:
    """The stores that this run was begun on, if it was: later changes of the inputs do not reach it."""
    file = context.run_dir / DATA_FILE
    if not file.exists():
        return None
    body = json.loads(file.read_text())
    if body["what"] != what(context.recipe) or not {"", *names} <= body["paths"].keys():
        return None
    paths = {name: str(context.data_dir / body["paths"][name]) for name in ["", *names]}
    return paths if all(Path(path).is_dir() for path in paths.values()) else None


def _record(context: Context, folders: dict[str, str]) -> None:
    file = context.run_dir / DATA_FILE
    body = json.loads(file.read_text()) if file.exists() else {}
    kept = body["paths"] if body.get("what") == what(context.recipe) else {}
    publish(file, json.dumps({"what": what(context.recipe), "paths": kept | folders}, indent=1).encode())


def note_store(context: Context, name: str, store: Store) -> None:
    report = store.header.get("report", {})
    context.note(
        "data",
        name=name,
        source=context.recipe.data[name].source,
        fingerprint=store.fingerprint,
        documents=store.num_documents,
        tokens=store.num_tokens,
        bytes=store.num_bytes,
        dropped=_dropped(report),
        licence=report.get("source", {}).get("licence"),
    )
    what = "rows" if isinstance(store, SampleStore) else "documents"
    sizes = f"{store.num_documents:,} {what}, {store.num_tokens:,} tokens, {store.num_bytes or 0:,} bytes"
    context.progress.say(f"data: {name} has {sizes}")
    for reason, count in report.get("refused_by_reason", {}).items():
        context.progress.say(f"[yellow]data: {name}: {count:,} rows refused: {escape(reason)}[/yellow]")
    for sentence in report.get("refused", []):
        context.progress.say(f"[yellow]data: {name}: refused: {escape(sentence)}[/yellow]")


def _content(section: DataSection) -> dict:
    """What decides a store's content, how it is reached and packed left out."""
    fields = section.model_dump(mode="json", exclude={"storage_options", "packing", "too_long"})
    return fields | ({"code": digest(source_code(section.source))} if is_import_path(section.source) else {})


def _dropped(report: dict) -> dict[str, int]:
    return {reason: amount["documents"] for reason, amount in report.get("dropped", {}).items()}


def _teller(name: str, say: Say) -> Callable[[Progress], None]:
    """Says where a long build is, at most every few seconds."""
    said = [time.monotonic()]

    def tell(progress: Progress) -> None:
        if time.monotonic() - said[0] >= SAY_EVERY_S:
            said[0] = time.monotonic()
            say(f"data: {name}: {progress.shards_done} of {progress.shards} parts, {progress.bytes_done:,} bytes")

    return tell


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache(recipe: Recipe) -> Path:
    return Path(recipe.machine.cache).expanduser()
