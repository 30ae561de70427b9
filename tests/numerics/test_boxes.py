"""Boxes make up a tensor, or it is said why not."""

import pytest

from truestep.numerics.boxes import Box, cover_problem


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], None),
        ([((0, 0), (4, 1)), ((0, 1), (4, 3))], None),
        ([((0, 0), (2, 4))], "covered by 8 of 16"),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "overlapping"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], "overlapping"),
        ([((0, 0), (2, 4)), ((3, 0), (2, 4))], "outside its shape"),
        ([((0,), (16,))], "1 dimensions"),
    ],
)
def test_boxes_must_cover_exactly(boxes, problem):
    found = cover_problem((4, 4), [Box(*box) for box in boxes])
    assert found is None if problem is None else problem in found


def test_scalars_and_empty_tensors_are_covered_too():
    scalar = Box((), ())
    assert cover_problem((), [scalar]) is None
    assert "covered by 2 of 1" in cover_problem((), [scalar, scalar])
    assert "covered by 0 of 1" in cover_problem((), [])
    assert cover_problem((0, 3), []) is None
