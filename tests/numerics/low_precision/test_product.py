"""The three products: the right numbers, the units' path, what is kept in memory, recomputation, draws."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from truestep.errors import UserError
from truestep.numerics.axis import Axis
from truestep.numerics.low_precision.draws import Draws
from truestep.numerics.low_precision.place import Place, split_tokens
from truestep.numerics.low_precision.product import LowPrecisionModel
from truestep.numerics.low_precision.rules import is_low
from truestep.numerics.low_precision.units import emulate, multiply, swizzle
from truestep.numerics.roles import Role
from truestep.recipe.numerics import LowPrecision

CPU = torch.device("cpu")
KINDS = ["fp8-tensorwise", "fp8-rowwise", "mxfp8", "nvfp4"]
every_kind = pytest.mark.parametrize("kind", KINDS)
BLOCK = {"mxfp8": 32, "nvfp4": 16}


def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def model(kind: str, units=frozenset(), **fields) -> LowPrecisionModel:
    return LowPrecisionModel(LowPrecision(kind=kind, **fields), seed=7, device=CPU, units=units)


def run(low: LowPrecisionModel, x, w, g, name="blocks.0.mlp.up.weight"):
    """(y, dX, dW) of one product."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = low.product(Place(name, tuple(w.shape)), tuple(w.shape), x.shape[-2])(x, w)
    y.backward(g)
    return y.detach(), x.grad, w.grad


def data(dtype=torch.float32):
    x, w, g = (
        normal(2, 64, 96, dtype=dtype),
        normal(128, 96, seed=1, dtype=dtype),
        normal(2, 64, 128, seed=2, dtype=dtype),
    )
    return x, w, g


def plain(x, w, g):
    flat = g.flatten(0, 1)
    return x @ w.t(), g @ w, flat.t() @ x.flatten(0, 1)


ERRORS = {"fp8-tensorwise": (0.03, 0.08), "fp8-rowwise": (0.015, 0.045), "mxfp8": (0.03, 0.045), "nvfp4": (0.1, 0.25)}


@every_kind
def test_products_are_near_the_plain_ones(kind):
    args = data()
    low, high = ERRORS[kind]
    for got, want in zip(run(model(kind), *args), plain(*args), strict=True):
        assert low < (got - want).norm() / want.norm() < high


@every_kind
def test_products_are_of_the_very_operands_that_the_rule_says(kind):
    """Written out by hand from the casts, in float64."""
    x, w, g = data(torch.float64)
    low = model(kind, stochastic_rounding=False)
    y, dx, dw = run(low, x, w, g)
    rule, wide = low.rule, torch.float64

    def cast(how, matrix):
        matrix = matrix.float().contiguous()
        return how(matrix, how.amax(matrix, ())).values(wide)

    def turned(matrix):
        from truestep.numerics.low_precision.hadamard import rotate

        return rotate(matrix.float(), low.signs) if rule.hadamard else matrix

    x, g = x.flatten(0, 1), g.flatten(0, 1)
    assert torch.allclose(y.flatten(0, 1), cast(rule.x, x) @ cast(rule.w, w).t(), rtol=1e-6, atol=1e-6)
    assert torch.allclose(dx.flatten(0, 1), cast(rule.g, g) @ cast(rule.w, w.t()).t(), rtol=1e-6, atol=1e-6)
    if kind == "fp8-rowwise":  # high: the plain gradient, and x as the forward pass saw it
        want = g.t() @ cast(rule.x, x)
    elif kind == "fp8-tensorwise":
        want = cast(rule.g, g).t() @ cast(rule.x, x)
    else:
        want = cast(rule.g, turned(g.t())) @ cast(rule.x, turned(x.t())).t()
    assert torch.allclose(dw, want, rtol=1e-6, atol=1e-5)


