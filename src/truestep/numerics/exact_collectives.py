"""Collectives of exact reductions, each with a residual: an int64 that, summed over all ranks, is 0 modulo 2^64 unless
bits changed on the way. Residuals of any number of collectives, over any groups, may be added up before the one look.

Sums of bit patterns are taken modulo 2^64. What one rank gives another is weighted by an odd number of that pair, so a
changed bit, a lost message and one at the wrong place all show; only changes that cancel out within one do not.
"""

import torch
import torch.distributed as dist

from truestep.numerics.fixed_point import signed


def exchange_rows(x_WN: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Give row r of contiguous `x_WN` to rank r of `group`. Returns what rank r gave this one, as row r, and the
    residual. Half of a reduce-scatter: the sum over rows is the caller's."""
    received_WN = torch.empty_like(x_WN)
    dist.all_to_all_single(received_WN, x_WN, group=group)
    rank, world = group.rank(), group.size()
    sent = _weighted(x_WN, [_mark(rank, other) for other in range(world)])
    return received_WN, sent - _weighted(received_WN, [_mark(other, rank) for other in range(world)])


def sum_integers_(x_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Replace int64 `x_N` by its sum over `group`. Returns the residual."""
    world, rank = group.size(), group.rank()
    residual = x_N.sum() * signed(sum(_mark(0, other) for other in range(world)))
    dist.all_reduce(x_N, group=group)
    return residual.sub_(x_N.sum() * signed(_mark(0, rank)))


def send_integers(x_N: torch.Tensor, group: dist.ProcessGroup, source: int, target: int) -> torch.Tensor:
    """Fill int64 `x_N` of rank `target` of `group` from that of rank `source`; for the others there is nothing to do.
    Returns the residual."""
    if group.rank() not in (source, target):
        return x_N.new_zeros(())
    sends = group.rank() == source
    operation, peer = (dist.isend, target) if sends else (dist.irecv, source)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, x_N, group=group, group_peer=peer)]):
        work.wait()
    return x_N.sum() * signed(_mark(source, target) if sends else -_mark(source, target))


def bit_sum(x_RN: torch.Tensor) -> torch.Tensor:
    """Of each row of contiguous `x_RN` (4 or 8 bytes an element), the sum of its bits as int64, modulo 2^64: in words
    of 8 bytes where a row is a whole number of them."""
    if x_RN.element_size() == 8 or x_RN.shape[1] % 2 == 0:
        return x_RN.view(torch.int64).sum(1)
    return x_RN.view(torch.int32).to(torch.int64).sum(1)


def _weighted(x_WN: torch.Tensor, weights: list[int]) -> torch.Tensor:
    marks = torch.tensor([signed(weight) for weight in weights]).to(x_WN.device, non_blocking=True)
    return (bit_sum(x_WN) * marks).sum()


def _mark(source: int, target: int) -> int:
    """An odd number for messages from `source` to `target` (a step of the generator SplitMix64)."""
    mixed = ((source << 32) + target + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return mixed | 1
