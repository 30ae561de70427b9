"""Grids of quantised weights against the compressed-tensors package, and at the edges (C73)."""

import pytest
import torch

from truestep.errors import ModelError
from truestep.numerics.quantised.grid import find_scales, to_codes, to_values
from truestep.numerics.quantised.inputs import InputCast, fixed_scale
from truestep.numerics.quantised.scheme import Scheme, from_config, to_config
from truestep.numerics.quantised.stored import from_stored, pack, to_stored, unpack
from truestep.quant.weights import check_finite, round_weight, scheme_of

SCHEMES = {
    "int8": scheme_of("int8", 0, True, False),
    "int8 asymmetric": scheme_of("int8", 0, False, False),
    "int4": scheme_of("int4", 16, True, False),
    "int4 asymmetric": scheme_of("int4", 16, False, False),
    "int4 by row": scheme_of("int4", -1, False, False),
    "fp8": scheme_of("fp8", 0, True, False),
    "fp8-static": scheme_of("fp8-static", 0, True, False),
    "nvfp4": scheme_of("nvfp4", 0, True, False),
    "nvfp4-static": scheme_of("nvfp4-static", 0, True, False),
}
DTYPES = [torch.float32, torch.bfloat16]


def weight(outputs: int = 24, inputs: int = 48, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) * scale


def values_of(w: torch.Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    scales = find_scales(w, scheme, dtype)
    return to_values(to_codes(w, scales, scheme), scales, scheme)


@pytest.mark.parametrize("name", SCHEMES)
def test_configuration_says_the_scheme(name):
    scheme = SCHEMES[name]
    assert from_config(to_config(scheme, ["lm_head"]), "config.json") == scheme


@pytest.mark.parametrize("change", [{"num_bits": 3}, {"strategy": "block"}, {"group_size": 7, "dynamic": True}])
def test_other_schemes_are_refused(change):
    config = to_config(SCHEMES["int4"], [])
    config["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(ModelError, match="config_groups"):
        from_config(config, "config.json") if change != {"num_bits": 3} else _bits(config)


def _bits(config: dict) -> None:
    config["format"] = "marlin-24"
    from_config(config, "config.json")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_decodes_the_same_bits(name, dtype):
    """Its package decodes NVFP4 to bfloat16, whatever the model's dtype."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme = SCHEMES[name]
    stored, values = round_weight(weight().to(dtype), scheme, dtype)
    theirs = _compressor(compressors, scheme).decompress(dict(stored), _their_scheme(scheme))["weight"]
    if scheme.kind == "nvfp4":
        values, theirs = values.bfloat16(), theirs.bfloat16()
    assert torch.equal(values, theirs.to(values.dtype))
    again = from_stored({**stored, **_rows(stored, slice(3, 7))}, slice(3, 7), (24, 48), scheme)
    assert torch.equal(again.to(values.dtype), values[3:7])


def _rows(stored: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    return {key: stored[key][rows] for key in ("weight", "weight_packed", "weight_scale") if key in stored}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_finds_the_same_codes(name):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme, w = SCHEMES[name], weight()
    scales = find_scales(w, scheme, torch.float32)
    stored = to_stored(to_codes(w, scales, scheme), scales, scheme)
    given = {"weight": w, "weight_scale": scales.scale_OG.float()}
    given |= {} if scales.zero_OG is None else {"weight_zero_point": scales.zero_OG}
    given |= {} if scales.outer is None else {"weight_global_scale": scales.outer}
    theirs = _compressor(compressors, scheme).compress(given, _their_scheme(scheme))
    assert theirs.keys() == stored.keys()
    for key, tensor in theirs.items():
        assert tensor.dtype == stored[key].dtype
        assert torch.equal(tensor.float(), stored[key].float()), key


@pytest.mark.parametrize("name", ["fp8", "fp8-static", "nvfp4-static"])
def test_inputs_are_cast_as_compressed_tensors_casts_them(name):
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    scheme, x = SCHEMES[name], weight(6, 32, 3.0)[None]
    x[0, 2] = 0
    args = _their_scheme(scheme).input_activations
    top = float(x.abs().max())
    scale = None if scheme.inputs == "token" else fixed_scale(scheme.inputs, top, torch.float32)
    if scheme.inputs == "tensor":
        theirs = forward.fake_quantize(x, scale, None, args)
    else:
        found, zero = helpers.compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), global_scale=scale)
        theirs = forward.fake_quantize(x, found, zero, args, global_scale=scale)
    assert torch.equal(InputCast(scheme.inputs, scale).cast(x), theirs)


def _compressor(compressors, scheme: Scheme):
    return compressors.BaseCompressor.get_value_from_registry(scheme.layout)


def _their_scheme(scheme: Scheme):
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme(**to_config(scheme, [])["config_groups"]["group_0"])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [1, 3, 7, 8, 9, 33])
def test_c73_odd_sizes_are_packed_and_come_back(bits, n):
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (5, n)).to(torch.int8)
    words = pack(codes, bits)
    assert words.shape == (5, -(-n * bits // 32))
    assert torch.equal(unpack(words, bits, n), codes)
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(words, helpers.pack_to_int32(codes, bits))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_c73_zeros_are_zeros_and_equal_values_within_half_a_step(name, dtype):
    scheme = SCHEMES[name]
    w = torch.cat([torch.zeros(4, 32), torch.ones(4, 32)])
    w[4:, :16] = 0
    values = values_of(w, scheme, dtype).float()
    assert bool((values[w == 0] == 0).all())
    step = {"int": 1 / 7 if scheme.bits == 4 else 1 / 127, "fp8": 1 / 8, "nvfp4": 1 / 4}[scheme.kind]
    assert float((values - w).abs().max()) <= step / 2


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("name", SCHEMES)
def test_c73_tiny_and_huge_values_stay_finite(name, size):
    w = weight().clamp(-1, 1) * size
    values = values_of(w, SCHEMES[name])
    assert bool(values.isfinite().all())
    if 1e-30 <= size <= 1e30 and SCHEMES[name].kind != "nvfp4":
        assert float((values - w).double().norm() / w.double().norm()) < 0.15


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_c73_what_is_not_finite_is_refused(bad):
    w = weight()
    w[3, 5] = bad
    with pytest.raises(ModelError, match=r"q_proj\.weight has 1 of 1152 elements that are not finite"):
        check_finite("model.layers.0.self_attn.q_proj.weight", w)


@pytest.mark.parametrize("name", ["int8", "int4", "int4 asymmetric"])
def test_scales_are_never_worse_than_those_of_the_extremes(name):
    scheme, w = SCHEMES[name], weight() ** 3
    blocks = w.unflatten(-1, (-1, scheme.group or 48))
    if scheme.symmetric:
        scale = blocks.abs().amax(-1, keepdim=True) / (-scheme.lowest - 0.5)
        plain = (blocks / scale).round().clamp(scheme.lowest, -scheme.lowest - 1) * scale
    else:
        low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
        plain = ((blocks / scale + zero).round().clamp(0, 15) - zero) * scale
    ours = values_of(w, scheme).unflatten(-1, (-1, scheme.group or 48))
    ours, plain = (ours - blocks).square().sum(-1), (plain - blocks).square().sum(-1)
    assert bool((ours <= plain * (1 + 1e-6)).all()) and float(ours.sum()) < float(plain.sum())
