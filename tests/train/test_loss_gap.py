"""What low precision costs in held-out loss, and in memory: measured beside training, which it does not touch."""

from functools import partial

import pytest
import torch

from tests import small_run, tiny
from truestep.cli import verbs
from truestep.cli.status import table
from truestep.dashboard.status import status
from truestep.models.decoder import Decoder
from truestep.models.layers import Linear
from truestep.recipe.numerics import LowPrecision, Numerics
from truestep.runlog.log import read
from truestep.train.evaluate import evaluate, evaluate_with_gap
from truestep.train.low_precision import products_high
from truestep.train.state import TrainState
from truestep.train.step import train_step


def state(kind: str | None, **options) -> TrainState:
    with torch.device("meta"):
        model = Decoder(tiny.section(hidden_size=64, intermediate_size=128, head_dim=32))
    low = None if kind is None else LowPrecision(kind=kind, high_last=0)  # pyright: ignore[reportArgumentType]
    return tiny.state(tiny.job(), model=model, numerics=Numerics(low_precision=low), **options)


def gap(training: TrainState):
    return evaluate_with_gap(training.parallel, training.job, lambda: tiny.rows(2, seed=9), None)


def products(training: TrainState) -> list:
    (part,) = training.parallel.parts
    return [module.product for module in part.modules() if isinstance(module, Linear)]


def test_the_gap_is_to_the_same_weights_without_low_precision():
    low, plain = gap(state("fp8-tensorwise")), gap(state(None))
    assert plain.high_loss is None
    assert low.high_loss == plain.loss, "both models have the same weights"
    assert 1e-6 < abs(low.loss - plain.loss) < 1e-2


@pytest.mark.parametrize("fails", [False, True])
def test_low_products_come_back_also_after_an_error(fails):
    training = state("fp8-rowwise")
    before = products(training)
    assert sum(product is not None for product in before) == 14
    try:
        with products_high(training.parallel):
            assert all(product is None for product in products(training))
            if fails:
                raise RuntimeError("inside")
    except RuntimeError:
        assert fails
    assert all(now is then for now, then in zip(products(training), before, strict=True))


@pytest.mark.parametrize("kind", ["fp8-tensorwise", "nvfp4"])
def test_evaluation_changes_no_bit_of_training(kind):
    weights = []
    for evaluates in (False, True):
        training = state(kind)
        for batch in tiny.rows(3):
            train_step(training, tiny.cut(batch, 6), batch.num_targets, [])
            if evaluates:
                gap(training)
        weights.append(training.parallel.named_parameters())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_second_evaluation_changes_no_figure_of_the_first():
    training = state("fp8-rowwise")
    once = evaluate(training.parallel, training.job, tiny.rows(2, seed=9), None)
    assert gap(training).loss == once.loss == gap(training).loss


def run(folder, **low) -> list:
    body = small_run.recipe(folder, tokens=5 * 12 * 32, evaluate={"data": "heldout", "every": 3})
    outcome = verbs.run(body | ({"numerics": {"low_precision": low}} if low else {}))
    assert outcome.reason == "finished"
    return [record.data for record in read(outcome.directory) if record.kind in ("eval", "memory")]


def test_a_run_records_and_shows_gap_and_memory(tmp_path):
    high, low = run(tmp_path / "high"), run(tmp_path / "low", kind="fp8-rowwise")
    assert [figures.step for figures in high] == [figures.step for figures in low] == [3, 3, 5]  # memory, then eval
    assert [figures.high_loss for figures in high[1:]] == [None, None]
    assert all(1e-6 < abs(figures.loss - figures.high_loss) < 1e-2 for figures in low[1:])
    assert 0 < low[0].kept_bytes < high[0].kept_bytes and low[0].peak_bytes is None
    pages = [(tmp_path / name / "runs/small/report.html").read_text() for name in ("high", "low")]
    said = f"{low[2].loss - low[2].high_loss:+.4f} nats per token"
    for words in (f"<dt>low precision costs</dt><dd>{said}", "Held-out loss that low precision adds"):
        assert words in pages[1] and words not in pages[0]
    assert "<dt>kept for backward</dt>" in pages[0]
    cells = table(status(tmp_path / "low" / "runs" / "small")).columns[1].cells
    assert any(str(cell).startswith(f"costs {said}") for cell in cells)


SIZES = {
    "fp8": partial(state, "fp8-tensorwise"),
    "nvfp4": partial(state, "nvfp4"),
    "fp32": partial(state, None),
    "selective": partial(state, None, activation_checkpointing="selective"),
    "full": partial(state, None, activation_checkpointing="full"),
}


def test_fp8_keeps_fewer_bytes_and_recomputation_fewer_still():
    kept = {}
    for name, made in SIZES.items():
        training, batch = made(), tiny.rows()[0]
        train_step(training, tiny.cut(batch, 6), batch.num_targets, [])
        kept[name] = training.parallel.kept.total
    assert kept["full"] < kept["selective"] < kept["nvfp4"] < kept["fp8"] < kept["fp32"]
    # by block and token: one byte instead of four of what q, k and v take, of what gate and up take, and of what down
    # takes; attention keeps its own result, so that a low copy of it comes on top
    expected = 2 * 6 * tiny.CONTEXT * (3 * (64 + 64 + 128) - 128)
    assert expected - 1000 < kept["fp32"] - kept["fp8"] < expected, "but for a few scales"
