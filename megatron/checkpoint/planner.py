"""Save and load planners for ``LogicalShard``: assign boxes to writing ranks, and resolve the memory to read into.

They derive from torch.distributed.checkpoint's default planners and replace the methods that assume tensors. Errors
are stored in ``problem`` rather than raised, because a rank that raises between two collectives leaves the others
waiting.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from megatron.checkpoint.boxes import Box, disjoint_parts
from megatron.checkpoint.logical import LogicalShard


@dataclass
class _Task:
    """A box to be written by a single owner among the ranks that hold it."""

    item: WriteItem
    owners: list[int]
    num_bytes: int


class ShardSavePlanner(DefaultSavePlanner):
    """Save planner for ``LogicalShard`` values.

    A box held by several ranks is written once; partially overlapping boxes are split. Bytes are balanced over the
    ranks, as far as their boxes allow.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.problem: str | None = None

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Divide the boxes among the ranks (on the coordinator)."""
        try:
            plans = divide_plans(all_plans)
        except ValueError as error:
            self.problem = str(error)
            plans = [dataclasses.replace(plan, items=[]) for plan in all_plans]
        self.global_plan, self.metadata = create_default_global_save_plan(plans)
        return self.global_plan, self.metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the memory of an item."""
        shard: LogicalShard = self.state_dict[write_item.index.fqn]
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return shard.view(chunk.offsets, chunk.sizes)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Load planner for ``LogicalShard`` values; each rank plans for itself."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Store the arguments; the base class would replace values that are not tensors."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The box that an item is read into."""
        shard: LogicalShard = self.state_dict[index.fqn]
        return shard.__get_tensor_shard__(index)


def divide_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """Assign each box to a single rank, given the plan of the boxes that each rank holds.

    Raises:
        ValueError: when ranks disagree on a tensor's shape or type, or together do not hold all of it.
    """
    holders: dict[str, dict[Box, list[tuple[int, WriteItem]]]] = defaultdict(lambda: defaultdict(list))
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = (tuple(chunk.offsets), tuple(chunk.sizes))
            holders[item.index.fqn][box].append((rank, item))
    tasks = []
    for name, holders_by_box in holders.items():
        data = [
            item.tensor_data
            for entries in holders_by_box.values()
            for _, item in entries
            if item.tensor_data is not None
        ]
        kinds = {(tuple(d.size), d.properties.dtype) for d in data}
        if len(kinds) > 1:
            raise ValueError(f"cannot save {name}: ranks describe it differently, as {sorted(map(str, kinds))}")
        ((shape, dtype),) = kinds
        boxes = list(holders_by_box)
        pieces = disjoint_parts(boxes)
        held_volume = sum(math.prod(sizes) for _, (_, sizes) in pieces)
        if held_volume != math.prod(shape):
            raise ValueError(
                f"cannot save {name}: the ranks hold {held_volume} of its {math.prod(shape)} elements (shape {shape})"
            )
        for index, (offsets, sizes) in pieces:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            tensor_data = dataclasses.replace(data[0], chunk=chunk)
            item = WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=tensor_data)
            owners = sorted({rank for rank, _ in holders_by_box[boxes[index]]})
            tasks.append(_Task(item, owners, math.prod(sizes) * dtype.itemsize))
    # Each box goes to the owner with the fewest bytes so far: boxes with a single owner, then the others by size.
    assigned: list[list[WriteItem]] = [[] for _ in plans]
    load = [0] * len(plans)
    for task in sorted(tasks, key=lambda task: (len(task.owners) > 1, -task.num_bytes)):
        rank = min(task.owners, key=lambda r: load[r])
        load[rank] += task.num_bytes
        assigned[rank].append(task.item)
    for items in assigned:
        items.sort(key=lambda item: (item.index.fqn, tuple(item.index.offset or ())))
    return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, assigned, strict=True)]
