"""Experts: many gated MLPs, of which each token goes to a few. No token is dropped, whatever the load.

N tokens, K choices of a token, M = N K rows, E experts, D hidden_size, F expert_size.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import gelu, linear, silu

from truestep.models.layers import GatedMLP, Parted
from truestep.models.router import Router
from truestep.numerics.axis import Axes
from truestep.numerics.grouping import Grouping, combine, group, permute, spread
from truestep.numerics.low_rank import Adapted
from truestep.numerics.pieces import Split
from truestep.recipe.model import ModelSection

GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Dispatch(Protocol):
    """Brings tokens to the experts and their outputs back. Between `send` and `receive` there may be other work."""

    def send(self, x_ND: torch.Tensor, experts_NK: torch.Tensor) -> Any:
        """Start; what it returns is for the other two."""
        ...

    def receive(self, sent: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows_MD, ends_E): the rows for each expert of this rank, one after the other, and where each one's end."""
        ...

    def back(self, rows_MD: torch.Tensor, sent: Any) -> torch.Tensor:
        """The experts' outputs as rows_NKD, where the tokens came from."""
        ...


class LocalDispatch:
    """All experts are here: tokens are sorted by expert."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def send(self, x_ND: torch.Tensor, experts_NK: torch.Tensor) -> tuple[torch.Tensor, Grouping, int]:
        by_expert = group(experts_NK.flatten(), self.num_experts)
        return spread(x_ND, by_expert.order, by_expert.inverse), by_expert, experts_NK.shape[1]

    def receive(self, sent: tuple[torch.Tensor, Grouping, int]) -> tuple[torch.Tensor, torch.Tensor]:
        return sent[0], sent[1].ends

    def back(self, rows_MD: torch.Tensor, sent: tuple[torch.Tensor, Grouping, int]) -> torch.Tensor:
        _, by_expert, choices = sent
        return permute(rows_MD, by_expert.inverse, by_expert.order).unflatten(0, (-1, choices))


class Experts(nn.Module):
    """The routed experts of this rank, stacked. `product` is the seam of low precision, as that of Linear: (rows_MD,
    weight_EFD, ends_E) -> each row times the transposed weight of its expert. `lora`: adapters of the three, by name.
    """

    product: GroupedProduct | None = None

    def __init__(self, num_experts: int, hidden_size: int, expert_size: int, tanh: bool):
        super().__init__()
        self.sizes = num_experts, expert_size, hidden_size
        self.gate = nn.Parameter(torch.empty(num_experts, expert_size, hidden_size))
        self.up = nn.Parameter(torch.empty(num_experts, expert_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, expert_size))
        self.lora = nn.ModuleDict()
        self.tanh = tanh

    def forward(self, rows_MD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        gate = self._product(rows_MD, "gate", ends_E)
        active = gelu(gate, approximate="tanh") if self.tanh else silu(gate)
        return self._product(active * self._product(rows_MD, "up", ends_E), "down", ends_E)

    def _product(self, rows: torch.Tensor, name: str, ends_E: torch.Tensor) -> torch.Tensor:
        y = (self.product or grouped_product)(rows, self.get_parameter(name), ends_E)
        if name not in self.lora:
            return y
        adapted = self.lora[name]
        assert isinstance(adapted, Adapted)
        return y + adapted.grouped(rows, ends_E, grouped_product)


class MoE(Parted):
    """sum_k weight_k expert_k(x) + shared(x) (arXiv 2401.06066, equation 3). Experts are split over the expert axis;
    the tensor axis is one more data axis to them, since each rank routes its own part of the sequence."""

    def __init__(self, section: ModelSection):
        super().__init__()
        moe = section.moe
        assert moe is not None
        self.router = Router(moe, section.hidden_size, moe.balance == "bias" or section.family == "deepseek_v3")
        self.experts = Experts(moe.num_experts, section.hidden_size, moe.expert_size, section.activation == "gelu_tanh")
        self.shared = GatedMLP(section, moe.shared_size) if moe.shared_size else None
        self.dispatch: Dispatch = LocalDispatch(moe.num_experts)

    def place(self, axes: Axes) -> None:
        """Whoever splits the experts over axes.ep also gives this module its `dispatch`."""

    def splits(self) -> dict[str, Split]:
        return {f"experts.{name}": Split("ep", 0) for name in ("gate", "up", "down")}

    @torch.compiler.disable  # a graph would fix what depends on data: sizes, and whether this pass is counted
    def forward(self, x_BTD: torch.Tensor, real_BT: torch.Tensor | None = None) -> torch.Tensor:
        """`real_BT` is false for padding; None: there is none. Shared experts work while the tokens travel."""
        x_ND = x_BTD.flatten(0, 1)
        experts_NK, weights_NK = self.router(x_ND, None if real_BT is None else real_BT.flatten())
        sent = self.dispatch.send(x_ND, experts_NK)
        shared_BTD = None if self.shared is None else self.shared(x_BTD)
        rows_MD, ends_E = self.dispatch.receive(sent)
        rows_NKD = self.dispatch.back(self.experts(rows_MD, ends_E), sent)
        y_BTD = combine(rows_NKD, weights_NK).view_as(x_BTD)
        return y_BTD if shared_BTD is None else y_BTD + shared_BTD


def grouped_product(rows_MD: torch.Tensor, weight_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """rows_MF: rows [ends[e - 1], ends[e]) times the transposed weight[e]; ends[-1] is M."""
    weight_EFD = weight_EFD.to(rows_MD.dtype)  # under autocast, which does not know the kernel
    if _has_kernel(rows_MD, weight_EFD):
        return _grouped_mm(rows_MD, weight_EFD.transpose(1, 2), offs=ends_E)
    if isinstance(rows_MD, FakeTensor):
        return linear(rows_MD, weight_EFD[0])  # as large and as costly, without a look at data
    sizes = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
    parts = zip(rows_MD.split(sizes), weight_EFD.unbind())
    return torch.cat([linear(part, weight) for part, weight in parts])


# public since torch 2.10
_grouped_mm: Any = torch.nn.functional.grouped_mm if hasattr(torch.nn.functional, "grouped_mm") else torch._grouped_mm


def _has_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Rows of whole 16 bytes, in and out; on CUDA bf16, from compute capability 8.0; on fake tensors bf16."""
    if any(size * rows.itemsize % 16 for size in (rows.shape[1], weight.shape[1])):
        return False
    if isinstance(rows, FakeTensor):
        return rows.dtype == torch.bfloat16
    if rows.is_cuda:
        return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
