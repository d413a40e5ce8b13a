"""A rank's part of a global tensor: boxes, as views of live memory.

``LogicalShard`` implements the duck-typed interface through which torch.distributed.checkpoint saves and loads objects
that are not tensors (``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``). It writes and
reads only the boxes that it has, which is all that resharding needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.checkpoint.boxes import clip, flat_range_to_boxes


@dataclass(eq=False)
class TensorBox:
    """A box of a global tensor.

    Args:
        offsets: offsets of the box in the global tensor.
        tensor: values of the box: a view of live memory, any strides, any device.
    """

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(eq=False)
class LogicalShard:
    """The boxes of a global tensor that this rank holds.

    Args:
        global_shape: the whole tensor's shape, without padding.
        dtype: dtype in memory.
        boxes: this rank's boxes; empty ones are dropped.

    Raises:
        ValueError: when a box has another dtype or number of dimensions, or does not lie in the global tensor.
    """

    global_shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[TensorBox]

    def __post_init__(self) -> None:
        self.global_shape = tuple(self.global_shape)
        self.boxes = [box for box in self.boxes if box.tensor.numel()]
        for box in self.boxes:
            shape = tuple(box.tensor.shape)
            if box.tensor.dtype != self.dtype:
                raise ValueError(f"a piece is {box.tensor.dtype}, its tensor {self.dtype}")
            if not len(shape) == len(box.offsets) == len(self.global_shape) or any(
                o < 0 or o + s > g for o, s, g in zip(box.offsets, shape, self.global_shape, strict=True)
            ):
                raise ValueError(
                    f"a piece of shape {shape} at {box.offsets} does not lie in a tensor of shape {self.global_shape}"
                )

    def view(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A view of the memory of a box that lies inside a box of this rank.

        Raises:
            KeyError: when none of this rank's boxes contains it.
        """
        for box in self.boxes:
            starts = [o - p for o, p in zip(offsets, box.offsets, strict=True)]
            if all(
                start >= 0 and start + size <= extent
                for start, size, extent in zip(starts, sizes, box.tensor.shape, strict=True)
            ):
                return box.tensor.detach()[tuple(slice(o, o + n) for o, n in zip(starts, sizes, strict=True))]
        raise KeyError(f"no piece holds the box of sizes {tuple(sizes)} at {tuple(offsets)}")

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """A write item for each box."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.global_shape),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes as chunks, in their order."""
        return [ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=box.tensor.shape) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The box of a read item, found by its index, else by its offsets."""
        assert index.offset is not None
        offsets = tuple(index.offset)
        numbered = self.boxes[index.index : index.index + 1] if index.index is not None else []
        for box in [*numbered, *self.boxes]:
            if tuple(box.offsets) == offsets:
                return box.tensor.detach()
        raise KeyError(f"{index.fqn}: this rank holds no piece at {offsets}")


def shard_of_local(local: Tensor, local_offsets: Sequence[int], global_shape: Sequence[int]) -> LogicalShard:
    """Describe a rank's block of a global tensor.

    Args:
        local: the block; rows and columns beyond ``global_shape`` are padding and are left out.
        local_offsets: offsets of the block in the global tensor.
        global_shape: the whole tensor's shape, without padding.
    """
    extent = [g - o for g, o in zip(global_shape, local_offsets, strict=True)]
    clipped = clip(((0,) * local.dim(), tuple(local.shape)), extent)
    boxes = []
    if clipped is not None:
        boxes = [TensorBox(tuple(local_offsets), local.detach()[tuple(map(slice, clipped[1]))])]
    return LogicalShard(tuple(global_shape), local.dtype, boxes)


def boxes_of_flat_range(
    local_shape: Sequence[int],
    local_offsets: Sequence[int],
    global_shape: Sequence[int],
    flat_tensor: Tensor,
    start: int,
    stop: int,
) -> list[TensorBox]:
    """Describe a slice of a rank's flattened block, as the distributed optimizer holds it.

    A block that maps to several regions of the global tensor (fused gate and up projections) needs a call per region,
    with the region's part of the slice.

    Args:
        local_shape: shape of this rank's block of the global tensor, padding included.
        local_offsets: offsets of the block in the global tensor.
        global_shape: the whole tensor's shape, without padding.
        flat_tensor: 1-D, ``stop - start`` elements: the slice's memory.
        start: first position of the slice in the flattened block.
        stop: the position after its last.

    Returns:
        Boxes whose tensors are views of ``flat_tensor``; padding belongs to none.

    Raises:
        ValueError: when the slice does not lie in the block or ``flat_tensor`` has another size.
    """
    if flat_tensor.numel() != stop - start:
        raise ValueError(f"the memory has {flat_tensor.numel()} elements for the range {start}:{stop}")
    extent = [g - o for g, o in zip(global_shape, local_offsets, strict=True)]
    memory = flat_tensor.detach()
    boxes = []
    for offsets, sizes, flat_start in flat_range_to_boxes(local_shape, start, stop):
        clipped = clip((offsets, sizes), extent)
        if clipped is None:
            continue
        box = memory[flat_start - start : flat_start - start + math.prod(sizes)].view(sizes)
        box_offsets = tuple(o + p for o, p in zip(local_offsets, offsets, strict=True))
        boxes.append(TensorBox(box_offsets, box[tuple(map(slice, clipped[1]))]))
    return boxes
