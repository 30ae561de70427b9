"""Fixed point, exact sums and the checksums of collectives, against Python's own integers and fractions."""

import math
import random
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from tests.dist import run_ranks
from truestep.numerics.exact_collectives import bit_sum, exchange_rows, sum_integers_
from truestep.numerics.exact_sum import LIMBS, from_limbs, to_limbs
from truestep.numerics.fixed_point import (
    BOUND_LOG2,
    EXPONENT_LIMIT,
    TARGET_LOG2,
    UNKNOWN,
    add_rounded,
    exponent_for,
    fits,
    next_exponent,
    squares_to_float,
    sum_of_squares,
    to_float,
)
from truestep.numerics.uses import as_use

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def numbers(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Of many magnitudes, both signs, with zeros, ties and the smallest there are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * torch.exp2(torch.randint(-60, 8, shape, generator=generator))
    flat = x.view(-1)
    flat[:6] = torch.tensor([0.0, -0.0, 2.0**-41 * 3, -(2.0**-41), 2.0**-41 * 5, 1e-45])
    return x.to(dtype)


def rounded(x: float, exponent: int) -> int:
    return round(Fraction(x) * Fraction(2) ** exponent)  # Python rounds half to even


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_those_of_integers(dtype, device):
    x_RN, exponent = numbers(3, 1003, dtype=dtype), 36
    total_N = torch.arange(1003) - 500
    expected = [
        n - 500 + sum(rounded(x, exponent) for x in column) for n, column in enumerate(x_RN.double().T.tolist())
    ]
    total_N = total_N.to(device)
    largest = add_rounded(total_N, x_RN.to(device), exponent)
    assert total_N.tolist() == expected
    assert largest.item() == x_RN.double().abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_columns_and_order_change_nothing(device, monkeypatch):
    x_RN = numbers(5, 4001)[:, 1::3].to(device)  # a view with strides
    whole = torch.zeros(x_RN.shape[1], dtype=torch.int64, device=device)
    add_rounded(whole, x_RN, 30)
    monkeypatch.setattr("truestep.numerics.fixed_point._BLOCK", {device: 7})
    parts = torch.zeros_like(whole)
    for row in reversed(range(5)):
        for start in (700, 0):
            columns = slice(start, start + 700)
            add_rounded(parts[columns], x_RN[row : row + 1, columns], 30)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_largest(value):
    x_RN = numbers(2, 70)
    x_RN[1, 33] = value
    assert not math.isfinite(add_rounded(torch.zeros(70, dtype=torch.int64), x_RN, 10).item())


def test_an_unknown_exponent_only_measures():
    total_N = torch.zeros(50, dtype=torch.int64)
    assert add_rounded(total_N, numbers(1, 50), UNKNOWN) == numbers(1, 50).abs().max()
    assert not total_N.any()
    assert not to_float(total_N + 3, UNKNOWN, torch.float32).any()
    assert add_rounded(total_N[:0], numbers(1, 50)[:, :0], 3) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_integers_become_the_nearest_float(device):
    randomly = random.Random(1)
    integers = [randomly.randrange(-(2**62), 2**62) >> randomly.randrange(62) for _ in range(1001)]
    integers += [2**24 + 1, 2**24 + 3, -(2**53) - 1, 2**62, -(2**62), 2**61 + 2**37 + 1, 0]
    total_N = torch.tensor(integers, device=device)
    for dtype, bits in ((torch.float32, 24), (torch.float64, 53)):
        got = to_float(total_N, 40, dtype).tolist()
        assert got == [float(Fraction(nearest(n, bits), 2**40)) for n in integers]


def nearest(n: int, bits: int) -> int:
    """To `bits` significant bits, half to even."""
    spare = max(0, n.bit_length() - bits)
    return round(Fraction(n, 2**spare)) * 2**spare


def test_exponents_put_the_largest_where_it_belongs():
    for largest in (1.0, 0.999, 1.5, 3e-12, 2.0**-80, 7e20):
        exponent = exponent_for(largest)
        assert 2 ** (TARGET_LOG2 - 1) <= largest * 2.0**exponent < 2**TARGET_LOG2
        room = 2.0 ** (BOUND_LOG2 - TARGET_LOG2)
        assert fits(exponent, largest * room) and not fits(exponent, largest * room * 2)
    assert exponent_for(1e-45) == EXPONENT_LIMIT and exponent_for(1e300) == -EXPONENT_LIMIT
    assert exponent_for(0.0) == UNKNOWN and fits(UNKNOWN, 0.0) and not fits(UNKNOWN, 1e-40)


def test_scales_grow_coarser_at_once_and_finer_bit_by_bit():
    calm = exponent_for(1.0)
    assert next_exponent(calm, 64.0) == calm - 6
    assert next_exponent(calm - 6, 1.0) == calm - 5
    assert next_exponent(calm, 0.0) == calm
    assert next_exponent(UNKNOWN, 1.0) == calm and next_exponent(UNKNOWN, 0.0) == UNKNOWN


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_is_exact_and_knows_no_division(device, monkeypatch):
    parts = [numbers(n, seed=n) * size for n, size in ((2003, 1.0), (517, 1e-9), (64, 1e6))]
    largest = [part.abs().max().item() for part in parts]
    exact = math.sqrt(sum(Fraction(x) ** 2 for part in parts for x in part.tolist()))

    def norm(cuts: int) -> float:
        limbs = [
            sum(sum_of_squares(piece.to(device), top).cpu() for piece in part.chunk(cuts))
            for part, top in zip(parts, largest)
        ]
        return squares_to_float([int(pair[0]) for pair in limbs], [int(pair[1]) for pair in limbs], largest)

    assert norm(1) == pytest.approx(exact, rel=1e-12)
    assert norm(1) == norm(3) == norm(50)
    monkeypatch.setattr("truestep.numerics.fixed_point._BLOCK", {device: 13})
    assert norm(1) == norm(2)
    monkeypatch.setattr("truestep.numerics.fixed_point._BLOCK", {device: 100})  # several runs in a block, as on a GPU
    monkeypatch.setattr("truestep.numerics.fixed_point._RUN_LOG2", 4)
    assert norm(1) == norm(3) == pytest.approx(exact, rel=1e-12)


def test_the_norm_at_the_ends_of_the_range():
    for top in (1e-44, 1e-30, 3e38):
        x_N = torch.full((100,), top, dtype=torch.float32)
        high, low = sum_of_squares(x_N, x_N[0].item()).tolist()
        assert squares_to_float([high], [low], [x_N[0].item()]) == pytest.approx(10 * x_N[0].item(), rel=1e-12)
    assert squares_to_float([0], [0], [0.0]) == 0.0


def test_limbs_hold_what_a_trillion_elements_add_up_to():
    """Each block of 2^18 squares gives at most 2^62; 2^22 such blocks make 2^40 elements."""
    block = 2**18 * 2**44
    high, low = (block >> 32) * 2**22, (2**32 - 1) * 2**22
    assert max(high, low) < 2**63


def test_sums_of_a_few_numbers_are_correctly_rounded_in_any_order():
    randomly = random.Random(3)
    values = [randomly.gauss(0, 1) * 10.0 ** randomly.randrange(-20, 20) for _ in range(200)] + [-0.0, 1e30, -1e30]
    expected = float(sum(map(Fraction, values)))
    for _ in range(5):
        randomly.shuffle(values)
        cut = randomly.randrange(200)
        limbs = [a + b for a, b in zip(to_limbs(values[:cut]), to_limbs(values[cut:]))]
        assert from_limbs(limbs) == expected
        assert all(abs(limb) < 2**63 for limb in limbs) and len(limbs) == LIMBS
    assert from_limbs(to_limbs([])) == 0.0
    assert from_limbs(to_limbs([-1.5, 0.25])) == -1.25


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e200])
def test_a_sum_of_what_is_out_of_range_is_no_number(value):
    assert math.isnan(from_limbs(to_limbs([1.0, value])))


