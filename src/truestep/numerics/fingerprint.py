"""Fingerprints that add up: a 64-bit sum over the elements of a tensor, in which every bit and every place counts.

The sum of the fingerprints of the pieces of a tensor is that of the whole tensor, however it was cut, so one integer
all-reduce compares states across meshes. No element is moved, and nothing waits for the device.

F = Σ word · w_0[i_0] · w_1[i_1] · ... modulo 2^64, over the words (at most 32 bits) at (i_0, i_1, ...) of the whole
tensor, with pseudo-random odd weights for each dimension. An odd factor is invertible modulo 2^64 and two words differ
by less than 2^32, so a change of one word always changes F; changes of several words meet with a chance near 2^-32 or
less. It guards against faults, not against someone who wants to deceive.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from truestep.numerics.fixed_point import GOLDEN, signed
from truestep.numerics.pieces import Piece, piece_of

_WORDS = {1: torch.uint8, 2: torch.int16}
_CHUNK = {"cpu": 2**17, "cuda": 2**24}
"""Words at a time: what stays in cache on a CPU, what bounds the scratch memory on a GPU."""
_MIX_1, _MIX_2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def fingerprint(x: torch.Tensor | Piece) -> torch.Tensor:
    """Of what this rank holds of a tensor (a DTensor, a piece, or all of it): scalar int64 on its device."""
    piece = piece_of(x)
    words, start = _as_words(piece)
    shape, chunk = words.shape, _CHUNK[words.device.type]
    if words.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=words.device)
    inner = len(shape) - 1  # the first of the dimensions that make a row
    while inner and math.prod(shape[inner - 1 :]) <= chunk:
        inner -= 1
    dims = range(len(shape))
    words_RC = words.reshape(math.prod(shape[:inner]), -1)
    row_weights = _weights(dims[:inner], start, shape, words.device)
    width = min(words_RC.shape[1], chunk)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    whole_rows = words_RC.shape[1] == width
    for first in range(0, words_RC.shape[1], width):
        part_Rc = words_RC[:, first : first + width]
        if whole_rows:
            weights_c = _weights(dims[inner:], start, shape, words.device)
        else:  # one dimension that is longer than a chunk
            weights_c = _odd(inner, start[inner] + first, part_Rc.shape[1], words.device)
        total += _sum(part_Rc, row_weights, weights_c, chunk)
    return total


def fingerprints(pieces: Mapping[str, torch.Tensor | Piece], names: Sequence[str]) -> torch.Tensor:
    """Of the tensors `names`, int64 (N,) on their device; 0 for those that this rank does not hold or does not answer
    for. The sum over all ranks is that of the whole tensors."""
    held = {name: piece_of(pieces[name]) for name in names if name in pieces}
    found = [fingerprint(held[name]) if name in held and held[name].owned else None for name in names]
    device = next((value.device for value in found if value is not None), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([zero if value is None else value.to(device) for value in found]) if found else zero.new_zeros(0)


def added(shares: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Of whole tensors, by name: the sums of what ranks have of them, as signed 64-bit numbers."""
    total: dict[str, int] = {}
    for share in shares:
        for name, value in share.items():
            total[name] = signed((total.get(name, 0) + value) % 2**64)
    return dict(sorted(total.items()))


def combined(names: Iterable[str], values: Iterable[int]) -> str:
    """One text (32 hex figures) for the fingerprints of named whole tensors, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(zip(names, values, strict=True)):
        digest.update(f"{name} {shown(value)}\n".encode())
    return digest.hexdigest()


def shown(value: int) -> str:
    """A fingerprint as 16 hex figures."""
    return f"{value % 2**64:016x}"


def _as_words(piece: Piece) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The elements as integers of at most 32 bits, several in a row for a wide element, and where they begin."""
    local, start = piece.local.detach().contiguous(), piece.start
    if local.dim() == 0:
        local, start = local.reshape(1), (0,)
    size = local.element_size()
    words = local.view(_WORDS.get(size, torch.int32))
    return words, (*start[:-1], start[-1] * max(1, size // 4))


def _sum(words_Rc: torch.Tensor, weights_R: torch.Tensor, weights_c: torch.Tensor, chunk: int) -> torch.Tensor:
    rows, width = words_Rc.shape
    size = max(1, chunk // width)
    scratch = torch.empty(min(size, rows), width, dtype=torch.int64, device=words_Rc.device)
    sums = []
    for first in range(0, rows, size):
        part_rc = words_Rc[first : first + size]
        sums.append(scratch[: len(part_rc)].copy_(part_rc).mul_(weights_c).sum(1))
    return torch.cat(sums).mul_(weights_R).sum()


def _weights(dims: Sequence[int], start: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Products of the weights of some neighbouring dimensions, in row order."""
    product = torch.ones(1, dtype=torch.int64, device=device)
    for dim in dims:
        product = (product[:, None] * _odd(dim, start[dim], shape[dim], device)).flatten()
    return product


def _odd(dim: int, start: int, size: int, device: torch.device) -> torch.Tensor:
    """Weights of the indices [start, start + size) of a dimension: SplitMix64 (Steele, Lea and Flood, 2014), made odd.
    Products and sums of int64 tensors wrap around; the masks make shifts of negative numbers unsigned."""
    index = torch.arange(start, start + size, device=device)
    mixed = (index + (dim << 48)).mul_(GOLDEN)
    mixed = (mixed ^ (mixed >> 30 & (2**34 - 1))).mul_(_MIX_1)
    mixed = (mixed ^ (mixed >> 27 & (2**37 - 1))).mul_(_MIX_2)
    return (mixed ^ (mixed >> 31 & (2**33 - 1))) | 1
