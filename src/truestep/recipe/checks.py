"""What must hold between the fields of a recipe. Each check yields a Problem for every place where it does not."""

import re
from collections.abc import Iterator

from truestep.imports import is_import_path
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.check_elastic import elastic_problems
from truestep.recipe.check_mesh import mesh_problems
from truestep.recipe.check_model import model_problems
from truestep.recipe.check_numerics import numerics_problems
from truestep.recipe.check_stage import has_student, stage_problems
from truestep.recipe.data import FIELDS, MESSAGE_FIELDS, SOURCES, DataSection
from truestep.recipe.digests import canonical
from truestep.recipe.dump import toml
from truestep.recipe.effect import unused
from truestep.recipe.paths import items, join, walk
from truestep.recipe.problems import Problem, did_you_mean
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import LOSSES, OPTIMIZERS, TRAINED, Stage


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Everything that is wrong with a recipe whose fields all have values of their types."""
    yield from _without_effect(recipe)
    yield from _not_toml(recipe)
    yield from _data(recipe)
    yield from _references(recipe)
    yield from model_problems(recipe)
    for stage in recipe.stages:
        at = f"stages.{stage.name}"
        yield from _kinds(stage, at)
        missing = list(stage_problems(stage, at, recipe))
        yield from missing
        if not missing and stage.kind in TRAINED:
            yield from _batch(stage, at, recipe)
            yield from schedule_problems(stage, at)
        yield from _gate(stage, at, recipe)
    yield from numerics_problems(recipe.numerics, recipe.model)
    yield from _machine(recipe)
    yield from elastic_problems(recipe.machine)


def _without_effect(recipe: Recipe) -> Iterator[Problem]:
    for path, section in walk(recipe):
        for name, rule in unused(section).items():
            if name in section.model_fields_set:
                reads = tuple(join(path, field) for field in rule.reads)
                text = f"is set but will not be used: it needs {rule.needs}; remove it."
                yield Problem(join(path, name), text, reads)


def _not_toml(recipe: Recipe) -> Iterator[Problem]:
    for path, section in walk(recipe):
        for name, value in section:
            if isinstance(value, dict) and not items(value):
                try:
                    toml(value)
                except TypeError as error:
                    yield Problem(join(path, name), f"holds {error}; a recipe must be writable as TOML.")


def data_names(stage: Stage) -> list[str]:
    """The [data.*] sections that a stage trains on."""
    return [stage.data] if isinstance(stage.data, str) else [item.data for item in stage.data]


def _references(recipe: Recipe) -> Iterator[Problem]:
    yield from _data_references(recipe)
    before: set[str] = set()
    for stage in recipe.stages:
        at = f"stages.{stage.name}"
        if stage.name in before:
            yield Problem(f"{at}.name", f"is {stage.name!r} twice; give every stage a name of its own.")
        yield from _start(stage, at, before)
        before.add(stage.name)
    starts = tuple(f"stages.{stage.name}.start" for stage in recipe.stages)
    fresh = any(stage.start == "init" and not has_student(stage) for stage in recipe.stages)
    if fresh and recipe.model is None:
        text = 'is missing, but a stage starts from "init"; add [model], or start from a model.'
        yield Problem("model", text, starts)
    if recipe.model is not None and not fresh and not recipe.stages[0].start.startswith("stage:"):
        yield Problem("model", 'is set but will not be used: no stage has start = "init"; remove it.', starts)


def _data_references(recipe: Recipe) -> Iterator[Problem]:
    named = [("tokenizer.data", name) for name in recipe.tokenizer.data]
    for stage in recipe.stages:
        at = f"stages.{stage.name}"
        names = data_names(stage)
        named += [(f"{at}.data", name) for name in names]
        named += [(f"{at}.evaluate.data", stage.evaluate.data)] if stage.evaluate else []
        named += [(f"{at}.remember.replay", item.data) for item in stage.remember.replay]
        calibration = stage.quantise.calibration
        named += [] if calibration is None else [(f"{at}.quantise.calibration", calibration)]
        if len(set(names)) < len(names):
            yield Problem(f"{at}.data", "names a corpus twice; add the weights up in one entry.")
    known = list(recipe.data)
    unknown = [(path, name) for path, name in named if name not in known]
    for path, name in unknown:
        yield Problem(path, f"names {name!r}, which is no [data.*] section; {did_you_mean(name, known)}")
    fields = ("data", "evaluate", "remember", "quantise")
    reads = ("tokenizer.data", *(f"stages.{stage.name}.{field}" for stage in recipe.stages for field in fields))
    for name in known:
        if not unknown and name not in {used for _, used in named}:
            yield Problem(f"data.{name}", "is used by no stage; remove it, or name it in a stage's `data`.", reads)


def _start(stage: Stage, at: str, before: set[str]) -> Iterator[Problem]:
    kind, colon, name = stage.start.partition(":")
    if kind == "stage" and colon and name not in before:
        earlier = did_you_mean(name, sorted(before)) if before else "there is none; use init, or a model."
        yield Problem(f"{at}.start", f"is {stage.start!r}, but that is no earlier stage; {earlier}")
    if stage.start in before:
        yield Problem(f"{at}.start", f'is {stage.start!r}; write "stage:{stage.start}" to go on from that stage.')


def _data(recipe: Recipe) -> Iterator[Problem]:
    if recipe.tokenizer.kind == "file" and not recipe.tokenizer.path:
        yield Problem("tokenizer.path", 'is missing, but kind = "file" needs a tokenizer.json, a folder or a hub id.')
    if recipe.tokenizer.kind == "start" and recipe.stages[0].start == "init":
        first = f"stages.{recipe.stages[0].name}.start"
        yield Problem("tokenizer.kind", 'is "start", but the first stage starts from no model; name a file.', (first,))
    shares: dict[str, tuple[str, float]] = {}
    for name, section in recipe.data.items():
        at = f"data.{name}"
        yield from _fields(f"{at}.fields", section)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            yield Problem(at, "is not a good name: use letters, digits, - and _ only.")
        yield from _kind(f"{at}.source", section.source, SOURCES)
        if section.source in SOURCES:
            yield from _path(at, section)
        if section.split != "all" and section.holdout == 0:
            text = f'is 0, but split = "{section.split}" needs a share; set holdout = 0.01, say.'
            yield Problem(f"{at}.holdout", text, (f"{at}.split",))
        if section.split != "all":
            other, share = shares.setdefault(_text_of(section), (name, section.holdout))
            if share != section.holdout:
                yield Problem(
                    f"{at}.holdout",
                    f"is {section.holdout}, but {share} in data.{other}, of the same text: held-out documents would be "
                    f"trained on; use one value.",
                    (f"{at}.split", f"data.{other}"),
                )


def _fields(at: str, section: DataSection) -> Iterator[Problem]:
    known = (*FIELDS[section.format], *MESSAGE_FIELDS)
    for name in section.fields if section.format != "text" else ():
        if name not in known:
            text = f"names {name!r}, which rows of this format do not have; {did_you_mean(name, known)}"
            yield Problem(at, text, (at.replace("fields", "format"),))


def _text_of(section: DataSection) -> str:
    """Names the documents that a section chooses from."""
    return canonical([section.source, section.path, section.options])


def _path(at: str, section: DataSection) -> Iterator[Problem]:
    pathless = section.source in ("python-stdlib", "hf-hub")
    if pathless and section.path is not None:
        yield Problem(f"{at}.path", f"is set but will not be used by source {section.source!r}; remove it.")
    if not pathless and not section.path:
        yield Problem(f"{at}.path", f"is missing; source {section.source!r} needs files or folders to read.")


def _kinds(stage: Stage, at: str) -> Iterator[Problem]:
    yield from _kind(f"{at}.optim.kind", stage.optim.kind, OPTIMIZERS)
    yield from _kind(f"{at}.loss.kind", stage.loss.kind, LOSSES)


def _kind(path: str, kind: str, known: tuple[str, ...]) -> Iterator[Problem]:
    if kind not in known and not is_import_path(kind):
        yield Problem(path, f'is {kind!r}; {did_you_mean(kind, known)} Your own is written "package.module:Name".')


def _batch(stage: Stage, at: str, recipe: Recipe) -> Iterator[Problem]:
    sizes = [(f"{at}.batch_tokens", stage.batch_tokens)]
    sizes += [(f"{at}.ramp.{i}.batch_tokens", point.batch_tokens) for i, point in enumerate(stage.ramp)]
    rows = recipe.machine.microbatch_rows
    for path, tokens in sizes:
        reads = (f"{at}.context", "machine.microbatch_rows")
        if tokens % stage.context:
            near = max(1, round(tokens / stage.context)) * stage.context
            text = f"is {tokens}, not a whole number of rows of {stage.context} tokens; try {near}."
            yield Problem(path, text, reads)
        elif (tokens // stage.context) % rows:
            text = (
                f"is {tokens // stage.context} rows, not a whole number of microbatches of {rows} rows; "
                f"change it, or machine.microbatch_rows."
            )
            yield Problem(path, text, reads)
    last = 0
    for i, point in enumerate(stage.ramp):
        path = f"{at}.ramp.{i}.after"
        if point.after <= last:
            text = f"is {point.after}, but must be more than {last}, where the size before it begins; sort the points."
            yield Problem(path, text, (f"{at}.ramp",))
        elif stage.tokens and point.after >= stage.tokens:
            text = f"is {point.after}, but the stage ends at {stage.tokens} tokens; remove the point."
            yield Problem(path, text, (f"{at}.tokens",))
        last = point.after


def schedule_problems(stage: Stage, at: str) -> Iterator[Problem]:
    """What is wrong with the lengths of warm-up and decay, as far as the stage's own is known."""
    schedule, at = stage.optim.schedule, f"{at}.optim.schedule"
    wanted = {"warmup": schedule.warmup} | ({"decay": schedule.decay} if schedule.kind == "wsd" else {})
    for name, length in wanted.items():
        if length > 1 and length != int(length):
            yield Problem(f"{at}.{name}", f"is {length}: write a fraction below 1, or a whole number of steps.")
    if not stage.tokens:
        return  # how many steps so many epochs are is known when the data is built
    steps = BatchSchedule.of(stage).steps
    total = sum(round(length * steps if length < 1 else length) for length in wanted.values())
    if total > steps:
        parts = " and ".join(f"{name} {length:g}" for name, length in wanted.items())
        stage_fields = [f"stages.{stage.name}.{name}" for name in ("tokens", "batch_tokens", "context", "ramp")]
        reads = (*(f"{at}.{name}" for name in wanted), *stage_fields)
        yield Problem(at, f"has {parts}, more than the {steps} steps of the stage; make them shorter.", reads)