def test_bit_sums_wrap_around_and_see_every_bit():
    for columns in (6, 7):
        x_RN = numbers(2, columns)
        before = bit_sum(x_RN)
        words = torch.int64 if columns % 2 == 0 else torch.int32
        assert before.tolist() == [wrapped(sum(row)) for row in x_RN.view(words).tolist()]
        for bit in range(32):
            x_RN.view(torch.int32)[1, 4] ^= 1 << bit if bit < 31 else -(2**31)
            assert bit_sum(x_RN)[1] != before[1] and bit_sum(x_RN)[0] == before[0]
            x_RN.view(torch.int32)[1, 4] ^= 1 << bit if bit < 31 else -(2**31)
    huge = torch.full((1, 4), 2**62)
    assert bit_sum(huge).tolist() == [wrapped(2**64)]


def wrapped(n: int) -> int:
    return (n + 2**63) % 2**64 - 2**63


DAMAGE = ["none", "bit", "swap", "lost", "sum"]


def collectives(rank: int, world: int, damage: str) -> tuple[bool, int]:
    """Both collectives, one of them damaged on rank 1: whether results are right, and the sum of residuals."""
    x_WN = numbers(world, 8, seed=rank)
    exchange = dist.all_to_all_single

    def damaged(out, given, group=None):
        exchange(out, given, group=group)
        if rank == 1 and damage == "bit":
            out.view(torch.int32)[2, 3] ^= 1
        elif rank == 1 and damage == "swap":
            out.copy_(out.flip(0))
        elif rank == 1 and damage == "lost":
            out[0] = 0

    dist.all_to_all_single = damaged
    received_WN, residual = exchange_rows(x_WN, dist.group.WORLD)
    right = all(torch.equal(received_WN[other], numbers(world, 8, seed=other)[rank]) for other in range(world))
    y_N = torch.tensor([2**62, rank, -5])
    add_up = dist.all_reduce
    if damage == "sum" and rank == 1:
        dist.all_reduce = lambda out, group=None: [add_up(out, group=group), out[1:2].add_(1)]
    residual = residual + sum_integers_(y_N, dist.group.WORLD)
    right = right and y_N.tolist() == [wrapped(world * 2**62), 3, -15]
    add_up(residual)
    return right, residual.item()


@pytest.mark.parametrize("damage", DAMAGE)
def test_residuals_cancel_out_unless_bits_changed(damage):
    results = run_ranks(collectives, 3, damage)
    assert all(right for right, _ in results) == (damage == "none")
    assert all((residual == 0) == (damage == "none") for _, residual in results)


def test_a_further_use_gives_its_gradient_to_the_sink():
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    taken = []
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = as_use(weight, taken.append)
    assert y.data_ptr() == weight.data_ptr()
    ((x @ y.T).square().sum() + (2 * weight).sum()).backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2))
    hidden = (x @ weight.T).detach()
    assert torch.allclose(taken[0], 2 * hidden.T @ x)
    assert torch.allclose(x.grad, 2 * hidden @ weight)
