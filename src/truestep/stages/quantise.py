"""A stage that gives a model's weights fewer bits. The result is a model of its own: it is loaded back from its files
and held against its parent on held-out text. Rank 0 quantises; every rank evaluates its share with a model of its own.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from truestep.data.loader import evaluation_batches
from truestep.data.tokenizer import Tokenizer, check_vocab
from truestep.errors import DataError, ModelError
from truestep.files import publish, writing
from truestep.models.build import build_model
from truestep.models.decoder import Decoder
from truestep.models.hf import read_generation, read_scheme, read_section
from truestep.models.hf_names import hf_parts
from truestep.models.hf_pieces import hf_pieces
from truestep.models.hf_save import ALWAYS_AS_IT_IS, clear, save_beside, save_stored
from truestep.models.layers import Linear
from truestep.models.load import load_model, stored_dtype, tensors_of
from truestep.numerics.batch import Batch
from truestep.numerics.digest import state_digest
from truestep.numerics.quantised.gguf import FILE as GGUF
from truestep.numerics.quantised.gguf import open_tensors
from truestep.numerics.quantised.inputs import FIXED, fixed_scale
from truestep.numerics.quantised.scheme import Scheme, to_config
from truestep.quant import gguf
from truestep.quant.calibrate import calibrate
from truestep.quant.gptq import Seen
from truestep.quant.select import Choice, Weight, choose, fused
from truestep.quant.weights import check_finite, round_weight, scheme_of
from truestep.recipe.model import ModelSection
from truestep.recipe.posttrain import Quantise
from truestep.recipe.stage import Stage
from truestep.stages.assemble import text_of
from truestep.stages.context import Context
from truestep.stages.corpora import Corpora
from truestep.stages.finish import Finished, Untrained, conclude, phase
from truestep.stages.starts import Start, starting_point
from truestep.train.evaluate import HeldOut, Whole, evaluate

CONTEXT = 2048
"""Tokens of a row, where the recipe does not say and the model takes so many."""

LIST = "quantised.json"
"""Every weight that was quantised and every tensor that was kept, with the reason."""

Stored = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """What is quantised, how, from where."""

    start: Start
    section: ModelSection
    scheme: Scheme
    choice: Choice
    dtype: torch.dtype
    context: int


def carry_out(context: Context, stage: Stage) -> str:
    """Returns "done" or "gate" (the model was made, but not accepted). Every rank calls this."""
    start = starting_point(context, stage)
    assert start is not None
    plan = make_plan(stage, start)
    corpora = Corpora.prepare(context, stage, partial(_fits, plan.section))
    batches = calibration_batches(stage, plan, corpora) if context.job.first else []
    say_start(context, stage, plan)
    corpora.record(context)
    parent = held_out(context, stage, plan, corpora, start.directory)
    made: dict[str, Stored] = {}
    with phase(context, stage, "quantise"):
        context.job.agree(f"quantise/{stage.name}", lambda: made.update(stored=make(context, stage, plan, batches)))
    digest = state_digest(made.get("stored", {}))
    directory = context.model_dir(stage.name)
    place, size = str(directory.relative_to(context.run_dir)), sum(x.nbytes for x in made.get("stored", {}).values())
    context.note("model", stage=stage.name, path=place, digest=digest, bytes=size)
    figures = held_out(context, stage, plan, corpora, directory)
    ended = Untrained(asdict(parent) if parent else None)
    return conclude(context, stage, Finished(ended, plan.section, corpora, figures), digest)


def make_plan(stage: Stage, start: Start) -> Plan:
    """ModelError for a model that cannot be quantised so."""
    settings, directory = stage.quantise, start.directory
    what = f"stage {stage.name!r} starts from {start.pinned}"
    if read_scheme(directory) is not None or (directory / GGUF).exists():
        raise ModelError(f"{what}, which is quantised already, and rounding adds up; start from what it was made from")
    section = read_section(directory)
    if section.module is not None or section.scores:
        kind = "a reward model" if section.scores else "a module of your own"
        raise ModelError(f"{what}, {kind}, and only models of text of a known family are quantised; name one")
    if stage.context > section.max_context:
        raise ModelError(f"{what}, which takes rows of {section.max_context} tokens, not {stage.context}; lower it")
    ordered = settings.method == "gptq" and settings.act_order
    scheme = scheme_of(settings.scheme, settings.group, settings.symmetric, ordered)
    model = build_model(section, section.vocab_size)
    assert isinstance(model, Decoder)
    if section.moe is not None and scheme.inputs in FIXED:
        raise ModelError(
            f'{what}, which has experts, and scheme = "{settings.scheme}" finds scales of inputs of plain maps only; '
            f"take one without fixed scales"
        )
    weights = weights_of(model)
    choice = choose(weights, settings.keep, scheme)
    if settings.format == "gguf":
        widths = {name: one.shape[-1] for one in weights for name in one.theirs if name in choice.quantised}
        gguf.check(section, settings.scheme, settings.symmetric, widths)
    rows = stage.context or min(section.max_context, CONTEXT)
    # the layout decodes NVFP4 to bfloat16, and does so into models of that dtype only
    dtype = torch.bfloat16 if scheme.kind == "nvfp4" else stored_dtype(directory)
    return Plan(start, section, scheme, choice, dtype, rows)


def weights_of(model: Decoder) -> list[Weight]:
    """What a directory holds of a model, with roles."""
    roles, section = model.roles(), model.section
    found = []
    for name, tensor in tensors_of(model).items():
        theirs = hf_parts(name, section)
        shape = tuple(tensor.shape[1:] if len(theirs) > 1 else tensor.shape)
        found.append(Weight(name, roles.get(name), tuple(one for one, _ in theirs), shape))
    return found


def calibration_batches(stage: Stage, plan: Plan, corpora: Corpora) -> list[Batch]:
    """Rows of the calibration data, evenly spaced; DataError where they are too few to say anything."""
    corpus, settings = corpora.calibration(stage), stage.quantise
    if corpus is None:
        return []
    limit = settings.calibration_rows
    batches = list(evaluation_batches(corpus, plan.context, stage.mask_documents, 0, 1, 1, limit))
    tokens = sum(int((batch.documents_BT >= 0).sum()) for batch in batches if batch.documents_BT is not None)
    widest = max(plan.section.hidden_size, plan.section.intermediate_size)
    if not tokens:
        raise DataError(f"data.{settings.calibration} has no rows of {plan.context} tokens to calibrate on; add text")
    if settings.method == "gptq" and tokens < widest:
        raise DataError(
            f"data.{settings.calibration} gives {tokens} tokens in {len(batches)} rows to calibrate on, but maps of "
            f"{widest} inputs need as many for GPTQ; raise quantise.calibration_rows (now {limit}), or add text"
        )
    return batches


def make(context: Context, stage: Stage, plan: Plan, batches: list[Batch]) -> Stored:
    """Quantise and write the model's directory; what an earlier attempt left of it goes. The tensors as written."""
    directory, start = context.model_dir(stage.name), plan.start.directory
    context.require_newest()  # else the model of a newer attempt would go
    clear(directory)
    model = load_model(start, device=context.job.device)
    assert isinstance(model, Decoder)
    kept = Counter(plan.choice.kept.values())
    said = ", ".join(f"{count} kept ({why})" for why, count in kept.items())
    context.progress.say(f"{stage.name}: {len(plan.choice.quantised)} weights quantised; {said}")
    if stage.quantise.format == "gguf":
        stored = write_gguf(directory, model, stage, plan)
    else:
        stored = quantise(model, plan.choice, plan.scheme, plan.dtype, stage.quantise, batches)
        save_stored(
            directory,
            stored.items(),
            plan.section,
            dtype=plan.dtype,
            config={"quantization_config": to_config(plan.scheme, plan.choice.kept_maps)},
            tokenizer_dir=start,
            generation=read_generation(start),
        )
    listed = {"quantised": list(plan.choice.quantised), "kept": dict(plan.choice.kept)}
    with writing(directory / LIST):
        publish(directory / LIST, json.dumps(listed, indent=1).encode())
    return stored