def test_fp8_tensorwise_is_torchaos_training_linear():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    x, w, g = data()
    oracle = torch.nn.Sequential(torch.nn.Linear(96, 128, bias=False))
    with torch.no_grad():
        oracle[0].weight.copy_(w)
    convert_to_float8_training(oracle, config=Float8LinearConfig(emulate=True))
    ours = run(model("fp8-tensorwise"), x, w, g)
    x.requires_grad_()
    y = oracle(x)
    y.backward(g)
    for got, want in zip(ours, (y, x.grad, oracle[0].weight.grad), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind, dtype", [("fp8-tensorwise", torch.float32), ("fp8-rowwise", torch.bfloat16)])
def test_units_of_this_build_give_the_emulated_numbers(kind, dtype):
    """torch has scaled_mm for these on CPUs; on GPUs the same call is used where the device has the units."""
    args = data(dtype)
    fields = {"weight_gradient": "low"}
    units = model(kind, units=frozenset({"tensor", "row"}), **fields)
    for got, want in zip(run(units, *args), run(model(kind, **fields), *args), strict=True):
        assert torch.allclose(got.float(), want.float(), rtol=2**-7, atol=1e-4)


def test_units_are_called_where_they_are_known(monkeypatch):
    called = []
    from truestep.numerics.low_precision import units

    real = units.scaled_mm
    monkeypatch.setattr(units, "scaled_mm", lambda *a, **k: called.append(1) or real(*a, **k))
    run(model("fp8-tensorwise", units=frozenset({"tensor"})), *data())
    assert len(called) == 3
    run(model("fp8-tensorwise"), *data())
    run(model("mxfp8", units=frozenset({"tensor"})), *data())
    odd = normal(1, 6, 10), normal(12, 10), normal(1, 6, 12)  # sizes that the units do not take
    run(model("fp8-tensorwise", units=frozenset({"tensor"})), *odd)
    assert len(called) == 3


def test_units_are_not_used_in_float64():
    low = model("fp8-tensorwise")
    cast = low.rule.x
    a = cast(normal(32, 32), cast.amax(normal(32, 32), ()))
    assert torch.equal(multiply(a, a, torch.float64, frozenset({"tensor"})), emulate(a, a, torch.float64))


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (96, 6), (200, 3)])
def test_swizzled_scales_are_torchaos(shape):
    from torchao.prototype.mx_formats.utils import to_blocked

    scales = torch.arange(shape[0] * shape[1]).remainder(251).to(torch.uint8).view(shape)
    assert torch.equal(swizzle(scales), to_blocked(scales).flatten())


def kept_bytes(build, weights) -> int:
    """Bytes of storages that the graph of build() keeps, weights left out."""
    kept: dict[int, int] = {}
    known = {w.untyped_storage().data_ptr() for w in weights}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        alive = build()
    del alive
    return sum(kept.values())


@pytest.mark.parametrize("kind, bits", [("fp8-tensorwise", 8), ("fp8-rowwise", 8), ("mxfp8", 8.25), ("nvfp4", 4.5)])
def test_activations_are_kept_in_the_low_format_once(kind, bits):
    """x of bfloat16 is kept in 8 or 4 bits and its scales; q, k and v keep one copy between them."""
    x = normal(2, 64, 512, dtype=torch.bfloat16).requires_grad_()
    weights = [normal(n, 512, dtype=torch.bfloat16).requires_grad_() for n in (256, 128, 128)]
    low = model(kind)
    products = [low.product(Place(f"w{n}", tuple(w.shape)), tuple(w.shape), 64) for n, w in enumerate(weights)]
    hidden = x * 1.0
    plain_bytes = kept_bytes(lambda: [torch.nn.functional.linear(hidden, w) for w in weights], weights)
    low_bytes = kept_bytes(lambda: [product(hidden, w) for product, w in zip(products, weights)], weights)
    assert plain_bytes == x.numel() * 2
    slack = 4 * 128 + 64 if kind == "fp8-rowwise" else 64  # a scale a row; scales of tensors
    assert x.numel() * bits / 8 <= low_bytes <= x.numel() * bits / 8 + slack


def test_the_last_activation_is_cast_again_once_it_changed_or_is_gone():
    low = model("fp8-tensorwise")
    w = normal(32, 32)
    product = low.product(Place("w", (32, 32)), (32, 32), 4)
    x = normal(1, 4, 32)
    first = product(x, w)
    assert torch.equal(product(x, w), first) and low._last
    x.mul_(2)
    assert torch.allclose(product(x, w), 2 * first, rtol=1e-6)
    del x
    assert not low._last
    assert torch.equal(product(normal(1, 4, 32), w), first)


def test_an_activation_is_cast_once_for_all_that_take_it(monkeypatch):
    low, calls = model("mxfp8"), []
    real = low._activation
    monkeypatch.setattr(low, "_activation", lambda *a: calls.append(1) or real(*a))
    x, w = normal(1, 32, 32).requires_grad_(), normal(32, 32).requires_grad_()
    for name in "qkv":
        low.product(Place(name, (32, 32)), (32, 32), 32)(x, w)
    assert len(calls) == 1


