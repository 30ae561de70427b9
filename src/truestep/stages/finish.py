"""The end of a stage: export the model, hold it against its gate, show samples, write its card (always last)."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from truestep.data.store import TokenStore
from truestep.files import publish, writing
from truestep.gate.heldout import Verdict, decide
from truestep.ledger.card import build_card, write_card
from truestep.models.hf_save import clear, save_hf
from truestep.numerics.digest import state_digest
from truestep.recipe.digests import what
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.rollout.directory import sample_from, token_ids
from truestep.stages.context import Context
from truestep.stages.corpora import Corpora
from truestep.stages.export_adapter import export_adapter
from truestep.stages.scored import name_padding, padding_id
from truestep.stages.yardstick import yardstick
from truestep.train.evaluate import HeldOut
from truestep.train.state import TrainState


@dataclass(frozen=True)
class Untrained:
    """In the place of a state of training: of a stage that makes a model without it. `parent`: see TrainState."""

    parent: dict[str, Any] | None
    step: int = 0


@dataclass(frozen=True)
class Finished:
    """A stage whose work is done. `figures` are the final held-out ones of its model."""

    state: TrainState | Untrained
    section: ModelSection
    corpora: Corpora
    figures: HeldOut | None


def finish(context: Context, stage: Stage, done: Finished) -> str:
    """Returns "done", or "gate" where the model was not accepted. Every rank calls this; rank 0 writes and speaks."""
    with phase(context, stage, "export"):
        digest = export(context, stage, done)
    return conclude(context, stage, done, digest)


def conclude(context: Context, stage: Stage, done: Finished, digest: str) -> str:
    """`finish` of a model that lies in its directory already."""
    directory = context.model_dir(stage.name)

    def conclude() -> str:
        with phase(context, stage, "gate"):
            verdict = judge(context, stage, done)
        with phase(context, stage, "samples"):
            show_samples(context, stage, done)
        write_manifest(context, stage, done, digest, verdict)
        card = build_card(context.run_dir, stage.name)
        sealed, where = write_card(directory, card), str(directory.relative_to(context.run_dir))
        context.note("card", stage=stage.name, path=where, digest=sealed, records=card["log"]["records"])
        context.progress.say(f"{stage.name}: weights {digest}, model, card.md and card.json in {directory}")
        return "done" if verdict.promotes else "gate"

    return context.job.agree(f"finish/{stage.name}", conclude)


@contextmanager
def phase(context: Context, stage: Stage, name: str) -> Iterator[None]:
    """Note how long a part took that is no training."""
    began = time.perf_counter()
    yield
    context.note("phase", name=name, seconds=time.perf_counter() - began, stage=stage.name)


def export(context: Context, stage: Stage, done: Finished) -> str:
    """Write the model directory and return the digest of its weights. What an earlier attempt left unfinished goes."""
    assert isinstance(done.state, TrainState)
    directory = context.model_dir(stage.name)

    def make_room() -> None:
        context.require_newest()  # else the model of a newer attempt would go
        clear(directory)

    context.job.agree(f"clear/{stage.name}", make_room)
    corpora, pad = done.corpora, None
    if done.section.scores:
        pad = padding_id(corpora.tokenizer_dir, corpora.tokenizer.eod_id, corpora.stores.values())
    ids = token_ids(corpora.tokenizer) | ({} if pad is None else {"pad_token_id": pad})
    options: dict[str, Any] = {"tokenizer_dir": corpora.tokenizer_dir, "generation": ids}
    if stage.lora is not None:
        digest, size = export_adapter(context, stage, done.state, done.section, directory, options)
    else:
        tensors = done.state.result()
        digest = state_digest(tensors)
        size = save_hf(directory, tensors, done.section, **options)
    if pad is not None and context.job.first and (stage.lora is None or stage.lora.merge):
        name_padding(directory, pad)
    place = str(directory.relative_to(context.run_dir))
    context.note("model", stage=stage.name, path=place, digest=digest, bytes=size)
    return digest


def judge(context: Context, stage: Stage, done: Finished) -> Verdict:
    """The gate's verdict, logged and said, with the yardsticks beside it."""
    figures = asdict(done.figures) if done.figures else {}
    if stage.evaluate and stage.evaluate.yardstick and done.figures:
        show_yardstick(context, stage, done)
    assert stage.gate is not None
    verdict = decide(stage.gate, figures, done.state.parent)
    reason = "; ".join(verdict.reasons)
    context.note(
        "gate", stage=stage.name, verdict=verdict.outcome, reason=reason, gate_kind=stage.gate.kind, figures=figures
    )
    word = "UNGATED" if verdict.outcome == "ungated" else f"gate: {verdict.outcome}"
    context.progress.say(f"{stage.name}: {word} ({reason})")
    return verdict


def show_yardstick(context: Context, stage: Stage, done: Finished) -> None:
    assert stage.evaluate is not None and done.figures is not None
    store = done.corpora.stores[stage.evaluate.data]
    assert isinstance(store, TokenStore)  # what the recipe's checks see to
    others = yardstick(store, done.corpora.tokenizer)
    context.note("yardstick", data=stage.evaluate.data, bytes=store.num_bytes, bits_per_byte=others)
    table = Table(
        "held-out text coded by", "bits per byte", title=f"{store.num_bytes:,} bytes of {stage.evaluate.data}"
    )
    ours = {f"this model ({stage.name})": done.figures.bits_per_byte}
    for name, value in sorted((others | ours).items(), key=lambda pair: -(pair[1] or 0)):
        table.add_row(name, "not known" if value is None else f"{value:.4f}")
    context.progress.table(table)


def show_samples(context: Context, stage: Stage, done: Finished) -> None:
    """Completions of the model as it was exported: loaded back from its directory."""
    directory = context.model_dir(stage.name)
    if stage.sample is None:
        return
    asked = stage.sample
    texts = sample_from(
        directory,
        asked.prompts,
        asked.max_new_tokens,
        asked.temperature,
        asked.top_p,
        context.recipe.run.seed,
        own_module=done.section.module,
        device=context.job.device.type,
    )
    for prompt, text in zip(asked.prompts, texts):
        context.note("sample", stage=stage.name, prompt=prompt, text=text)
        context.progress.say(f"sample> {escape(prompt)}[green]{escape(text)}[/green]")


def write_manifest(context: Context, stage: Stage, done: Finished, digest: str, verdict: Verdict) -> None:
    """manifest.json of the model: its name, lineage, digests and verdict."""
    body: dict[str, Any] = {
        "format": 1,
        "name": f"{context.recipe.run.name}/{stage.name}@{digest[:16]}",
        "weights": digest,
        "recipe": what(context.recipe),
        "lineage": {"stage": stage.name, "kind": stage.kind, "start": stage.start, "steps": done.state.step}
        | ({"teacher": stage.distill.teacher} if stage.distill else {}),
        "tokenizer": done.corpora.tokenizer.fingerprint,
        "data": {name: store.fingerprint for name, store in done.corpora.stores.items()},
        "gate": {"verdict": verdict.outcome, "reasons": verdict.reasons},
        "log_head": context.log.head() if context.log else None,
    }
    file = context.model_dir(stage.name) / "manifest.json"
    with writing(file):
        publish(file, json.dumps(body, indent=1, sort_keys=True).encode())