def _gate(stage: Stage, at: str, recipe: Recipe) -> Iterator[Problem]:
    gate, reads = stage.gate, (f"{at}.gate", f"{at}.evaluate", f"{at}.start", f"{at}.data")
    if gate is None:
        yield Problem(
            f"{at}.gate", 'is missing; add [stages.gate] with a bound, or kind = "none" with a reason to go without.'
        )
    elif gate.kind == "none":
        if not (gate.reason or "").strip():
            yield Problem(f"{at}.gate.reason", 'is missing; a stage with gate kind = "none" must say why.')
    elif stage.evaluate is None:
        yield Problem(f"{at}.evaluate", "is missing, but the gate needs held-out data; add [stages.evaluate].", reads)
    else:
        for name in {name: None for one in recipe.lineage(stage) for name in data_names(one)}:
            if _overlap(recipe.data.get(name), recipe.data.get(stage.evaluate.data)):
                text = (
                    f"is {stage.evaluate.data!r}, the same text as {name!r}, which is trained on: the gate would prove "
                    f'nothing; give one split = "train", the other split = "heldout", both the same holdout.'
                )
                yield Problem(f"{at}.evaluate.data", text, (*reads, "data"))
        fresh = stage.start == "init"
        if fresh and gate.max_loss is None and gate.max_bits_per_byte is None:
            yield Problem(f"{at}.gate", "has no bound and no parent to compare with; add max_bits_per_byte.", reads)
        if fresh and gate.margin > 0:
            yield Problem(f"{at}.gate.margin", "will not be used: the stage has no parent; remove it.", reads)


