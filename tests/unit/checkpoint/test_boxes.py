"""Boxes against masks of cells."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxes import Box, clip, disjoint_parts, flat_range_to_boxes, overlap, subtract

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, sizes = [], []
    for length in shape:
        offset = draw(st.integers(0, length - 1))
        offsets.append(offset)
        sizes.append(draw(st.integers(1, length - offset)))
    return tuple(offsets), tuple(sizes)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def mask(shape: tuple[int, ...], *boxes: Box) -> np.ndarray:
    """How many of the boxes cover each cell."""
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[slices(box)] += 1
    return count


@given(ranges())
def test_boxes_partition_the_range_in_flat_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    flat = np.arange(math.prod(shape)).reshape(shape)
    covered: list[int] = []
    boxes = flat_range_to_boxes(shape, start, stop)
    for offsets, sizes, flat_start in boxes:
        cells = flat[slices((offsets, sizes))].reshape(-1)
        assert cells[0] == flat_start
        covered += cells.tolist()
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_the_tensor_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not lie"):
        flat_range_to_boxes((2, 3), *bounds)


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape), boxes_in(shape))))
def test_overlap_and_subtract_match_masks(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    shared = overlap(a, b)
    in_a, in_b = mask(shape, a), mask(shape, b)
    assert mask(shape, *([] if shared is None else [shared])).tolist() == (in_a * in_b).tolist()
    assert mask(shape, *subtract(a, b)).tolist() == (in_a * (1 - in_b)).tolist()


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_in(shape), max_size=6))))
def test_disjoint_parts_cover_the_same_cells_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    pieces = list(disjoint_parts(boxes))
    assert all(overlap(piece, boxes[index]) == piece for index, piece in pieces)
    assert mask(shape, *(piece for _, piece in pieces)).tolist() == mask(shape, *boxes).clip(max=1).tolist()


def test_clip() -> None:
    assert clip(((1, 2), (3, 4)), (3, 9)) == ((1, 2), (2, 4))
    assert clip(((3, 0), (1, 1)), (3, 9)) is None
