"""GPTQ (arXiv 2210.17323): weights are rounded column by column, and what rounding did to the outputs on calibration
data is made up for by the columns that are still to come."""

from dataclasses import dataclass

import torch

from truestep.errors import ModelError
from truestep.numerics.quantised.grid import Scales, find_scales, to_codes, to_values
from truestep.numerics.quantised.scheme import Scheme

_BLOCK = 128
"""Columns whose updates to later columns are applied together (section 3.3, "lazy batch updates")."""


@dataclass(frozen=True)
class Rounded:
    """int8 codes (O, I), their scales, and the mean squared error of an output on calibration data, by its power."""

    codes: torch.Tensor
    scales: Scales
    error: float


class Seen:
    """What was seen of a map's inputs: how many, the largest magnitude, and where `products` the sum of x xᵀ."""

    def __init__(self, inputs: int, products: bool, device: torch.device):
        self.rows = 0
        self.top = 0.0
        self.products_II = torch.zeros(inputs, inputs, device=device) if products else None

    def add(self, x_NI: torch.Tensor) -> None:
        if not len(x_NI):
            return
        x_NI = x_NI.float()
        self.rows += len(x_NI)
        self.top = max(self.top, float(x_NI.abs().max()))
        if self.products_II is not None:
            self.products_II += x_NI.t() @ x_NI


def gptq(weight_OI: torch.Tensor, seen_II: torch.Tensor, scheme: Scheme, dtype: torch.dtype, damp: float) -> Rounded:
    """Round a finite fp32 weight of which `seen_II` is the sum of x xᵀ over inputs x (the Hessian but for a factor).

    `damp` times the mean of its diagonal is added to the diagonal (section 3.3). With scheme.act_order columns go in
    order of falling diagonal, and the scales of all groups are found before anything is rounded; else those of a group
    are found when its turn comes, from weights that make up for earlier errors. Inputs that were always 0 are rounded
    to nearest. ModelError where the sum is not finite."""
    work_OI, importance_I, upper_II, order_I = _prepare(weight_OI, seen_II, scheme, damp)
    group, inputs = scheme.group or weight_OI.shape[1], weight_OI.shape[1]
    static = scheme.act_order or group == inputs
    scales = find_scales(weight_OI, scheme, dtype, importance_I)
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.int8, device=weight_OI.device)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors_OC = torch.zeros(len(work_OI), stop - start, device=work_OI.device)
        for column in range(start, stop):
            place = int(order_I[column])
            number = place // group
            if not static and place % group == 0:
                # what the columns of this block have to make up for reaches beyond it only at its end
                ahead = work_OI[:, place : place + group].clone()
                pending = errors_OC[:, : column - start] @ upper_II[start:column, stop : place + group]
                ahead[:, max(stop - place, 0) :] -= pending
                found = find_scales(ahead, scheme, dtype, importance_I[place : place + group])
                _put(scales, number, found)
            own = _of_group(scales, number)
            code_O1 = to_codes(work_OI[:, column : column + 1], own, scheme)
            codes_OI[:, place] = code_O1[:, 0]
            error_O = (work_OI[:, column] - to_values(code_O1, own, scheme)[:, 0].float()) / upper_II[column, column]
            work_OI[:, column:stop] -= error_O[:, None] * upper_II[column, column:stop]
            errors_OC[:, column - start] = error_O
        work_OI[:, stop:] -= errors_OC @ upper_II[start:stop, stop:]
    return Rounded(codes_OI, scales, output_error(weight_OI, to_values(codes_OI, scales, scheme).float(), seen_II))


def output_error(weight_OI: torch.Tensor, rounded_OI: torch.Tensor, seen_II: torch.Tensor) -> float:
    """sum of |(W - Q) x|² over the inputs that were seen, by that of |W x|²; 0 where both are 0."""
    off_OI = weight_OI - rounded_OI
    power = float(((weight_OI @ seen_II) * weight_OI).sum())
    return float(((off_OI @ seen_II) * off_OI).sum()) / power if power > 0 else 0.0


def _prepare(
    weight_OI: torch.Tensor, seen_II: torch.Tensor, scheme: Scheme, damp: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight with its columns in the order that they are rounded in, what errors of its columns weigh (in the old
    order), the upper Cholesky factor of the inverse Hessian (equation 3, in the new order), and the order."""
    if not bool(seen_II.isfinite().all()):
        raise ModelError("inputs of the calibration data are not finite; look at the model that is quantised")
    hessian = seen_II.double()
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean()) or 1.0
    importance_I = (diagonal / mean).clamp(min=1e-6).float()
    order_I = torch.argsort(diagonal, descending=True, stable=True) if scheme.act_order else None
    order_I = torch.arange(len(hessian), device=hessian.device) if order_I is None else order_I
    hessian = hessian + damp * mean * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    hessian = hessian[order_I][:, order_I]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper_II = torch.linalg.cholesky(inverse, upper=True).float()
    return weight_OI[:, order_I].clone(), importance_I, upper_II, order_I.cpu()


def _of_group(scales: Scales, number: int) -> Scales:
    one = slice(number, number + 1)
    return Scales(scales.scale_OG[:, one], None if scales.zero_OG is None else scales.zero_OG[:, one])


def _put(scales: Scales, number: int, found: Scales) -> None:
    scales.scale_OG[:, number] = found.scale_OG[:, 0]
    if scales.zero_OG is not None and found.zero_OG is not None:
        scales.zero_OG[:, number] = found.zero_OG[:, 0]
