"""Narrow formats against torch's dtypes and torchao, code by code."""

import math

import pytest
import torch

from truestep.numerics.formats import (
    E2M1,
    E4M3,
    E5M2,
    decode,
    e8m0_scale,
    encode,
    floor_log2,
    pack,
    power_of_two,
    round_stochastic,
    unpack,
)

FP8 = [E4M3, E5M2]
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
NIBBLES = torch.arange(16, dtype=torch.uint8)


def hard_numbers() -> torch.Tensor:
    """Normals over all binades, all values and midways of every format with their fp32 neighbours, edges, specials."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(20000, generator=generator) * 2.0 ** torch.randint(-20, 20, (20000,), generator=generator)
    values = [decode(ALL_BYTES.view(form.dtype), form) for form in FP8] + [decode(pack(NIBBLES), E2M1)]
    exact = torch.cat(values)
    exact = exact[exact.isfinite()].sort().values
    midways = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([exact, midways])
    inf = torch.tensor(math.inf)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 449.0, 464.0, 465.0, 1e5, 3e38, 1e-40, 6.1, -1e9])
    return torch.cat([spread, near, near.nextafter(inf), near.nextafter(-inf), special])


@pytest.mark.parametrize("form", FP8, ids=lambda form: form.name)
def test_all_codes_of_fp8_decode_as_torch_says_and_encode_back(form):
    codes = ALL_BYTES.view(form.dtype)
    values = decode(codes, form)
    assert torch.equal(values.nan_to_num(1e9, 1e10, -1e10), codes.float().nan_to_num(1e9, 1e10, -1e10))
    finite = values.isfinite()
    assert torch.equal(encode(values, form).view(torch.uint8)[finite], ALL_BYTES[finite])
    assert values[finite].max() == form.largest == torch.finfo(form.dtype).max
    assert torch.isnan(encode(torch.tensor([math.nan]), form).float()).all()


@pytest.mark.parametrize("form", FP8, ids=lambda form: form.name)
def test_fp8_rounds_to_nearest_even_and_saturates(form):
    """Against a search over all codes: the nearest value, of two the even code."""
    x = hard_numbers()
    codes = encode(x, form)
    values = decode(ALL_BYTES.view(form.dtype), form).double()
    table = torch.arange(256)[values.isfinite()]
    distance = (x.clamp(-form.largest, form.largest).double()[:, None] - values[table]).abs()
    # a tie: prefer the even code; +0 and -0 by the sign of x
    wrong_sign = (table >= 128) != x.signbit()[:, None]
    best = (distance + torch.where(wrong_sign, 1e30, 0.0)).min(1).values
    ties = (distance == best[:, None]) & ~wrong_sign
    choice = torch.where(ties, table % 2, 9).min(1)
    assert torch.equal(codes.view(torch.uint8).long(), table[choice.indices])


def test_all_sixteen_codes_of_e2m1():
    values = decode(pack(NIBBLES), E2M1)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values[8].signbit() and torch.equal(unpack(encode(values, E2M1)), NIBBLES)


def test_e2m1_is_torchaos_bit_for_bit():
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, f32_to_f4_unpacked, pack_uint4

    x = hard_numbers()
    x = x[: len(x) // 2 * 2]
    want = pack_uint4(f32_to_f4_unpacked(x))
    assert torch.equal(encode(x, E2M1), want)
    assert torch.equal(decode(want, E2M1), f4_unpacked_to_f32(unpack(want)))


def test_packed_pairs_are_viewed_by_torchs_dtype():
    packed = encode(torch.randn(4, 32), E2M1)
    assert packed.shape == (4, 16) and packed.view(torch.float4_e2m1fn_x2).shape == (4, 16)
    assert torch.equal(unpack(packed)[..., 0], packed[..., 0] & 15)  # the first of two is low


@pytest.mark.parametrize("tie, even", [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)])
def test_ties_of_e2m1_go_to_the_even_code(tie, even):
    inf = torch.tensor(math.inf)
    x = torch.tensor([tie, -tie])
    low, high = x[:1].nextafter(-inf), x[:1].nextafter(inf)
    assert decode(encode(x, E2M1), E2M1).tolist() == [even, -even]
    assert decode(encode(torch.cat([low, high]), E2M1), E2M1).diff() > 0


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_mx_scales_are_torchaos(form, rule):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(400, 32, generator=generator) * 2.0 ** torch.randint(-60, 60, (400, 1), generator=generator)
    x[:8] = 0
    mode = ScaleCalculationMode.FLOOR if rule == "floor" else ScaleCalculationMode.RCEIL
    want, _ = to_mx(x, form.dtype, 32, scaling_mode=mode)
    got = e8m0_scale(x.abs().amax(-1, keepdim=True), form, rule)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_all_e8m0_codes_are_powers_of_two():
    values = ALL_BYTES.view(torch.float8_e8m0fnu).double()
    assert values[:255].tolist() == [2.0 ** (code - 127) for code in range(255)] and values[255].isnan()
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert torch.equal(power_of_two(exponents).double(), values[1:255])
    assert torch.equal(floor_log2(power_of_two(exponents) * 1.5), exponents)


def test_ceil_never_clips_and_floor_may():
    amax = torch.linspace(1, 600, 5000)
    assert (amax / e8m0_scale(amax, E4M3, "ceil").float()).max() <= 448
    assert (amax / e8m0_scale(amax, E4M3, "ceil").float()).min() > 224
    floor = amax / e8m0_scale(amax, E4M3, "floor").float()
    assert floor.min() >= 256 and 448 < floor.max() < 512
    exact = torch.tensor([448.0, 448.0 * 2**-9])  # a ratio that is a power of two is not rounded up
    assert (exact / e8m0_scale(exact, E4M3, "ceil").float()).tolist() == [448, 448]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_a_block_that_is_not_finite_shows(bad, rule):
    assert e8m0_scale(torch.tensor([bad]), E4M3, rule).float().isnan().all()


@pytest.mark.parametrize("form", [E2M1, E4M3, E5M2], ids=lambda form: form.name)
def test_stochastic_rounding_takes_neighbours_with_the_right_shares(form):
    values = torch.cat([decode(pack(NIBBLES), E2M1) if form is E2M1 else decode(ALL_BYTES.view(form.dtype), form)])
    values = values[values.isfinite()].unique()
    x = hard_numbers()
    x = x[x.isfinite()]
    draws = torch.arange(65536, dtype=torch.int32)
    low, high = (round_stochastic(x, form, torch.full_like(x, d, dtype=torch.int32)) for d in (65535, 0))
    clamped = x.clamp(-form.largest, form.largest)
    assert torch.isin(low, values).all() and torch.isin(high, values).all()
    assert (low.abs() <= clamped.abs() * (1 + 2.0**-16)).all()
    assert (decode(encode(high[: len(x) // 2 * 2], form), form) == high[: len(x) // 2 * 2]).all()
    assert torch.equal(low[torch.isin(clamped, values)], clamped[torch.isin(clamped, values)])
    for number in (0.3, 1.1, -2.9, 0.0007, 5.99, 2.0**-10 + 2.0**-12):
        drawn = round_stochastic(torch.full((65536,), number), form, draws)
        neighbours = drawn.unique()
        assert len(neighbours) <= 2
        spacing = (neighbours.max() - neighbours.min()).item()
        assert abs(drawn.double().mean().item() - torch.tensor(number).item()) <= spacing * 2.0**-16


def test_stochastic_rounding_keeps_nan():
    assert round_stochastic(torch.tensor([math.nan]), E4M3, torch.tensor([3])).isnan().all()
