"""Counter-based random numbers: known answers, regions equal to the whole, and the right distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from truestep.numerics import counter
from truestep.numerics.counter import init_shard, key_of, normal, uniform, words

SHAPE = (7, 5, 6)
WHOLE = tuple(slice(0, n) for n in SHAPE)


@pytest.mark.parametrize(
    ("key", "block", "answer"),
    [
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),  # known answer of the paper's own code
        ((1 << 64) - 1, 0, None),
    ],
)
def test_words_are_philox(key: int, block: int, answer: list[int] | None):
    found = words(key, torch.tensor([block]))[0].tolist()
    assert found == (answer or plain_philox(key, block))
    assert found == plain_philox(key, block)


def plain_philox(key: int, block: int) -> list[int]:
    """The paper's rounds in Python's integers."""
    c, k = [block & 0xFFFFFFFF, block >> 32, 0, 0], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**62))
def test_words_for_any_key_and_block(key: int, block: int):
    assert words(key, torch.tensor([block]))[0].tolist() == plain_philox(key, block)


@given(st.data())
def test_a_region_is_cut_from_the_whole(data: st.DataObject):
    region = []
    for n in SHAPE:
        start = data.draw(st.integers(0, n))
        region.append(slice(start, data.draw(st.integers(start, n))))
    whole = init_shard("w", 3, SHAPE, WHOLE, 0.5)
    assert torch.equal(init_shard("w", 3, SHAPE, region, 0.5), whole[tuple(region)])


@pytest.mark.parametrize("chunk", [4, 8, 12, 64])
def test_chunks_do_not_show(chunk: int, monkeypatch: pytest.MonkeyPatch):
    whole = init_shard("w", 3, SHAPE, WHOLE, 1.0)
    inner = (slice(1, 6), slice(1, 4), slice(0, 6))
    monkeypatch.setattr(counter, "_CHUNK", {"cpu": chunk})
    assert torch.equal(init_shard("w", 3, SHAPE, WHOLE, 1.0), whole)
    assert torch.equal(init_shard("w", 3, SHAPE, inner, 1.0), whole[inner])


def test_streams_start_anywhere():
    for draw in (uniform, normal):
        whole = draw(9, 0, 100)
        assert torch.equal(draw(9, 33, 50), whole[33:83])


def test_names_and_seeds_are_different_streams():
    first = normal(key_of(0, "a"), 0, 8)
    assert not torch.equal(first, normal(key_of(0, "b"), 0, 8))
    assert not torch.equal(first, normal(key_of(1, "a"), 0, 8))
    assert torch.equal(first, normal(key_of(0, "a"), 0, 8))


def test_numbers_never_change():
    """A stored answer: other numbers would be another model for the same recipe."""
    expected = [1.2446142435073853, -0.7443838119506836, -1.639937400817871, -0.3452504575252533]
    assert normal(key_of(0, "embed.weight"), 0, 4).tolist() == expected


def test_normal_distribution():
    z = normal(key_of(5, "z"), 0, 1_000_000).double()
    n = len(z)
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96 / n)
    expected = 0.5 * (1 + torch.special.erf(z.sort().values / math.sqrt(2)))
    distance = (expected - (torch.arange(n).double() + 0.5) / n).abs().max()
    assert distance < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov, p = 0.001
    pairs = z[:-4].reshape(-1, 4)
    correlation = torch.corrcoef(pairs.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(len(pairs))


def test_elementary_functions_are_accurate():
    u = uniform(1, 0, 20_000)
    torch.testing.assert_close(counter._log(u), u.log(), atol=1e-15, rtol=1e-15)
    sine, cosine = counter._turn(u)
    torch.testing.assert_close(sine, (2 * math.pi * u).sin(), atol=1e-14, rtol=0)
    torch.testing.assert_close(cosine, (2 * math.pi * u).cos(), atol=1e-14, rtol=0)
    ends = torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)
    torch.testing.assert_close(counter._log(ends), ends.log(), atol=1e-15, rtol=1e-12)
    assert torch.isfinite(counter._box_muller(ends.repeat(2)[None])).all()
