"""Fragments of the model, which islands exchange in turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.diloco.pseudo_grad_reducer import PseudoGradReducer
from megatron.distributed.group import Group
from megatron.distributed.layout import Tie
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.data.buffer import FlatBuffer, ParamSlot
from megatron.parallel.data.param_shards import ParamShard
from megatron.parallel.data.reducer import GradBucket, ParamRange

_LAYER = re.compile(r"layers\.(\d+)\.")


def fragment_index(name: str, layers: int, fragments: int) -> int:
    """Index of a parameter's fragment. Layers are assigned round-robin (Douillard et al. 2025, "strided"). Parameters
    before the layers belong to the first layer's fragment, parameters after them to the last layer's fragment."""
    match = _LAYER.search(name)
    if match is None:
        return 0 if "embedding" in name else (layers - 1) % fragments
    return int(match[1]) % fragments


@dataclass(frozen=True)
class ShardRange:
    """Range of a fragment's bucket with a shard of this rank.

    Args:
        index: index of the shard.
        bucket: index of the fragment's bucket.
        start, stop: range in the bucket.
        shard: the shard.
    """

    index: int
    bucket: int
    start: int
    stop: int
    shard: ParamShard


@dataclass(frozen=True)
class FragmentBucket:
    """Parameters of a fragment from the same gradient bucket.

    Args:
        buffer: buffer of the gradient bucket; its group is the group of replicas.
        slots: parameters, in the order of the gradient bucket.
        reduced: bucket for the reducer, without memory between rounds.
        tie: tied embedding in the bucket; None for other parameters.
        is_owner: whether this stage exchanges the bucket with other islands.
    """

    buffer: FlatBuffer
    slots: tuple[ParamSlot, ...]
    reduced: GradBucket
    tie: Tie | None
    is_owner: bool

    @property
    def leads(self) -> bool:
        """Whether this rank exchanges on behalf of its replicas."""
        return self.buffer.group.rank == 0

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.reduced.ranges[-1].stop


class Fragment:
    """This rank's part of a fragment of the model.

    Args:
        number: index of the fragment.
        fragments, layers: number of fragments, and of the model's layers.
        buffers: all parameters of this rank.
        shards: shards that this rank updates.
        ties: group of the stages with a copy, for each tied embedding.
        plan: plan with the compressor of ``OUTER``.
        ledger: ledger that counts the bytes.

    This rank exchanges ``exchanged_buckets`` with other islands through ``reducer``.
    """

    def __init__(
        self,
        number: int,
        fragments: int,
        layers: int,
        buffers: Sequence[FlatBuffer],
        shards: Sequence[ParamShard],
        ties: dict[Tie, Group],
        plan: CompressionPlan,
        ledger: Ledger,
    ) -> None:
        self.number = number
        self.buckets: list[FragmentBucket] = []
        for buffer in buffers:
            for bucket in buffer.buckets:
                slots = tuple(s for s in bucket.slots if fragment_index(s.logical_name, layers, fragments) == number)
                if not slots:
                    continue
                ranges: list[ParamRange] = []
                for slot in slots:
                    start = ranges[-1].stop if ranges else 0
                    ranges.append(ParamRange(slot.logical_name, start, tuple(slot.param.shape)))
                tie = slots[0].spec.tied
                tie = tie if tie in ties else None
                # The copies of a tied embedding are equal, so only one stage exchanges it with other islands.
                is_owner = tie is None or ties[tie].rank == 0
                reduced = GradBucket(bucket_memory(buffer, 0), tuple(ranges))
                self.buckets.append(FragmentBucket(buffer, slots, reduced, tie, is_owner))
        locations = {
            id(slot): (number_of_bucket, param_range.start)
            for number_of_bucket, bucket in enumerate(self.buckets)
            for slot, param_range in zip(bucket.slots, bucket.reduced.ranges, strict=True)
        }
        self.shard_ranges: list[ShardRange] = []
        for index, shard in enumerate(shards):
            if id(shard.slot) in locations:
                number_of_bucket, start = locations[id(shard.slot)]
                shard_range = ShardRange(index, number_of_bucket, start + shard.start, start + shard.stop, shard)
                self.shard_ranges.append(shard_range)
        self.exchanged_buckets = [bucket for bucket in self.buckets if bucket.leads and bucket.is_owner]
        self.reducer = PseudoGradReducer([bucket.reduced for bucket in self.exchanged_buckets], plan, ledger)

    def shard_view(self, shard_range: ShardRange) -> Tensor:
        """View of a shard in its bucket."""
        return self.buckets[shard_range.bucket].reduced.flat[shard_range.start : shard_range.stop]


def bucket_memory(buffer: FlatBuffer, length: int) -> Tensor:
    """Allocate zeros in the dtype of pseudo-gradients."""
    dtype = torch.float64 if buffer.params_flat.dtype == torch.float64 else torch.float32
    return torch.zeros(length, dtype=dtype, device=buffer.params_flat.device)
