"""Boxes of a tensor, and whether some of them make up the whole. Torch-free."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """The part of a tensor that begins at `offsets` and has `sizes` elements along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)


class Layout(NamedTuple):
    """A tensor of `shape` over the ranks of a group: each one's box. It may be empty, or the same as another's."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def whole(shape: Sequence[int], num_ranks: int = 1) -> Layout:
    """Every rank holds all of it."""
    return Layout(tuple(shape), (Box((0,) * len(shape), tuple(shape)),) * num_ranks)


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why the boxes are not an exact cover of a tensor of `shape`, as the rest of a sentence about it; or None."""
    volume = 0
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"has a chunk of {len(box.sizes)} dimensions, but {len(shape)} itself"
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)):
            return f"has a chunk at {list(box.offsets)} of {list(box.sizes)} outside its shape {list(shape)}"
        volume += box.volume
    if volume != math.prod(shape):
        return f"is covered by {volume} of {math.prod(shape)} elements; a rank's part is missing or doubled"
    return "has overlapping chunks" if _overlap(boxes) else None


def _overlap(boxes: Sequence[Box]) -> bool:
    """Sweep along the dimension with the most distinct offsets; only boxes open at the same place are compared."""
    if len(boxes) < 2 or not boxes[0].sizes:
        return len(boxes) > 1
    sweep = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[sweep]):
        active = [other for other in active if other.offsets[sweep] + other.sizes[sweep] > box.offsets[sweep]]
        if any(_meet(box, other) for other in active):
            return True
        active.append(box)
    return False


def _meet(a: Box, b: Box) -> bool:
    sides = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(ao < bo + bs and bo < ao + asize for ao, asize, bo, bs in sides)
