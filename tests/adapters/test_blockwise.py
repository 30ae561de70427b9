"""Weights in few bits: codes against their definitions, edges, products and gradients, memory, whole stages."""

import math

import pytest
import torch
from torch import nn

from tests.models.sections import VOCAB, small
from tests.parallel import test_lora as lora_ranks
from tests.parallel.compositions import parse
from tests.parallel.harness import PATIENCE_S, errors, worst
from tests.pool import Pool
from truestep.errors import ModelError, UserError
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.layers import Linear
from truestep.numerics.blockwise import BLOCK, NF4, Held, decode, encode, rounded
from truestep.numerics.low_rank import is_adapter
from truestep.recipe.posttrain import Lora
from truestep.train.adapt import adapt

KINDS = ["int8", "int4", "nf4", "fp8"]
STEP = {"int8": 1 / 127, "int4": 1 / 7, "nf4": 1 - 0.6961928009986877, "fp8": 1 / 8}
"""Largest gap between neighbouring values, relative to the block's largest magnitude."""


def test_the_codebook_is_that_of_the_paper():
    """arXiv 2305.14314, equation 4 and appendix E: quantiles of a normal distribution on both sides of an exact 0."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = normal.icdf(torch.linspace(offset, 0.5, 9).double())[:-1]
    below = -normal.icdf(torch.linspace(offset, 0.5, 8).double())[:-1]
    values = torch.cat((above, below, torch.zeros(1))).sort().values
    assert torch.tensor(NF4).double().allclose(values / values.max(), atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_within_half_a_step(kind):
    """C73: a size that no block divides, a block of zeros beside one of ones."""
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    weight.view(-1)[:BLOCK], weight.view(-1)[BLOCK : 2 * BLOCK] = 0.0, 1.0
    found = rounded(weight, kind)
    largest = nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
    allowed = (largest * STEP[kind] / 2 * 1.001).repeat_interleave(BLOCK)[: weight.numel()].view_as(weight)
    assert ((found - weight).abs() <= allowed).all()
    assert not found.view(-1)[:BLOCK].any() and torch.equal(found.view(-1)[BLOCK : 2 * BLOCK], torch.ones(BLOCK))
    assert (rounded(found, kind) - found).abs().max() < 1e-6
    with pytest.raises(ModelError, match="not finite"):
        encode(torch.full((2, 2), math.nan), kind)


def test_nf4_takes_the_nearest_value():
    weight = torch.linspace(-1, 1, 4 * BLOCK).view(4, BLOCK)
    weight[:, 0] = 1.0
    levels = torch.tensor(NF4)
    nearest = levels[(weight[..., None] - levels).abs().argmin(-1)]
    codes, scales = encode(weight, "nf4")
    assert (decode(codes, scales, "nf4", (4, BLOCK), torch.float32) - nearest).abs().max() < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_are_those_of_the_decoded_weight(kind):
    linear = Linear(20, 12)
    nn.init.normal_(linear.bias)
    weight, x = rounded(linear.weight.detach(), kind), torch.randn(3, 5, 20, requires_grad=True)
    linear.bias.requires_grad_(False)
    linear.hold(kind).take(linear_weight := weight)
    y = linear(x)
    want = nn.functional.linear(x, linear_weight, linear.bias)
    assert (y - want).abs().max() < 1e-5
    grads = [torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0] for out in (y, want)]
    assert (grads[0] - grads[1]).abs().max() < 1e-4 * grads[1].abs().max()


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("int4", 4.5), ("int8", 8.5), ("fp8", 8.5)])
def test_memory_is_that_of_the_codes(kind, bits):
    model = build_model(small(hidden_size=64, intermediate_size=128), VOCAB)
    assert isinstance(model, Decoder)
    count = sum(p.numel() for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2)
    fill = adapt(model, Lora(base=kind), lambda part, pieces: init_weights(part, 1, pieces), 3)
    held = [p for n, p in model.named_parameters() if ".held." in n]
    assert sum(p.nbytes for p in held) * 8 == count * bits
    assert not any(p.ndim == 2 for n, p in model.named_parameters() if n.startswith("blocks.") and not is_adapter(n))
    assert callable(fill)


MESHES = {"one": "", "DDP": "dp_replicate=3", "pipeline": "pp=2", "both": "pp=2 dp_replicate=2"}


@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_the_same_on_every_mesh(name):
    one = parse(f"{MESHES[name]} rows=7 size=2 documents=True bias=all optimizer=adamw")
    lora = {"base": "nf4", "targets": ["attention", "mlp", "head"]}
    with Pool() as pool:
        wanted = pool.run(lora_ranks.train, 1, one.on(), lora, "fast", timeout_s=PATIENCE_S)[0]
        found = pool.run(lora_ranks.train, one.world, one, lora, "fast", timeout_s=PATIENCE_S)[0]
        with pytest.raises(Exception, match=r"lora.base is 'nf4', which holds whole weights on every rank"):
            pool.run(lora_ranks.train, 2, one.on(dp_shard=2), lora, "fast", timeout_s=PATIENCE_S)
    assert worst(errors(found.gradients, wanted.gradients))[0] < 1e-9
    assert found.losses == pytest.approx(wanted.losses, rel=1e-9)
    assert any(".held.codes" in key for key in found.weights)


def test_experts_are_refused():
    one = parse("moe=mixtral")
    model = build_model(one.section(), one.vocab)
    with pytest.raises(UserError, match="experts cannot be held in few bits"):
        adapt(model, Lora(base="int8", targets=["attention"]), lambda part, pieces: None, 1)


def test_held_is_what_decodes():
    held = Held("int8", (3, 5))
    held.take(weight := torch.randn(3, 5))
    assert torch.equal(held.weight(torch.float32), rounded(weight, "int8"))
