"""Ranks that hold parts of the operands make the numbers that one process makes of the whole."""

import math

import pytest
import torch

from tests.dist import run_ranks
from truestep.numerics.axis import Axis
from truestep.numerics.low_precision.place import Place, split_tokens
from truestep.numerics.low_precision.product import LowPrecisionModel
from truestep.recipe.numerics import LowPrecision

ROWS, T, INPUTS, OUTPUTS = 2, 256, 128, 128
NAME = "blocks.3.mlp.down.weight"
WAYS = ["outputs", "inputs", "tokens", "balanced tokens", "shares"]
SECTIONS = [
    {"kind": "fp8-tensorwise"},
    {"kind": "fp8-tensorwise", "stochastic_rounding": True},
    {"kind": "fp8-rowwise"},
    {"kind": "fp8-rowwise", "weight_gradient": "low"},
    {"kind": "mxfp8"},
    {"kind": "nvfp4"},
    {"kind": "nvfp4", "weight_gradient": "high", "stochastic_rounding": False},
]


def operands(spread: float = 2.0):
    """Rows, columns and tokens of very unlike sizes: a scale that is not global would show."""
    generator = torch.Generator().manual_seed(5)

    def one(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        for dim, n in enumerate(shape):
            x = x * torch.exp(spread * torch.linspace(-1, 1, n, dtype=torch.float64)).unflatten(
                0, [n] + [1] * (len(shape) - dim - 1)
            )
        return x

    return one(ROWS, T, INPUTS), one(OUTPUTS, INPUTS), one(ROWS, T, OUTPUTS)


def multiplied(section: dict, place: Place, x, w, g):
    low = LowPrecisionModel(LowPrecision(**section), 11, torch.device("cpu"))
    low.draws.begin(4, 2)
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = low.product(place, tuple(w.shape), T)(x, w)
    y.backward(g)
    return y.detach(), x.grad, w.grad


def parts(way: str, axis: Axis) -> tuple[dict, tuple, tuple]:
    """How Place is made, and what of (x, W, g) the rank holds, and of (y, dX, dW)."""
    whole = slice(None)
    outputs, inputs = (slice(n // axis.size * axis.rank, n // axis.size * (axis.rank + 1)) for n in (OUTPUTS, INPUTS))
    if way == "outputs":
        held = (..., whole), (outputs, whole), (..., outputs)
        return {"outputs": axis, "start": (outputs.start, 0)}, held, ((..., outputs), None, (outputs, whole))
    if way == "inputs":
        held = (..., inputs), (whole, inputs), (..., whole)
        return {"inputs": axis, "start": (0, inputs.start)}, held, (None, (..., inputs), (whole, inputs))
    if way == "shares":
        return {"shares": axis}, ((whole,), (whole,), (..., outputs)), ((whole,), None, None)
    tokens = split_tokens(cp=axis, balanced=way == "balanced tokens")
    places = torch.cat([torch.arange(first, first + n) for first, n in tokens.runs(T)])
    some = (whole, places)
    return {"tokens": tokens}, (some, (whole, whole), some), (some, some, None)


def on_ranks(rank: int, world: int):
    """The largest difference of each result from the same part of the whole's, relative to its largest; summands are
    added up over the ranks first."""
    import torch.distributed as dist

    axis, out = Axis("a", world, rank, dist.group.WORLD), {}
    given = operands()
    for number, section in enumerate(SECTIONS):
        wanted = multiplied(section, Place(NAME, (OUTPUTS, INPUTS)), *given)
        for way in WAYS:
            how, held, regions = parts(way, axis)
            x, w, g = (a[r] for a, r in zip(given, held))
            if way == "shares":
                g = torch.zeros_like(given[2]).index_copy_(-1, torch.arange(OUTPUTS)[held[2][-1]], g)
            found = multiplied(section, Place(NAME, (OUTPUTS, INPUTS), **how), x, w, g)
            worst = 0.0
            for want, got, region in zip(wanted, found, regions, strict=True):
                got = axis.sum_(got.contiguous()) if region is None else got
                want = want if region is None else want[region]
                worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
            out[number, way] = worst
    return out


@pytest.fixture(scope="module")
def differences():
    return run_ranks(on_ranks, 2), run_ranks(on_ranks, 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", range(len(SECTIONS)), ids=lambda n: " ".join(map(str, SECTIONS[n].values())))
def test_parts_equal_the_whole_up_to_the_order_of_float64_sums(differences, way, number):
    for per_rank in differences:
        for found in per_rank:
            assert found[number, way] <= 1e-12


def local_scales(rank: int, world: int) -> float:
    """A rank that took the largest value of its own part as the tensor's: its difference from the whole's."""
    import torch.distributed as dist

    axis = Axis("a", world, rank, dist.group.WORLD)
    x, w, g = operands()
    how, held, _ = parts("outputs", axis)
    how["outputs"] = None
    want = multiplied(SECTIONS[0], Place(NAME, (OUTPUTS, INPUTS)), x, w, g)
    found = multiplied(SECTIONS[0], Place(NAME, (OUTPUTS, INPUTS), **how), *(a[r] for a, r in zip((x, w, g), held)))
    dx = axis.sum_(found[1].contiguous())
    return ((dx - want[1]).abs().max() / want[1].abs().max()).item()


def test_a_scale_of_ones_own_part_would_be_seen():
    assert max(run_ranks(local_scales, 2)) > 1e-4


def test_overlapping_outputs_count_once():
    """Key and value heads that several ranks hold: the scale is that of the union."""
    x, w, _ = operands()
    low = LowPrecisionModel(LowPrecision(kind="nvfp4"), 0, torch.device("cpu"))

    class Union(Axis):
        def max_(self, amax: torch.Tensor) -> torch.Tensor:
            return torch.maximum(amax, w.float().abs().max())

    place = Place(NAME, (OUTPUTS, INPUTS), start=(32, 0), outputs=Union("tp", 2, 0, object()))
    part = low.product(place, (64, INPUTS))(x, w[32:96])
    whole = low.product(Place(NAME, (OUTPUTS, INPUTS)), (OUTPUTS, INPUTS))(x, w)
    assert torch.allclose(part, whole[..., 32:96], rtol=1e-12)
    assert math.isfinite(part.sum().item())


class Map(torch.nn.Module):
    """A linear map of the model with its seam."""

    def __init__(self, weight: torch.Tensor, product):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight)


def sharded(rank: int, world: int):
    """Weights that FSDP2 frees after forward and gathers again: dW summed over two microbatches, one a rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x, w, g = (a.float() for a in operands())
    low = LowPrecisionModel(LowPrecision(kind="nvfp4"), 11, torch.device("cpu"))
    product = low.product(Place(NAME, (OUTPUTS, INPUTS)), (OUTPUTS, INPUTS), T)

    def backward(module: torch.nn.Module, microbatch: int):
        low.draws.begin(0, microbatch)
        module(x[microbatch : microbatch + 1]).backward(g[microbatch : microbatch + 1])

    plain, parted = Map(w, product), Map(w, product)
    for microbatch in range(world):
        backward(plain, microbatch)
    fully_shard(parted, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=True)
    parted.set_gradient_divide_factor(1.0)
    parted.set_force_sum_reduction_for_comms(True)
    backward(parted, rank)
    found = parted.weight.grad.full_tensor()
    return ((found - plain.weight.grad).abs().max() / found.abs().max()).item()


def test_sharded_weights_and_any_data_parallel_degree_make_the_same_gradient():
    assert max(run_ranks(sharded, 2)) <= 1e-6