def write_gguf(directory: Path, model: Decoder, stage: Stage, plan: Plan) -> Stored:
    """The model's directory with one GGUF file. The tensors that it holds, as the numbers that they stand for."""
    settings, start = stage.quantise, plan.start.directory
    pieces = {name: piece.local.cpu() for name, piece in hf_pieces(tensors_of(model), plan.section).items()}
    for name, tensor in pieces.items():
        check_finite(name, tensor)
    kind, names = gguf.KINDS[settings.scheme, settings.symmetric], frozenset(plan.choice.quantised)
    generation = read_generation(start)

    def write(file: Path) -> None:
        gguf.write(file, pieces.items(), names, kind, plan.section, start, generation)

    save_beside(directory, GGUF, write, plan.section, tokenizer_dir=start, generation=generation)
    heads = int(plan.section.num_heads or 0), int(plan.section.num_kv_heads or 0)
    opened = open_tensors(directory / GGUF, str(plan.section.family), heads)
    return {name: tensor[...] for name, tensor in opened.items()}


@torch.no_grad()
def quantise(
    model: Decoder,
    choice: Choice,
    scheme: Scheme,
    dtype: torch.dtype,
    settings: Quantise,
    batches: list[Batch],
) -> Stored:
    """All tensors of the model's files, by name. The weights of the model become what the files stand for."""
    pieces = {name: piece.local for name, piece in hf_pieces(tensors_of(model), model.section).items()}
    for name, tensor in pieces.items():
        check_finite(name, tensor)
    stored: Stored = {name: _kept(name, pieces[name], dtype) for name in choice.kept if name in pieces}
    done: set[str] = set()

    def settle(name: str, seen: Seen | None = None) -> None:
        weight, module = pieces[name], name.removesuffix(".weight")
        top = max(float(pieces[one].abs().max()) for one in fused(name) if one in pieces)
        products = seen.products_II if seen is not None else None
        found, values = round_weight(weight, scheme, dtype, products, settings.damp, top)
        if scheme.inputs in FIXED:
            assert seen is not None
            found[FIXED[scheme.inputs]] = fixed_scale(scheme.inputs, seen.top, dtype)
        stored.update({f"{module}.{key}": tensor.cpu() for key, tensor in found.items()})
        weight.copy_(values)
        done.add(name)

    if batches:
        modules = {f"{path}.weight": one for path, one in model.named_modules() if isinstance(one, Linear)}
        theirs = {name: hf_parts(name, model.section)[0][0] for name in modules}
        maps = {name: one for name, one in modules.items() if theirs[name] in choice.quantised}
        blocks = [(f"blocks.{number}", block) for number, block in model.blocks.named_children()]
        gptq = settings.method == "gptq"
        calibrate(model, blocks, batches, maps, gptq, lambda name, seen: settle(theirs[name], seen))
    for name in choice.quantised:
        if name not in done:
            settle(name)
    return stored


