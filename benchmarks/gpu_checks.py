"""Sections of gpu_parallel.py that need no training: products of experts, and what a GPU must compute like a CPU."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch.nn.functional import linear

from truestep.models.moe import Dispatch, Experts, LocalDispatch
from truestep.numerics.axis import Axis
from truestep.numerics.counter import init_shard
from truestep.numerics.fixed_point import add_rounded, exponent_for, sum_of_squares, to_float
from truestep.numerics.formats import E4M3, E5M2
from truestep.numerics.low_precision.draws import Draws
from truestep.numerics.low_precision.operand import Cast, MXScale, NVScale, Operand, RowScale, TensorScale
from truestep.numerics.low_precision.units import emulate, find_units, multiply
from truestep.parallel.experts import ExpertParallel

CASTS: dict[str, Cast] = {
    "tensor": TensorScale(E4M3),
    "row": RowScale(E4M3),
    "mx": MXScale(E4M3, "ceil"),
    "nv": NVScale(),
}
ROUNDS = 10


@dataclass(frozen=True)
class Row:
    """A line of the table. `good` is None where there is no goal, or nothing was measured."""

    section: str
    what: str
    figures: str
    good: bool | None = None


@dataclass(frozen=True)
class Place:
    """Where a section runs. A dry one is tiny, on the CPU, and its figures say nothing. `seconds`: for all sections;
    `until` this time (of time.perf_counter) a long section begins further rounds."""

    device: torch.device
    dry: bool
    seconds: float
    until: float

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def sync(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def times(self, measured: list[float]) -> str:
        """A ratio as the table shows it."""
        return "no ratio (dry)" if self.dry else f"{median(measured):.2f}x ({min(measured):.2f}-{max(measured):.2f})"


def looped(rows_MD: torch.Tensor, weight_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """What `grouped_product` does, one expert after the other."""
    sizes = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
    weights = weight_EFD.to(rows_MD.dtype).unbind()
    return torch.cat([linear(part, weight) for part, weight in zip(rows_MD.split(sizes), weights)])


def made_experts(num: int, hidden: int, inner: int, device: torch.device) -> Experts:
    experts = Experts(num, hidden, inner, tanh=False).to(device)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            parameter.copy_(init_shard(name, 0, parameter.shape, [slice(None)] * 3, 0.02, device=device))
    return experts


def moe(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    """Qwen3-30B-A3B's experts with skewed loads (some experts idle): forward and backward, grouped and in a loop."""
    num, hidden, inner, num_rows = (8, 64, 32, 96) if place.dry else (128, 2048, 768, 65536)
    device, random = place.device, torch.Generator().manual_seed(0)
    experts = made_experts(num, hidden, inner, device)
    shares = 1.0 / torch.arange(1, num + 1)
    shares[-num // 8 :] = 0
    loads = torch.bincount(torch.multinomial(shares, num_rows, True, generator=random), minlength=num)
    ends = loads[torch.randperm(num, generator=random)].cumsum(0).to(device, torch.int32)
    rows, g = (torch.randn(num_rows, hidden, generator=random).to(device, torch.bfloat16) for _ in range(2))
    rows.requires_grad_()

    def run(product: Any) -> tuple[float, list[torch.Tensor]]:
        experts.product = product
        rows.grad = None
        experts.zero_grad()
        place.sync()
        began = time.perf_counter()
        y = experts(rows, ends)
        y.backward(g)
        place.sync()
        took = time.perf_counter() - began
        assert rows.grad is not None and experts.gate.grad is not None
        return took, [y.detach(), rows.grad, experts.gate.grad]

    ways = {"grouped": None, "loop": looped}
    found = {name: run(product)[1] for name, product in ways.items()}
    apart = max(relative(a, b) for a, b in zip(found["grouped"], found["loop"]))
    del found
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(1 if place.dry else ROUNDS):
        for name in sorted(ways, reverse=bool(index % 2)):
            seconds[name].append(run(ways[name])[0])
    ratios = [loop / grouped for loop, grouped in zip(seconds["loop"], seconds["grouped"])]
    figures |= {"loads": loads.tolist(), "apart": apart, "seconds": seconds}
    figures["ratio"] = None if place.dry else median(ratios)
    text = f"loop / grouped {place.times(ratios)}; results differ by {apart:.1e}"
    yield Row("moe", f"{num} experts of {hidden}x{inner}, {num_rows} rows", text, apart < 0.02)


def units(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    """Units for narrow formats, and the parts of truestep that promise the CPU's bits on a GPU."""
    device = place.device
    found = find_units(device)
    figures["units"] = sorted(found)
    x = heavy_tailed(512, 1024).to(device), heavy_tailed(768, 1024).to(device)
    apart, refused = {}, {}
    for way, cast in CASTS.items():
        a, b = (cast(one, cast.amax(one, ())) for one in x)
        product, want = multiply(a, b, torch.bfloat16, found), emulate(a, b, torch.bfloat16)
        apart[way] = relative(product, want)
        if way == "tensor":  # gradients are e5m2
            low = TensorScale(E5M2)(x[0], x[0].abs().max())
            apart["tensor, e5m2"] = relative(multiply(low, b, torch.bfloat16, found), emulate(low, b, torch.bfloat16))
        if place.on_cuda and way not in found:
            refused[way] = refusal(way, a, b)
    figures |= {"apart": apart, "refused": refused}
    shown = ", ".join(f"{way} {value:.1e}" for way, value in apart.items())
    yield Row("units", f"taken: {', '.join(sorted(found)) or 'none'}", f"against emulation: {shown}", good(apart))
    differing = sorted(name for name, make in BITS.items() if not same(make(device), make(torch.device("cpu"))))
    figures["bits_unlike_cpu"] = differing
    yield Row("units", "bits of a CPU", f"differ: {', '.join(differing) or 'none'} of {', '.join(BITS)}", not differing)
    wrong = [name for name, right in dispatches(device).items() if not right]
    figures["dispatch_wrong"] = wrong
    yield Row("units", "dispatch of experts", f"unlike the local one: {', '.join(wrong) or 'none'}", not wrong)


def refusal(way: str, a: Operand, b: Operand) -> str:
    """Why units are not taken."""
    try:
        product = multiply(a, b, torch.bfloat16, frozenset({way}))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0]
    return f"differ from emulation by {relative(product, emulate(a, b, torch.bfloat16)):.1e}"


def good(apart: dict[str, float]) -> bool:
    return all(value < 0.01 for value in apart.values())


def heavy_tailed(*shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp()


def casts(device: torch.device) -> list[torch.Tensor]:
    x = heavy_tailed(256, 512).to(device)
    made = [cast(x, cast.amax(x, ())) for cast in CASTS.values()]
    return [part for operand in made for part in operand.tensors if part is not None]


def integers(device: torch.device) -> list[torch.Tensor]:
    x = heavy_tailed(1, 300_001).to(device)
    largest = x.abs().max().item()
    total = torch.zeros(x.shape[1], dtype=torch.int64, device=device)
    exponent = exponent_for(largest)
    met = add_rounded(total, x, exponent)
    return [total, met, to_float(total, exponent, torch.float32), sum_of_squares(x[0], largest)]


def draws(device: torch.device) -> list[torch.Tensor]:
    return [Draws(0).sixteen_bits("w", "dX", (3, 1), torch.arange(500, device=device), 8, 100, 200)]


def weights(device: torch.device) -> list[torch.Tensor]:
    return [init_shard("w", 0, (300, 1000), (slice(5, 200), slice(3, 900)), 0.02, device=device)]


BITS: dict[str, Callable[[torch.device], list[torch.Tensor]]] = {
    "low-precision casts": casts,
    "exact sums": integers,
    "random draws": draws,
    "first weights": weights,
}


def dispatches(device: torch.device) -> dict[str, bool]:
    """Whether expert-parallel dispatch over one rank gives the bits of the local one, forward and backward."""
    num_tokens, choices, num, hidden = 192, 2, 8, 64
    random = torch.Generator().manual_seed(2)
    experts = made_experts(num, hidden, 32, device)
    x_ND = torch.randn(num_tokens, hidden, generator=random).to(device, torch.bfloat16)
    g_NKD = torch.randn(num_tokens, choices, hidden, generator=random).to(device, torch.bfloat16)
    free = torch.randint(num - 1, (num_tokens, choices), generator=random).to(device)  # the last expert is idle
    in_turn = torch.arange(num_tokens * choices, device=device).view(num_tokens, choices) % num

    def run(dispatch: Dispatch, chosen_NK: torch.Tensor) -> list[torch.Tensor]:
        mine = x_ND.clone().requires_grad_()
        experts.zero_grad()
        sent = dispatch.send(mine, chosen_NK)
        rows_NKD = dispatch.back(experts(*dispatch.receive(sent)), sent)
        rows_NKD.backward(g_NKD)
        return [rows_NKD.detach(), *(x.grad for x in (mine, *experts.parameters()) if x.grad is not None)]

    local, axis = LocalDispatch(num), Axis("ep")
    return {
        "by choice": same(run(ExpertParallel(axis, num), free), run(local, free)),
        "forced balance": same(run(ExpertParallel(axis, num, forced_balance=True), free), run(local, in_turn)),
    }


def relative(x: torch.Tensor, want: torch.Tensor) -> float:
    return ((x.float() - want.float()).norm() / want.float().norm()).item()


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether all bits agree."""
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(ours, theirs, strict=True))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().reshape(-1).view(torch.uint8)
