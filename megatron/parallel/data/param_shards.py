"""The parameters that a rank updates: all that it holds, or its shares when the optimizer is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel.data.buffer import FlatBuffer, ParamSlot
from megatron.parallel.data.gradient_sync import local_share, overlap_slots


@dataclass(frozen=True)
class ParamShard:
    """A contiguous range of a (row-major flattened) local parameter that this rank updates.

    Args:
        slot: the parameter.
        start, stop: the range within the flattened parameter.
        main: the values that the optimizer updates, fp32 (or fp64): the model's memory itself if the dtypes agree.
        model: the same range of the model's parameter, flat.
        grad: the same range of the reduced gradients, flat.
        counted: whether this rank counts the shard in sums over replicas: if replicas hold equal shards, only the first
            does.
    """

    slot: ParamSlot
    start: int
    stop: int
    main: Tensor
    model: Tensor
    grad: Tensor
    counted: bool

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: not to biases and other vectors."""
        return len(self.slot.spec.logical_shape) > 1 and not self.slot.logical_name.endswith(".bias")

    def counts_in_norm(self, tp_rank: int) -> bool:
        """Whether this rank counts these elements in norms over the whole model."""
        spec = self.slot.spec
        return self.counted and not spec.tied_copy and spec.counted_by(tp_rank)


def make_local_shards(buffers: Sequence[FlatBuffer], sharded: bool, separate: bool = False) -> list[ParamShard]:
    """Make the shards of this rank, over all chunks.

    Args:
        buffers: buffers of the chunks.
        sharded: whether this rank owns only its share of each bucket.
        separate: whether main values have separate memory even if the dtypes agree.
    """
    shards = []
    for buffer in buffers:
        counted = sharded or buffer.group.rank == 0
        main_dtype = torch.float64 if buffer.params_flat.dtype == torch.float64 else torch.float32
        for bucket in buffer.buckets:
            for index, start, stop in overlap_slots(bucket, local_share(bucket, buffer.group, sharded)):
                slot = bucket.slots[index]
                span = slice(slot.start + start, slot.start + stop)
                model = buffer.params_flat[span]
                main = model.to(main_dtype, copy=separate)
                shards.append(ParamShard(slot, start, stop, main, model, buffer.reduced_flat[span], counted))
    return shards
