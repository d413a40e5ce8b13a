"""Each element is written by exactly one rank, and the work is divided evenly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from megatron.checkpoint.logical import LogicalShard, TensorBox, boxes_of_flat_range
from megatron.checkpoint.planner import divide_plans


def plan_of(shards: dict[str, LogicalShard]) -> SavePlan:
    return SavePlan([item for name, shard in shards.items() for item in shard.__create_write_items__(name, shard)])


def coverage(plans: list[SavePlan], name: str, shape: tuple[int, ...]) -> np.ndarray:
    count = np.zeros(shape, dtype=int)
    for plan in plans:
        for item in plan.items:
            if item.index.fqn == name and item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                count[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    return count


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> LogicalShard:
    return LogicalShard(shape, dtype, [TensorBox((0,) * len(shape), torch.zeros(shape, dtype=dtype))])


def num_bytes(plan: SavePlan) -> int:
    return sum(math.prod(item.tensor_data.chunk.sizes) * 4 for item in plan.items if item.tensor_data is not None)


def test_replicas_are_written_once_and_evenly() -> None:
    shards = {f"w{i}": zeros(i + 1, 8) for i in range(12)}
    plans = divide_plans([plan_of(shards) for _ in range(3)])
    for name, shard in shards.items():
        assert (coverage(plans, name, shard.global_shape) == 1).all()
    loads = [num_bytes(plan) for plan in plans]
    assert max(loads) - min(loads) <= 2 * 8 * 4


def test_tensors_of_a_single_rank_count_in_the_balance() -> None:
    shared = {f"s{i}": zeros(10) for i in range(10)}
    plans = divide_plans([plan_of({"own": zeros(100), **shared}), plan_of(shared)])
    assert [num_bytes(plan) for plan in plans] == [400, 400]


def test_overlapping_slices_are_cut() -> None:
    shape, plans = (6, 4), []
    for a, b in [(0, 9), (5, 24), (9, 24), (0, 5)]:  # two replicas with different cuts
        boxes = boxes_of_flat_range(shape, (0, 0), shape, torch.zeros(b - a), a, b)
        plans.append(plan_of({"x": LogicalShard(shape, torch.float32, boxes)}))
    assert (coverage(divide_plans(plans), "x", shape) == 1).all()


def test_a_gap_is_named() -> None:
    half = LogicalShard((4,), torch.float32, [TensorBox((0,), torch.zeros(2))])
    with pytest.raises(ValueError, match=r"x: the ranks hold 2 of its 4 elements"):
        divide_plans([plan_of({"x": half}), plan_of({"x": half})])


def test_disagreement_is_named() -> None:
    with pytest.raises(ValueError, match="x: ranks describe it differently"):
        divide_plans([plan_of({"x": zeros(4)}), plan_of({"x": zeros(4, dtype=torch.float64)})])
