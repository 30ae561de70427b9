"""Fingerprints see every bit and every place, and add up over any cut."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist import run_ranks
from truestep.numerics import fingerprint as module
from truestep.numerics.fingerprint import combined, fingerprint, fingerprints, shown
from truestep.numerics.fixed_point import signed
from truestep.numerics.pieces import Piece

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, NaNs and all."""
    size = dtype.itemsize
    found = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, (*shape, size), dtype=np.uint8)
    return torch.from_numpy(found).view(dtype).reshape(shape)


def _cut(whole: torch.Tensor, box: tuple[slice, ...]) -> Piece:
    return Piece(whole[box], tuple(whole.shape), tuple(part.start for part in box))


def _add(values: list[int]) -> int:
    return signed(sum(values))


@settings(max_examples=60)
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), data=st.data())
def test_any_cut_adds_up(shape, dtype, data):
    """Cut along any dimensions, empty parts included: the sum is the whole one's."""
    whole = _random(shape, dtype)
    boxes: list[tuple[slice, ...]] = [()]
    for size in shape:
        at = sorted(data.draw(st.lists(st.integers(0, size), max_size=2)))
        edges = [0, *at, size]
        boxes = [(*box, slice(a, b)) for box in boxes for a, b in pairwise(edges)]
    parts = [int(fingerprint(_cut(whole, box))) for box in boxes]
    assert _add(parts) == fingerprint(whole).item()


def test_long_rows_many_rows_and_short_trailing_dimensions(monkeypatch):
    """Whatever the size of a chunk: the same, and the same as the formula in plain integers."""
    for shape in ((1000,), (3, 200), (200, 3), (40, 2, 1, 3), (2, 3, 100)):
        whole = _random(shape, torch.float64)
        found = set()
        for chunk in (16, 100, 2**17):
            monkeypatch.setitem(module._CHUNK, "cpu", chunk)
            found.add(fingerprint(whole).item())
        assert found == {_plain(whole)}


def _plain(whole: torch.Tensor) -> int:
    words = whole.view(torch.int32).numpy()
    weights = [module._odd(dim, 0, size, whole.device).tolist() for dim, size in enumerate(words.shape)]
    total = 0
    for index, word in np.ndenumerate(words):
        product = int(word)
        for dim, at in enumerate(index):
            product *= weights[dim][at]
        total += product
    return signed(total)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool])
def test_every_single_flipped_bit_counts(dtype):
    whole = _random((3, 5), dtype)
    before = fingerprint(whole).item()
    raw = whole.view(torch.uint8).reshape(-1)
    seen = set()
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        seen.add(fingerprint(whole).item())
        raw[bit // 8] ^= 1 << bit % 8
    assert before not in seen and len(seen) == 8 * len(raw), "each flip has a fingerprint of its own"
    assert fingerprint(whole).item() == before


@settings(max_examples=60)
@given(
    a=st.integers(0, 2**32 - 1), b=st.integers(0, 2**32 - 1), row=st.integers(0, 2**20), column=st.integers(0, 2**20)
)
def test_one_element_of_other_bits_always_differs(a, b, row, column):
    def of(bits: int) -> int:
        local = torch.from_numpy(np.array([[bits]], dtype=np.uint32).view(np.float32))
        return int(fingerprint(Piece(local, (2**21, 2**21), (row, column))))

    assert (of(a) == of(b)) == (a == b)


def _single(pattern: int) -> torch.Tensor:
    return torch.from_numpy(np.array([pattern], dtype=np.uint32).view(np.float32).copy())


def test_c51_raw_bits_decide():
    assert fingerprint(_single(0x7FC00001)) == fingerprint(_single(0x7FC00001)), "NaN with the same payload"
    assert fingerprint(_single(0x7FC00001)) != fingerprint(_single(0x7FC00002))
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_faults_with_a_pattern(dtype):
    """Swapped elements, rows and columns, flipped signs of any pair, a shifted tensor: each has its own fingerprint."""
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    variants = [whole, whole.roll(1, 0), whole.roll(1, 1), whole.flip(0), whole.flip(1), -whole]
    for a in range(6):
        for b in range(a):
            order = list(range(6))
            order[a], order[b] = b, a
            variants += [whole[order], whole[:, [*order, 6, 7]]]
    for a in range(48):
        for b in range(a):
            signs = torch.ones(48)
            signs[a] = signs[b] = -1
            variants.append(whole * signs.view(6, 8).to(dtype))
    found = [fingerprint(variant).item() for variant in variants]
    assert len(set(found)) == len(found)


def test_layout_in_memory_does_not_count():
    whole = _random((4, 6), torch.float32)
    assert fingerprint(whole) == fingerprint(whole.t().contiguous().t())
    assert fingerprint(torch.zeros(0, 3)) == 0


def test_one_text_for_all():
    tensors = {"a": torch.ones(2), "b": torch.full((2,), -3.0)}
    values = fingerprints(tensors, ["a", "b"]).tolist()
    assert combined(["a", "b"], values) == combined(["b", "a"], values[::-1])
    assert combined(["a", "b"], values) != combined(["a", "b"], values[::-1])
    assert len(combined(["a"], [-1])) == 32 and shown(-1) == "f" * 16
    assert fingerprints({}, []).shape == (0,)


def _on_ranks(rank: int, world: int) -> list[int]:
    whole = {f"t{i}": _random((5, 4), torch.float32, i) for i in range(4)}
    mesh = init_device_mesh("cpu", (world,))
    pieces: dict = {"t0": distribute_tensor(whole["t0"], mesh, [Shard(0)])}
    pieces["t1"] = distribute_tensor(whole["t1"], mesh, [Shard(1)])
    pieces["t2"] = Piece(whole["t2"], (5, 4), (0, 0), owned=rank == 1)
    if rank == 2:
        pieces["t3"] = whole["t3"]
    found = fingerprints(pieces, sorted(whole))
    torch.distributed.all_reduce(found)
    return found.tolist()


def test_one_sum_over_ranks():
    whole = [fingerprint(_random((5, 4), torch.float32, i)).item() for i in range(4)]
    assert run_ranks(_on_ranks, 3) == [whole] * 3


def test_the_fingerprint_stays_what_older_logs_recorded():
    assert shown(int(fingerprint(torch.arange(12.0).reshape(3, 4)))) == "08278412eb800000"
