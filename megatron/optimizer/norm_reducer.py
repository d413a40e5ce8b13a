"""Sums over whole tensors from sums over their shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.parallel.data.buffer import FlatBuffer, ParamSlot
from megatron.parallel.data.param_shards import ParamShard


class ParamNormReducer:
    """Sums over the logical parameters from sums over the shards.

    Args:
        shards: the shards that this rank updates.
        buffers: all parameters that this rank holds, in the order that their holders share.
        tp: the tensor-parallel ranks, which hold parts of the same tensors.
        sharded: whether the replicas of each buffer hold shares of it.
        ledger: ledger that counts the all-gathers over the holders.
    """

    def __init__(
        self,
        shards: Sequence[ParamShard],
        buffers: Sequence[FlatBuffer],
        tp: Group,
        sharded: bool,
        ledger: Ledger,
    ) -> None:
        self._tp, self._ledger = tp, ledger
        slots: list[ParamSlot] = []
        # Buffers of the same replicas are gathered together.
        numbers_by_group: dict[int, tuple[Group, list[int]]] = {}
        for buffer in buffers:
            first = len(slots)
            slots += [slot for bucket in buffer.buckets for slot in bucket.slots]
            numbers_by_group.setdefault(id(buffer.group), (buffer.group, []))[1].extend(range(first, len(slots)))
        self._replicas = list(numbers_by_group.values()) if sharded else []
        self._num_slots, self.device = len(slots), slots[0].param.device
        number_of = {id(slot): number for number, slot in enumerate(slots)}
        numbers = [number_of[id(shard.slot)] for shard in shards]
        self._slot_numbers = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        unshared = [slot.spec.unshared for slot in slots]
        self._unshared = torch.tensor(unshared, device=self.device).unsqueeze(1)
        # Of a parameter replicated on all tensor-parallel ranks, only the first rank's copy counts.
        weights = [shard.slot.spec.counted_by(tp.rank) for shard in shards]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=self.device).unsqueeze(1)

    def __call__(self, sums_ns: Tensor) -> Tensor:
        """Sum over the whole tensors that contain the shards.

        Args:
            sums_ns: a row of sums for each shard.

        Returns:
            A row for each shard, in fp64. All ranks that hold parts of a tensor get equal rows; so do all holders of a
                tied embedding, since the ranks' rows are added in rank order.
        """
        rows = torch.zeros(self._num_slots, sums_ns.shape[1], dtype=torch.float64, device=self.device)
        rows.index_add_(0, self._slot_numbers, sums_ns.to(torch.float64) * self._weights)
        if self._tp.size > 1:
            rows = torch.where(self._unshared, rows, self._sum_over(self._tp, rows))
        for group, numbers in self._replicas:
            if group.size > 1:
                rows[numbers] = self._sum_over(group, rows[numbers])
        return rows[self._slot_numbers]

    def _sum_over(self, group: Group, rows: Tensor) -> Tensor:
        """All-reduce that adds the ranks' rows in rank order."""
        gathered = rows.new_empty(group.size * rows.numel())
        self._ledger.complete(Point.CONTROL, group.all_gather(gathered, rows.flatten()))
        total, *other_ranks = gathered.view(group.size, *rows.shape).unbind()
        for rows_of_rank in other_ranks:
            total = total + rows_of_rank
        return total


def stack_scalars(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack scalars, possibly none, into an fp64 vector."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([value.to(torch.float64) for value in values]) if values else empty
