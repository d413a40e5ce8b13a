"""Axis-aligned boxes of integer coordinates: overlap, difference, and the ranges of a flattened tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, per dimension."""


def flat_range_to_boxes(
    shape: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split a range of a row-major flattened tensor into boxes that are contiguous in the flat order.

    There are at most ``2 * len(shape) - 1`` boxes: the end of the first row, whole rows, the beginning of the
    last row, and the same again inside the two incomplete rows.

    Args:
        shape: the tensor's shape.
        start: the first flat position.
        stop: the flat position after the last.

    Returns:
        For each box, in flat order: its offsets, its shape, and the flat position at which it starts.

    Raises:
        ValueError: when the range does not lie in the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}:{stop} does not lie in a tensor of shape {tuple(shape)}")
    if start == stop:
        return []
    return _split_range(tuple(shape), start, stop, ())


def _split_range(
    shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split a non-empty range of the sub-tensor at ``prefix``; flat positions count from that sub-tensor."""
    if not shape:
        return [(prefix, (1,) * len(prefix), start)]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    head = start - first * row  # skipped in the first row
    tail = (last + 1) * row - stop  # missing from the last row
    if first == last and (head or tail):
        inner = _split_range(shape[1:], head, row - tail, (*prefix, first))
        return [(offsets, sizes, flat + first * row) for offsets, sizes, flat in inner]
    boxes = []
    if head:
        boxes += _split_range(shape, start, (first + 1) * row, prefix)
        first += 1
    rows = last + 1 - first - (1 if tail else 0)
    if rows:
        offsets = (*prefix, first, *[0] * (len(shape) - 1))
        boxes.append((offsets, (*[1] * len(prefix), rows, *shape[1:]), first * row))
    if tail:
        boxes += _split_range(shape, last * row, stop, prefix)
    return boxes


def clip(box: Box, extent: Sequence[int]) -> Box | None:
    """Clip a box to ``[0, extent)``; None when nothing is left."""
    offsets, sizes = box
    clipped_sizes = tuple(min(o + s, e) - o for o, s, e in zip(offsets, sizes, extent, strict=True))
    return None if any(size <= 0 for size in clipped_sizes) else (offsets, clipped_sizes)


def overlap(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None when it is empty."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(ao + s, bo + t) for ao, s, bo, t in zip(*a, *b, strict=True))
    sizes = tuple(h - o for h, o in zip(high, low, strict=True))
    return None if any(size <= 0 for size in sizes) else (low, sizes)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that make up ``box`` without ``hole``: at most two per dimension."""
    shared = overlap(box, hole)
    if shared is None:
        return [box]
    pieces: list[Box] = []
    offsets, sizes = list(box[0]), list(box[1])
    for dim, (low, size) in enumerate(zip(*shared, strict=True)):
        before, after = low - offsets[dim], offsets[dim] + sizes[dim] - low - size
        if before:
            pieces.append((tuple(offsets), (*sizes[:dim], before, *sizes[dim + 1 :])))
        if after:
            shifted = (*offsets[:dim], low + size, *offsets[dim + 1 :])
            pieces.append((shifted, (*sizes[:dim], after, *sizes[dim + 1 :])))
        offsets[dim], sizes[dim] = low, size
    return pieces


def disjoint_parts(boxes: Sequence[Box]) -> list[tuple[int, Box]]:
    """Disjoint boxes that cover the same cells as ``boxes``.

    A sweep along the longest dimension keeps the comparisons few.

    Returns:
        Pairs of a box and the index in ``boxes`` of a box that contains it.
    """
    if not boxes:
        return []
    num_dims = len(boxes[0][0])
    if num_dims == 0:
        return [(0, boxes[0])]
    sweep = max(range(num_dims), key=lambda d: max(o[d] + s[d] for o, s in boxes))
    order = sorted(range(len(boxes)), key=lambda i: (boxes[i][0][sweep], boxes[i]))
    active: list[Box] = []
    result: list[tuple[int, Box]] = []
    for index in order:
        start = boxes[index][0][sweep]
        active = [(o, s) for o, s in active if o[sweep] + s[sweep] > start]
        pieces = [boxes[index]]
        for occupied in active:
            pieces = [remainder for piece in pieces for remainder in subtract(piece, occupied)]
        active += pieces
        result += [(index, piece) for piece in pieces]
    return result
