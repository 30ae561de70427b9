"""Context parallelism equals one device; labels at the edges of parts; even work; memory that falls with the ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from tests.parallel.compositions import Composition
from tests.parallel.harness import check
from truestep.errors import UserError
from truestep.models.context import rule_of
from truestep.models.decoder import Decoder
from truestep.numerics.axis import Axes, Axis
from truestep.numerics.batch import IGNORE, Batch, columns
from truestep.recipe.machine import Context, Mesh
from truestep.train.evaluate import evaluate
from truestep.train.step import train_step

STYLES = {
    "balanced": {"style": "all-gather", "balance": True},
    "contiguous": {"style": "all-gather", "balance": False},
    "ulysses": {"style": "ulysses"},
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"documents": True},
    "window": {"window": 5, "heads": 4, "kv_heads": 1},
    "softcap": {"softcap": True, "heads": 8, "kv_heads": 4},
    "norms": {"qk_norm": "full", "documents": True, "heads": 4, "kv_heads": 4, "placement": "post"},
    "latent": {"mla": "queries", "documents": True},
}


MESHES = {"cp4": {"cp": 4}, "cp2 tp2": {"cp": 2, "tp": 2}, "dp2 cp2": {"dp_shard": 2, "cp": 2}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("style", STYLES)
def test_gradients_are_those_of_one_device(pool, tmp_path: Path, style: str, model: str):
    _assert_exact(pool, Composition(cp=2, **STYLES[style], **MODELS[model]), tmp_path)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_those_of_one_device_on_every_mesh(pool, tmp_path: Path, mesh: str, style: str):
    one = Composition(**MESHES[mesh], **STYLES[style], documents=True, window=5, softcap=True, heads=8, kv_heads=2)
    _assert_exact(pool, one, tmp_path)


def _assert_exact(pool, one: Composition, folder: Path) -> None:
    report = check(pool, one, folder, steps=1)
    assert report.gradient[0] <= 1e-12, report.gradient
    assert report.weight[0] <= 1e-12, report.weight  # losses and norms too


def test_ulysses_shares_key_heads_unevenly(pool, tmp_path: Path):
    """Three key heads for six query heads on two ranks: the middle one goes to both, for one query head each."""
    _assert_exact(pool, Composition(cp=2, style="ulysses", heads=6, kv_heads=3, documents=True), tmp_path)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("style", STYLES)
def test_recomputation_changes_nothing(pool, tmp_path: Path, style: str, recompute: str):
    one = Composition(cp=2, **STYLES[style], recompute=recompute, documents=True, rows=4)
    _assert_exact(pool, one, tmp_path)


# C35


ROW = torch.arange(1, 9)[None]
LABELS = torch.tensor([[2, 3, 4, 5, 6, 7, 8, IGNORE]])
PLACES = torch.arange(8)[None]
PARTS = {
    "contiguous": [[1, 2, 3, 4], [5, 6, 7, 8]],
    "balanced": [[1, 2, 7, 8], [3, 4, 5, 6]],
    "ulysses": [[1, 2, 3, 4], [5, 6, 7, 8]],
}


def row(documents: bool) -> Batch:
    """Tokens 1..8 as one document, or as two with their edge on that of the parts."""
    if not documents:
        return Batch(ROW, LABELS, PLACES, torch.zeros(1, 8, dtype=torch.int32))
    labels_BT = LABELS.clone()
    labels_BT[0, 3] = IGNORE
    return Batch(ROW, labels_BT, PLACES % 4, (PLACES >= 4).to(torch.int32))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_c35_labels_are_shifted_before_rows_are_parted(pool, style: str, documents: bool):
    """Seven targets on two ranks (six with two documents), and the loss of one device."""
    batch = row(documents)
    alone = tiny.state(tiny.job(), precision="float64")
    held_out = evaluate(alone.parallel, alone.job, [batch], None)
    loss = train_step(alone, [batch], batch.num_targets, []).loss
    found = pool.run(_c35, 2, STYLES[style], documents)
    assert [tokens for tokens, *_ in found] == PARTS[style]
    label = {1 + at: label for at, label in enumerate(batch.labels_BT[0].tolist())}
    assert [labels for _, labels, *_ in found] == [[label[token] for token in part] for part in PARTS[style]]
    assert sum(targets for _, _, targets, *_ in found) == (6 if documents else 7)
    for *_, loss_on_rank, evaluated, num_evaluated in found:
        assert loss_on_rank == pytest.approx(loss, rel=1e-14)
        assert evaluated == pytest.approx(held_out.loss, rel=1e-14)
        assert num_evaluated == held_out.targets == batch.num_targets


def _c35(rank: int, world: int, style: dict, documents: bool):
    state = tiny.state(tiny.job(rank, world), precision="float64", mesh=Mesh(cp=2), context=Context(**style))
    batch = row(documents)
    part = state.parallel.own_part(batch)
    held_out = evaluate(state.parallel, state.job, [batch], None)
    loss = train_step(state, [batch], batch.num_targets, []).loss
    return (
        part.tokens_BT[0].tolist(),
        part.labels_BT[0].tolist(),
        part.num_targets,
        loss,
        held_out.loss,
        held_out.targets,
    )


def test_every_rank_answers_alike_whether_rows_are_whole():
    """Documents whose edge is that of the parts: to each rank its own columns look like one document."""
    for rank in range(2):
        part = row(True).part(columns(8, 2, rank))
        assert part.to("cpu").documents_BT is not None
        assert row(False).part(columns(8, 2, rank)).to("cpu").documents_BT is None
        assert part.without_targets().to("cpu").documents_BT.shape == (1, 8)


def test_rows_that_have_no_equal_parts_are_refused():
    with pytest.raises(UserError, match=r"a row of 10 tokens has no 8 equal parts .* nearest: 8 or 16"):
        columns(10, 4, 0, parts=2)


# work and memory


def axes_of(rank: int, size: int, **context) -> Axes:
    return Axes(cp=Axis("cp", size, rank, dist.group.WORLD or object()), context=Context(**context))  # pyright: ignore[reportArgumentType]


def work(documents_BS: torch.Tensor | None, window: int | None, size: int, rank: int, **context) -> tuple[int, int]:
    """Pairs of a query and a key that it sees, and pairs of which a dense kernel makes scores."""
    axes = axes_of(rank, size, **context)
    options = {"device": torch.device("cpu"), "softcap": True, "head_dim": 16, "dtype": torch.float32}
    pairs = scores = 0
    for chunk in rule_of(axes, documents_BS, 64, window, **options):
        T, S = (places.stop - places.start for places in (chunk.queries, chunk.keys))
        pairs += T * (T + 1) // 2 if chunk.mask is None else int(chunk.mask.sum())
        scores += T * S
    return pairs, scores


@pytest.mark.parametrize("size", [2, 4, 8])
def test_balanced_ranks_have_equal_work(size: int):
    balanced = [work(None, None, size, rank) for rank in range(size)]
    assert len(set(balanced)) == 1
    assert sum(pairs for pairs, _ in balanced) == 64 * 65 // 2
    contiguous = [work(None, None, size, rank, balance=False)[0] for rank in range(size)]
    assert max(contiguous) > 1.4 * balanced[0][0] and sum(contiguous) == 64 * 65 // 2


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_chunks_see_what_their_queries_see_in_the_whole_row(balance: bool, window: int | None):
    random = torch.Generator().manual_seed(0)
    documents_BS = (torch.rand(3, 64, generator=random) < 0.05).cumsum(1).to(torch.int32)
    documents_BS[1, 50:] = -1
    options = {"device": torch.device("cpu"), "softcap": True, "head_dim": 16, "dtype": torch.float32}
    whole = rule_of(Axes(), documents_BS, 64, window, **options)
    for rank in range(4):
        axes = axes_of(rank, 4, balance=balance)
        for chunk, places in zip(rule_of(axes, documents_BS, 64, window, **options), axes.columns(64), strict=True):
            seen = torch.zeros(3, 1, len(places), 64, dtype=torch.bool)
            seen[..., chunk.keys] = chunk.mask
            assert torch.equal(seen, whole[:, :, places.start : places.stop])


def test_positions_count_in_the_row_where_none_are_given(pool):
    found = pool.run(_without_positions, 2)
    assert all(found)


def _without_positions(rank: int, world: int) -> bool:
    model = tiny_model(Axes(cp=Axis("cp", world, rank, dist.group.WORLD)))
    batch = tiny.rows()[0].part(model.axes.columns(tiny.CONTEXT))
    places = torch.cat([torch.arange(p.start, p.stop) for p in model.axes.columns(tiny.CONTEXT)])[None]
    return torch.equal(model(batch.tokens_BT), model(batch.tokens_BT, places))


def tiny_model(axes: Axes, **options) -> Decoder:
    model = Decoder(tiny.section(**options))
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    model.place(axes)
    return model


LENGTH = 64


@pytest.mark.parametrize("style", STYLES)
def test_memory_of_activations_falls_with_the_ranks(pool, style: str):
    """As many key heads as query heads, so that keys and values of whole rows, were they kept, would show (1.5 times as
    much). What there may be besides a quarter is the results of two chunks joined into one."""
    (alone,) = pool.run(_saved_bytes, 1, {})
    ranks = pool.run(_saved_bytes, 4, STYLES[style])
    assert alone > 1e6
    assert max(ranks) < alone / 4 * 1.1


def _saved_bytes(rank: int, world: int, style: dict) -> int:
    """Bytes alive between forward and backward for the backward pass's sake, parameters aside."""
    axes = Axes(cp=Axis("cp", world, rank, dist.group.WORLD), context=Context(**style)) if world > 1 else Axes()
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 192}
    model = tiny_model(axes, **sizes)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    tokens_BT = torch.arange(LENGTH)[None] % tiny.VOCAB
    tokens_BT = torch.cat([tokens_BT[:, p.start : p.stop] for p in axes.columns(LENGTH)], dim=1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = model(tokens_BT, head=lambda out: out.hidden_BTD.square().sum())
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    out.backward()
    return num_bytes
