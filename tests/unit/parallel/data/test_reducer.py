"""Order of reduction rounds: buckets take turns, and messages between nodes leave during backward."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Level, Op, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group, Pending
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket


@dataclass
class RecordingGroup:
    """A rank's view of a group whose collectives change nothing, but record starts and waits in ``events``."""

    events: list[str]
    name: str = "all"
    size: int = 4
    rank: int = 0
    split: Any = None

    def all_reduce(self, x: Tensor) -> Pending:
        label = f"{self.name} {x.numel()}"
        self.events.append(f"start {label}")
        return Pending(None, 1, "all-reduce", lambda: self.events.append(f"wait {label}"))


@dataclass
class Split:
    node: RecordingGroup
    across: RecordingGroup
    nodes: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))


class Levels(RoundCompressor):
    """An exact sum, a level at a time."""

    traits = SumTraits(levels=True)

    def __init__(self, levels: Sequence[Level], events: list[str]) -> None:
        self.levels, self.events = levels, events

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        original = x.clone()
        for level in self.levels:
            x = yield Request(x, Op.REDUCE, level=level)
        return Aggregate(x, original)

    def finalize(self, x: Tensor, aggregate: Aggregate, state: CompressorState, peers: Peers) -> None:
        self.events.append(f"end {x.numel()}")


@dataclass
class Plan:
    """A plan with a single compressor of gradients."""

    compressor: RoundCompressor
    stage: int = 0

    def rounds(self, point: Point) -> RoundCompressor:
        return self.compressor

    def select_compressor(self, point: Point, shape: tuple[int, ...] | None, state: CompressorState) -> RoundCompressor:
        return self.compressor

    def covers(self, point: Point, stage: int) -> bool:
        return True

    def is_active(self, point: Point, iteration: int) -> bool:
        return True


def events_of(*levels: Level, finite: bool = True) -> tuple[list[str], list[str]]:
    """Events of backward and of the end of a step with three buckets of 1, 2 and 3 numbers."""
    events: list[str] = []
    group = RecordingGroup(events)
    group.split = Split(RecordingGroup(events, "node", 2), RecordingGroup(events, "across", 2))
    buckets = [GradBucket(torch.ones(size)) for size in (1, 2, 3)]
    plan = cast(CompressionPlan, Plan(Levels(levels, events)))
    reducer = GradReducer(buckets, cast(Group, group), plan, Ledger(), sharded=False)
    reducer.begin_step(0, 1.0)
    for index in range(3):
        reducer.mark_ready(index)
    backward = list(events)
    reducer.finish_reduction(finite)
    return backward, events[len(backward) :]


def test_messages_between_nodes_leave_when_the_next_bucket_is_ready() -> None:
    backward, end = events_of(Level.NODE, Level.ACROSS)
    first = ["start node 1", "wait node 1", "start across 1", "start node 2"]
    assert backward == [*first, "wait node 2", "start across 2", "start node 3"]
    third = ["wait node 3", "start across 3", "end 2", "wait across 3", "end 3"]
    assert end == ["wait across 1", "wait across 2", "end 1", *third]


def test_backward_does_not_wait_for_messages_between_nodes() -> None:
    for levels in ((Level.ALL, Level.ALL), (Level.ACROSS, Level.NODE)):
        backward, _ = events_of(*levels)
        assert [event.split()[0] for event in backward] == ["start"] * 3


def test_buckets_take_turns() -> None:
    """Second rounds are in flight while other buckets wait for their first rounds."""
    _, end = events_of(Level.ALL, Level.ALL)
    turns = [f"{event} all {size}" for size in (1, 2, 3) for event in ("wait", "start")]
    assert end == [*turns, "wait all 1", "wait all 2", "end 1", "wait all 3", "end 2", "end 3"]


def test_a_bucket_ends_while_others_are_between_nodes() -> None:
    """After the turn of the next bucket, whose message leaves first."""
    _, end = events_of(Level.NODE, Level.ACROSS, Level.NODE)
    first = ["wait across 1", "start node 1", "wait node 1"]
    second = ["wait across 2", "start node 2", "wait node 2", "end 1"]
    third = ["wait node 3", "start across 3", "end 2", "wait across 3", "start node 3", "wait node 3", "end 3"]
    assert end == first + second + third


def test_a_skipped_step_starts_no_further_round() -> None:
    _, end = events_of(Level.ALL, Level.ALL, finite=False)
    assert end == ["wait all 1", "wait all 2", "wait all 3"]