def _kept(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow = tensor.is_floating_point() and not name.endswith(ALWAYS_AS_IT_IS)
    return (tensor.to(dtype) if narrow else tensor).cpu()


def held_out(context: Context, stage: Stage, plan: Plan, corpora: Corpora, directory: Path) -> HeldOut | None:
    """Figures of the model that lies in a directory, over the whole held-out text. Collective."""
    corpus = corpora.held_out(stage)
    if corpus is None:
        return None
    job, machine = context.job, context.recipe.machine
    model = load_model(directory, device=job.device)
    share = job.rank, job.world
    batches = evaluation_batches(corpus, plan.context, stage.mask_documents, *share, machine.microbatch_rows)
    text = text_of(corpus, corpora.tokenizer, True)
    return evaluate(Whole(model, job.device), job, batches, text)


def say_start(context: Context, stage: Stage, plan: Plan) -> None:
    """What the stage's card is made from."""
    counts = asdict(plan.section.counts()) | {"total": plan.section.counts().total}
    data = [name for name in (stage.quantise.calibration,) if name]
    context.note(
        "stage_start",
        stage=stage.name,
        stage_kind=stage.kind,
        steps=0,
        context=plan.context,
        params=counts,
        precision=str(plan.dtype).removeprefix("torch."),
        start=plan.start.pinned,
        parent=plan.start.digest,
        data=data,
        model=plan.section.model_dump(mode="json"),
        settings={"stage": stage.model_dump(mode="json"), "inputs": plan.scheme.inputs},
    )


def _fits(section: ModelSection, tokenizer: Tokenizer) -> None:
    check_vocab(tokenizer, section.vocab_size)