def _overlap(one: DataSection | None, other: DataSection | None) -> bool:
    """Whether two sections share documents, as far as their fields tell."""
    if one is None or other is None or _text_of(one) != _text_of(other):
        return False
    return {one.split, other.split} != {"train", "heldout"}


def _machine(recipe: Recipe) -> Iterator[Problem]:
    yield from mesh_problems(recipe)
    machine = recipe.machine
    if machine.activation_checkpointing == "auto" and recipe.model is not None and recipe.model.module is not None:
        text = 'is "auto", but what blocks of a module of your own keep is not known; choose "none" or "full".'
        yield Problem("machine.activation_checkpointing", text, ("model.module",))
    if machine.elastic.hang != "auto" and machine.elastic.hang >= machine.timeout:
        text = f"is no shorter than machine.timeout, which would end the run first; {machine.timeout / 2:g}s would do."
        yield Problem("machine.elastic.hang", text, ("machine.timeout",))
    for stage in recipe.stages:
        if machine.offload_optimizer and is_import_path(stage.optim.kind):
            text = f"moves the state of {' or '.join(OPTIMIZERS)}, not that of an optimizer of your own; remove it."
            yield Problem("machine.offload_optimizer", text, (f"stages.{stage.name}.optim.kind",))
    ledger = recipe.ledger
    if ledger.price_per_device_hour is not None and ledger.currency is None:
        yield Problem("ledger.currency", 'is missing, but there is a price; add currency = "EUR", say.')
    if not recipe.checkpoint.every and not recipe.checkpoint.every_time:
        yield Problem("checkpoint", "has every = 0 and every_time = 0: nothing would be saved; set one of them.")
