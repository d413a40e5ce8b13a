"""Shards describe live memory; any layout loads the checkpoint of any other."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.checkpoint.boxes import flat_range_to_boxes
from megatron.checkpoint.load import load_tensors
from megatron.checkpoint.logical import LogicalShard, TensorBox, boxes_of_flat_range, shard_of_local
from megatron.checkpoint.save import save_checkpoint


def cut_flat(flat: Tensor, shape: Sequence[int], cuts: Sequence[int]) -> list[TensorBox]:
    """A tensor as flat slices, as on the ranks of a distributed optimizer."""
    bounds = [0, *sorted(cuts), flat.numel()]
    zeros = (0,) * len(shape)
    return [
        piece
        for a, b in itertools.pairwise(bounds)
        for piece in boxes_of_flat_range(shape, zeros, shape, flat[a:b], a, b)
    ]


def cut_blocks(x: Tensor, dim: int, blocks: int) -> list[TensorBox]:
    """A tensor as blocks along a dimension, as on tensor-parallel ranks."""
    pieces, offset = [], 0
    for block in x.tensor_split(blocks, dim):
        offsets = tuple(offset if axis == dim else 0 for axis in range(x.dim()))
        offset += block.shape[dim]
        pieces.append(TensorBox(offsets, block))
    return pieces


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    blocks: bool = draw(st.booleans())
    if shape and blocks:
        return "blocks", [draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))]
    return "flat", draw(st.lists(st.integers(0, math.prod(shape)), max_size=4))


def laid_out(x: Tensor, layout: tuple[str, list[int]]) -> LogicalShard:
    kind, numbers = layout
    shape = tuple(x.shape)
    pieces = cut_blocks(x, *numbers) if kind == "blocks" else cut_flat(x.view(-1), shape, numbers)
    return LogicalShard(shape, x.dtype, pieces)


@given(
    st.lists(st.integers(1, 5), max_size=3)
    .map(tuple)
    .flatmap(lambda shape: st.tuples(st.just(shape), layouts(shape), layouts(shape))),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
@settings(max_examples=25)
def test_any_layout_loads_any_other(
    case: tuple[tuple[int, ...], tuple[str, list[int]], tuple[str, list[int]]], dtype: torch.dtype
) -> None:
    shape, before, after = case
    saved = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    loaded = torch.full(shape, -1).to(dtype)
    with tempfile.TemporaryDirectory() as root:
        save_checkpoint(root, 1, {"x": laid_out(saved, before)}, {}, "")
        load_tensors(root, 1, {"x": laid_out(loaded, after)})
    assert torch.equal(saved, loaded)


@given(st.integers(0, 24), st.integers(0, 24))
def test_flat_slices_leave_padding_out(a: int, b: int) -> None:
    start, stop = min(a, b), max(a, b)
    # Rows 4 to 9 of a tensor with 7 rows: three are padding.
    flat = torch.arange(24)[start:stop]
    pieces = boxes_of_flat_range((6, 4), (4, 0), (7, 4), flat, start, stop)
    values = sorted(value for piece in pieces for value in piece.tensor.reshape(-1).tolist())
    assert values == [value for value in range(start, stop) if value < 3 * 4]
    for piece in pieces:
        assert int(piece.tensor.reshape(-1)[0]) == (piece.offsets[0] - 4) * 4 + piece.offsets[1]


def test_padding_of_columns_and_rows() -> None:
    flat = torch.arange(12)
    pieces = boxes_of_flat_range((3, 4), (0, 0), (3, 3), flat, 0, 12)
    assert [piece.tensor.tolist() for piece in pieces] == [[[0, 1, 2], [4, 5, 6], [8, 9, 10]]]
    pieces = boxes_of_flat_range((3, 4), (0, 0), (1, 2), flat, 0, 12)
    assert [piece.tensor.tolist() for piece in pieces] == [[[0, 1]]]


def test_pieces_are_views_of_the_memory() -> None:
    flat = torch.zeros(10)
    for piece in boxes_of_flat_range((4, 5), (0, 0), (4, 5), flat, 3, 13):
        piece.tensor.fill_(1)
    assert flat.tolist() == [1.0] * 10
    local = torch.zeros(4, 3, requires_grad=True)
    shard = shard_of_local(local, (0, 0), (3, 3))
    shard.boxes[0].tensor.fill_(2)
    assert local.detach().sum(1).tolist() == [6, 6, 6, 0]


def test_a_block_of_padding_alone_has_no_pieces() -> None:
    assert shard_of_local(torch.zeros(2, 3), (4, 0), (4, 3)).boxes == []
    assert shard_of_local(torch.zeros(2, 3), (6, 0), (4, 3)).boxes == []


def test_a_view_of_a_box_inside_a_piece() -> None:
    x = torch.arange(12).view(3, 4)
    shard = LogicalShard((3, 8), x.dtype, [TensorBox((0, 4), x)])
    assert shard.view((1, 5), (2, 2)).tolist() == [[5, 6], [9, 10]]
    with pytest.raises(KeyError, match="no piece"):
        shard.view((1, 3), (2, 2))


@pytest.mark.parametrize(
    ("shape", "offsets", "tensor"),
    [
        ((4,), (3,), torch.zeros(2)),
        ((4,), (-1,), torch.zeros(2)),
        ((4, 1), (0,), torch.zeros(2)),
        ((4,), (0,), torch.zeros(2, dtype=torch.float64)),
    ],
)
def test_impossible_pieces_are_refused(shape: tuple[int, ...], offsets: tuple[int, ...], tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="piece"):
        LogicalShard(shape, torch.float32, [TensorBox(offsets, tensor)])


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="9 elements"):
        boxes_of_flat_range((4, 5), (0, 0), (4, 5), torch.zeros(9), 0, 10)
    assert flat_range_to_boxes((0, 5), 0, 0) == []
