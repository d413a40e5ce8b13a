"""A step's operations on every stage, and the messages sent before each operation."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.distributed.layout import Layout
from megatron.parallel.pipeline.schedule import Pass, PipelineOp, find_epilogue

_Position = tuple[Pass, int, int]
"""An operation's place in the model: (computation, virtual stage, micro-batch)."""


MAX_POSTED_AHEAD = 2
"""Maximum number of receives posted before they are due, on each route, under a fixed schedule.

A transfer begins when its receive is posted; a late receive leaves the link idle while this rank computes. The sender
is at most one message ahead of the receiver in 1F1B, and two messages in eager 1F1B.
"""


Route = tuple[bool, int]
"""Messages that a rank receives in the order in which they are sent: (forward, pipeline rank of the sender)."""

DueReceives = Mapping[Route, int]
"""Number of receives of a step on each route, in order, with messages sent before an operation can begin."""


@dataclass(frozen=True)
class Timetable:
    """A step on all stages.

    Args:
        schedules: operations of every stage, in order.
        epilogues: for every stage the operations with exposed messages.
        messages_due: for every stage and operation, the receives of messages that were sent before it.
        max_ahead: maximum number of receives posted before they are due, on each route.
        warm_ups: number of warm-up forwards of every stage if its steps overlap, under 1f1b and eager-1f1b.
    """

    schedules: tuple[tuple[PipelineOp, ...], ...]
    epilogues: tuple[frozenset[PipelineOp], ...]
    messages_due: tuple[tuple[DueReceives, ...], ...]
    max_ahead: int = MAX_POSTED_AHEAD
    warm_ups: Sequence[int] = ()

    @property
    def digest(self) -> str:
        """Hash of the order of the operations on all stages."""
        order = [[(op.computation.name, op.chunk, op.micro_batch) for op in ops] for ops in self.schedules]
        return hashlib.sha256(repr(order).encode()).hexdigest()


def build_timetable(
    layout: Layout,
    schedules: Sequence[Sequence[PipelineOp]],
    max_ahead: int = MAX_POSTED_AHEAD,
    warm_ups: Sequence[int] = (),
) -> Timetable:
    """Build the timetable of the given schedules.

    An operation's level is the length of the longest chain of operations that ends with it, in which each operation
    depends on the previous: it follows on the same rank, or needs its message. A message is due before every operation
    of a higher level than that of its sending operation.

    Raises:
        ValueError: when the ranks would deadlock.
    """
    positions = [
        [(op.computation, layout.virtual_stage(stage, op.chunk), op.micro_batch) for op in ops]
        for stage, ops in enumerate(schedules)
    ]
    levels: dict[_Position, int] = {}
    reached = [0] * len(positions)
    newest = [0] * len(positions)
    progressed = True
    while progressed:
        progressed = False
        for stage, of_stage in enumerate(positions):
            while reached[stage] < len(of_stage):
                position = of_stage[reached[stage]]
                source = _find_source(layout, position)
                if source is not None and source not in levels:
                    break
                newest[stage] = 1 + max(newest[stage], 0 if source is None else levels[source])
                levels[position] = newest[stage]
                reached[stage] += 1
                progressed = True
    if any(count < len(of_stage) for count, of_stage in zip(reached, positions, strict=True)):
        raise ValueError("the stages of this schedule wait for each other")
    return Timetable(
        schedules=tuple(map(tuple, schedules)),
        epilogues=tuple(map(find_epilogue, schedules)),
        messages_due=tuple(tuple(_count_due(layout, *numbered, levels)) for numbered in enumerate(positions)),
        max_ahead=max_ahead,
        warm_ups=warm_ups,
    )


def _find_source(layout: Layout, position: _Position) -> _Position | None:
    """Find the operation of another virtual stage whose result this operation needs; None if it needs none."""
    computation, stage, micro_batch = position
    if computation is Pass.WEIGHT:
        return None
    source = stage - 1 if computation is Pass.FORWARD else stage + 1
    return (computation, source, micro_batch) if 0 <= source < layout.num_virtual_stages else None


def _count_due(
    layout: Layout, stage: int, positions: Sequence[_Position], levels: dict[_Position, int]
) -> Iterator[DueReceives]:
    # A route's messages come in the order in which they are sent: their levels ascend.
    sent: dict[Route, list[int]] = {}
    for position in positions:
        source = _find_source(layout, position)
        if source is not None and (sender := layout.place_of(source[1])[0]) != stage:
            sent.setdefault((position[0] is Pass.FORWARD, sender), []).append(levels[source])
    for position in positions:
        yield {route: bisect_left(levels_sent, levels[position]) for route, levels_sent in sent.items()}