@every_kind
def test_recomputation_draws_the_same(kind):
    """Under activation checkpointing the forward pass runs again inside backward: same numbers, to the bit."""
    x, w, g = data()
    low = model(kind, stochastic_rounding=True)
    low.draws.begin(3, 1)
    product = low.product(Place("w", (128, 96)), (128, 96), 64)
    results = []
    for wrap in (False, True):
        a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = (
            checkpoint(lambda p, q: product(p * 1.5, q).sin(), a, b, use_reentrant=False)
            if wrap
            else product(a * 1.5, b).sin()
        )
        y.backward(g)
        results.append((y.detach(), a.grad, b.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_draws_go_by_seed_step_microbatch_name_and_use_alone():
    args = data()

    def gradients(step=0, microbatch=0, name="a", seed=7):
        low = LowPrecisionModel(LowPrecision(kind="nvfp4", hadamard=False), seed, CPU, frozenset())
        low.draws.begin(step, microbatch)
        return run(low, *args, name=name)[1:]

    base = gradients()
    assert all(torch.equal(a, b) for a, b in zip(base, gradients()))
    for other in (gradients(step=1), gradients(microbatch=1), gradients(name="b"), gradients(seed=8)):
        assert not any(torch.equal(a, b) for a, b in zip(base, other))


def test_the_moment_of_the_forward_pass_holds_in_backward():
    """In a pipeline another microbatch goes forward before this one goes back."""
    x, w, g = data()
    low = model("nvfp4")
    low.draws.begin(0, 0)
    want = run(low, x, w, g)[2]
    low.draws.begin(0, 0)
    w.requires_grad_()
    y = low.product(Place("blocks.0.mlp.up.weight", (128, 96)), (128, 96), 64)(x, w)
    low.draws.begin(0, 1)
    y.backward(g)
    assert torch.equal(w.grad, want)


def test_stochastic_gradients_are_unbiased():
    """Their mean over steps nears the product with the gradient as it is."""
    x, w, g = data()
    drawn, low = [], model("nvfp4")
    for step in range(64):
        low.draws.begin(step, 0)
        drawn.append(run(low, x, w, g)[1])
    nearest = run(model("nvfp4", stochastic_rounding=False), x, w, g)[1]
    w_low = low.rule.w(w.t().contiguous(), w.abs().max()).values(torch.float32)
    exact = g @ w_low.t()
    off = torch.stack(drawn).mean(0) - exact
    assert (
        off.norm() < (drawn[0] - exact).norm() / 4
    )  # 1/8 from chance, and a little where the largest of a block is clipped
    assert off.norm() < (nearest - exact).norm() / 2


@every_kind
def test_bfloat16_under_autocast_equals_bfloat16_parameters(kind):
    """One process computes under autocast from fp32 masters, FSDP2 from parameters that it has cast."""
    x, w, g = data()
    low = model(kind)
    product = low.product(Place("w", (128, 96)), (128, 96), 64)
    wide = w.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = product(x.bfloat16(), wide)
    y.backward(g.bfloat16())
    narrow = w.detach().bfloat16().requires_grad_()
    z = product(x.bfloat16(), narrow)
    z.backward(g.bfloat16())
    assert y.dtype is torch.bfloat16 and torch.equal(y, z)
    assert wide.grad.dtype is torch.float32 and torch.equal(wide.grad, narrow.grad.float())


def test_forward_alone_needs_no_blocks_of_tokens():
    """Generation: one token at a time, without gradients."""
    low = model("mxfp8")
    product = low.product(Place("w", (64, 32)), (64, 32))
    with torch.no_grad():
        assert product(normal(1, 1, 32), normal(64, 32)).shape == (1, 1, 64)


def test_a_gradient_that_is_not_finite_is_seen():
    x, w, g = data()
    g[0, 3, 5] = float("inf")
    for kind in KINDS:
        _, dx, dw = run(model(kind), x, w, g)
        assert not dx.isfinite().all() and not dw.isfinite().all(), kind


@pytest.mark.parametrize(
    "kind, shape, start, local, context, words",
    [
        ("mxfp8", (64, 40), (0, 0), (64, 40), 64, "40 inputs; the nearest number that fits is 32,"),
        ("mxfp8", (176, 64), (88, 0), (88, 64), 64, "88 of 176 outputs on a rank, from 88; the nearest number"),
        ("nvfp4", (64, 64), (0, 0), (64, 64), 40, "40 of a row's 40; the nearest context that fits is 32,"),
    ],
)  # fmt: skip
def test_blocks_that_do_not_fit_are_refused(kind, shape, start, local, context, words):
    with pytest.raises(UserError) as caught:
        model(kind).product(Place("blocks.0.mlp.up.weight", shape, start=start), local, context)
    assert words in str(caught.value) and str(caught.value).count(". ") == 0


def test_rows_cut_inside_a_block_of_tokens_are_refused():
    low, cp = model("mxfp8"), Axis("cp", 2, 1, group=object())
    place = Place("w", (64, 64), tokens=split_tokens(cp, balanced=True))
    low.product(place, (64, 64), 128)
    with pytest.raises(UserError, match=r"holds 16 of a row's 64; the nearest context that fits is 1?28?"):
        low.product(place, (64, 64), 64)
    model("fp8-rowwise").product(place, (64, 64), 64)
    model("mxfp8", weight_gradient="high").product(place, (64, 64), 64)


def test_which_parameters_are_low():
    section = LowPrecision(kind="mxfp8", high_first=1, high_last=2)
    low = [layer for layer in range(8) if is_low(section, Role.MATRIX, layer, 8)]
    assert low == [1, 2, 3, 4, 5]
    assert not any(is_low(section, role, 3, 8) for role in Role if role is not Role.MATRIX)
    assert not is_low(section, Role.MATRIX, None, 8)


def test_draws_of_a_part_are_those_of_the_whole():
    tokens = torch.tensor([3, 4, 17, 40])
    whole = Draws(1).sixteen_bits("w", "dX", (2, 0), torch.arange(41), 0, 20, 20)
    part = Draws(1).sixteen_bits("w", "dX", (2, 0), tokens, 5, 6, 20)
    assert torch.equal(part, whole[tokens, 5:11])
    assert whole.min() >= 0 and whole.max() < 65536
    assert len(whole.unique()) > 800  # of 820 draws from 65536, about 5 repeat
    long = Draws(1).sixteen_bits("w", "dX", (2, 0), torch.arange(30000), 0, 20, 20)  # more than one piece of work
    assert torch.equal(long[:41], whole) and len(long) == 30000


def test_split_tokens_cover_every_row_once():
    for balanced in (False, True):
        held = []
        for cp in range(2):
            for tp in range(3):
                one = split_tokens(Axis("cp", 2, cp, object()), Axis("tp", 3, tp, object()), balanced=balanced)
                held.append(one.numbers(2, 4, CPU))
        assert torch.equal(torch.cat(held).sort().values, torch.arange(48))
        first = held[0].tolist()
        assert first == [0, 1, 2, 3, 24, 25, 26, 27]
    assert held[1].tolist()[:4] == [4, 5, 18, 19]  # the middle of head [0, 6) and tail [18, 24)


@pytest.mark.parametrize("way", ["both", "x then w"])
def test_gradients_may_be_asked_for_one_after_the_other(way, monkeypatch):
    """As a zero-bubble pipeline does; each product of the backward pass is computed once."""
    from truestep.numerics.low_precision import product as module

    calls, real = [], module.multiply
    monkeypatch.setattr(module, "multiply", lambda *a: calls.append(1) or real(*a))
    x, w, g = data()
    want = run(model("nvfp4"), x, w, g)
    assert len(calls) == 3
    low = model("nvfp4")
    x.requires_grad_()
    w.requires_grad_()
    y = low.product(Place("blocks.0.mlp.up.weight", (128, 96)), (128, 96), 64)(x * 1, w)
    if way == "both":
        dx, dw = torch.autograd.grad(y, [x, w], g)
    else:
        (dx,) = torch.autograd.grad(y, [x], g, retain_graph=True)
        (dw,) = torch.autograd.grad(y, [w], g)
    assert len(calls) == 6 and torch.equal(dx, want[1]) and torch.equal(dw, want[2])


@pytest.mark.parametrize("kind, whole", [("fp8-tensorwise", True), ("mxfp8", True), ("nvfp4", False)])
def test_compiled_products_are_the_same_and_draw_anew_every_step(kind, whole):
    x, w, g = data()
    low = model(kind)
    product = low.product(Place("w", (128, 96)), (128, 96), 64)

    def run_once(f, step):
        low.draws.begin(step, 0)
        a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
        f(a, b).backward(g)
        return a.grad, b.grad

    def f(a, b):
        return product(a * 2, b).sin()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=whole)
    for step in range(3):
        assert all(torch.equal(p, q) for p, q in zip(run_once(f, step), run_once(compiled, step)))
    assert torch.equal(run_once(compiled, 0)[0], run_once(compiled, 1)[0]) == whole


def test_units_are_trusted_once_they_agree(monkeypatch):
    """The CPU build has the kernels of two ways; a kernel that is wrong or missing is not used."""
    from truestep.numerics.low_precision import units

    assert [units._agrees(way, CPU) for way in ("tensor", "row", "mx", "nv")] == [True, True, False, False]
    assert units.find_units(CPU) == frozenset()  # nothing is gained there
    real = units.scaled_mm
    monkeypatch.setattr(units, "scaled_mm", lambda *a, **k: real(*a, **k) * 1.02)
    assert not units._agrees("tensor", CPU)
