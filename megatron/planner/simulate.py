"""Simulates a pipeline's schedule in time: when each rank computes, and what it waits for."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.parallel.pipeline.schedule import PipelineOp, training_schedule

_WHOLE = 1024
"""Operations, forward, of steps that are played from the beginning to the end."""


@dataclass(frozen=True)
class Hop:
    """One message between two virtual stages.

    Args:
        encode_s, decode_s: encoding and decoding at its ends; they keep the ranks busy.
        transfer_s: time for which it fills the link.
        latency_s: time from then until it has arrived.
    """

    encode_s: float = 0.0
    transfer_s: float = 0.0
    latency_s: float = 0.0
    decode_s: float = 0.0


Hops = Callable[[bool, int, bool], Hop]
"""(forward, boundary, late) -> the message; late ones are sent in the sender's epilogue."""


@dataclass(frozen=True)
class RankTimes:
    """The times of one pipeline rank's step.

    Args:
        end: time at which its last operation is done.
        busy: computing time within that.
        coding: time of encoding and decoding messages.
    """

    end: float
    busy: float
    coding: float

    @property
    def waiting(self) -> float:
        """The time of waiting for messages."""
        return self.end - self.busy - self.coding


@dataclass(frozen=True)
class Pipeline:
    """The shape of a pipeline and the times of its chunks.

    Args:
        kind: schedule: 1f1b, eager-1f1b or gpipe.
        forward_s, backward_s: time of one micro-batch, by virtual stage.
        stages: number of pipeline ranks; virtual stage v is on rank v % stages.
        hops: messages between the virtual stages.
    """

    kind: str
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    stages: int
    hops: Hops

    @property
    def chunks(self) -> int:
        """Number of virtual stages on each rank."""
        return len(self.forward_s) // self.stages

    def lower_bound(self, micro_batches: int) -> float:
        """A lower bound of the time over all orders of operations, in seconds.

        A rank computes for all micro-batches, after the first forward has come through the ranks before it and before
        the last backward has gone back through them.
        """
        bound = way = 0.0
        for rank in range(self.stages):
            own = sum(self.forward_s[rank :: self.stages]) + sum(self.backward_s[rank :: self.stages])
            bound = max(bound, way + micro_batches * own)
            if rank < self.stages - 1:
                there, back = self.hops(True, rank, False), self.hops(False, rank, True)
                way += self.forward_s[rank] + self.backward_s[rank]
                way += sum(hop.encode_s + hop.transfer_s + hop.latency_s + hop.decode_s for hop in (there, back))
        return bound

    def run(self, micro_batches: int) -> list[RankTimes]:
        """Simulates a step; returns the times of every rank."""
        if self.kind == "gpipe" or micro_batches * len(self.forward_s) <= _WHOLE:
            return self._play(micro_batches)
        return self._lengthened(micro_batches)

    def _lengthened(self, micro_batches: int) -> list[RankTimes]:
        """Plays only the beginning of a long step, and extrapolates the rest.

        In the steady state of 1F1B every further group of micro-batches takes equally long, and all ranks go at the
        pace of the slowest one. Ranks that are a little faster come to that pace late: nothing is faster than what any
        rank computes and codes.
        """
        short, period = max(3 * self.stages + 12, _WHOLE // (2 * len(self.forward_s))), 2 * self.stages
        if self.chunks > 1:
            short = -(-short // self.stages) * self.stages
        if micro_batches <= short + period:
            return self._play(micro_batches)
        rest = (micro_batches - short) % period if self.chunks == 1 else 0
        less, more = self._play(short + rest), self._play(short + rest + period)
        periods = (micro_batches - short - rest) / period
        pairs = list(zip(less, more, strict=True))
        pace = max(max(b.end - a.end, b.busy + b.coding - a.busy - a.coding) for a, b in pairs)
        return [
            RankTimes(
                a.end + periods * pace,
                a.busy + periods * (b.busy - a.busy),
                a.coding + periods * (b.coding - a.coding),
            )
            for a, b in pairs
        ]

    def schedules(self, micro_batches: int) -> list[list[PipelineOp]]:
        """The operations of every rank."""
        return [
            training_schedule(self.kind, self.stages, rank, self.chunks, micro_batches) for rank in range(self.stages)
        ]

    def _play(self, micro_batches: int) -> list[RankTimes]:
        schedules = self.schedules(micro_batches)
        play = _Play(self, schedules)
        play.run()
        return [RankTimes(rank.clock, rank.busy, rank.coding) for rank in play.ranks]


@dataclass
class _Rank:
    """A rank in a simulation.

    Args:
        ops: its operations.
        late: number of the operations before its epilogue.
        next: number of the operations that are done.
        clock: time at which it is free.
        busy, coding: seconds of computing and coding so far.
    """

    ops: Sequence[PipelineOp]
    late: int
    next: int = 0
    clock: float = 0.0
    busy: float = 0.0
    coding: float = 0.0


Message = tuple[bool, int, int]
"""(forward, boundary, micro-batch)."""


@dataclass
class _Flow:
    """The messages from one rank to a neighbor, in their order.

    Args:
        sender, receiver: ranks at its ends.
        queue: messages that have not left, and their sizes.
        left: what is left of the size of the first message.
        rate: rate at which it moves, as a share of a free link's.
        since: time at which that much was left.
        version: number of changes of the rate.
    """

    sender: int
    receiver: int
    queue: deque[tuple[Message, Hop]] = field(default_factory=deque)
    left: float = 0.0
    rate: float = 1.0
    since: float = 0.0
    version: int = 0


def _epilogue_begins(ops: Sequence[PipelineOp]) -> int:
    """Number of operations up to the last forward, after which nothing overlaps messages of backwards."""
    return max((place for place, op in enumerate(ops) if op.forward), default=-1) + 1


class _Play:
    """A simulation: events in the order of time.

    Flows that leave a rank at the same time share its way out, and those that arrive share its way in: the first
    message of two is not there earlier because it was sent earlier.
    """

    def __init__(self, pipeline: Pipeline, schedules: Sequence[Sequence[PipelineOp]]) -> None:
        self.pipeline = pipeline
        self.ranks = [_Rank(ops, _epilogue_begins(ops)) for ops in schedules]
        self.last = len(pipeline.forward_s) - 1
        self.arrived: dict[Message, tuple[float, float]] = {}
        """Arrived messages: their time, and how long each takes to decode."""
        self.missed: dict[Message, int] = {}
        self.flows: dict[tuple[int, int], _Flow] = {}
        self.leaving: list[list[_Flow]] = [[] for _ in schedules]
        self.arriving: list[list[_Flow]] = [[] for _ in schedules]
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def run(self) -> None:
        """Runs all operations.

        Raises:
            RuntimeError: when the schedule waits for a message that is never sent.
        """
        for rank in range(len(self.ranks)):
            self._queue(rank)
        while self.events:
            time, _, event, arguments = heapq.heappop(self.events)
            event(time, *arguments)
        if self.missed:
            raise RuntimeError("the schedule waits for a message that is never sent")

    def _at(self, time: float, event: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self.events, (time, self._count, event, arguments))

    def _queue(self, number: int) -> None:
        """Schedules a rank's next operation, or lets it wait for its message."""
        rank = self.ranks[number]
        if rank.next == len(rank.ops):
            return
        needs = self._needs(number, rank.ops[rank.next])
        if needs is None or needs in self.arrived:
            start = rank.clock if needs is None else max(rank.clock, self.arrived[needs][0])
            self._at(start, self._do, number, needs)
        else:
            self.missed[needs] = number

    def _needs(self, number: int, op: PipelineOp) -> Message | None:
        """The message that an operation waits for."""
        virtual = op.chunk * self.pipeline.stages + number
        boundary = virtual - 1 if op.forward else virtual
        return (op.forward, boundary, op.micro_batch) if 0 <= boundary < self.last else None

    def _do(self, _: float, number: int, needs: Message | None) -> None:
        pipeline, rank = self.pipeline, self.ranks[number]
        op = rank.ops[rank.next]
        virtual = op.chunk * pipeline.stages + number
        if needs is not None:
            came, decode = self.arrived.pop(needs)
            rank.clock = max(rank.clock, came) + decode
            rank.coding += decode
        spent = (pipeline.forward_s if op.forward else pipeline.backward_s)[virtual]
        rank.clock += spent
        rank.busy += spent
        goes = virtual if op.forward else virtual - 1
        if 0 <= goes < self.last:
            hop = pipeline.hops(op.forward, goes, not op.forward and rank.next >= rank.late)
            rank.clock += hop.encode_s
            rank.coding += hop.encode_s
            to = (number + (1 if op.forward else -1)) % pipeline.stages
            self._at(rank.clock, self._send, number, to, (op.forward, goes, op.micro_batch), hop)
        rank.next += 1
        self._queue(number)

    def _send(self, time: float, number: int, to: int, message: Message, hop: Hop) -> None:
        if hop.transfer_s == 0.0:
            self._arrive(message, hop, time + hop.latency_s)
            return
        flow = self.flows.setdefault((number, to), _Flow(number, to))
        flow.queue.append((message, hop))
        if len(flow.queue) == 1:
            flow.left, flow.since, flow.rate = hop.transfer_s, time, 0.0
            self.leaving[number].append(flow)
            self.arriving[to].append(flow)
            self._share(number, to, time)

    def _share(self, sender: int, receiver: int, time: float) -> None:
        """Shares the ends of a link anew, after a flow through it began or ended."""
        leaving, arriving = self.leaving[sender], self.arriving[receiver]
        both = [*leaving, *(flow for flow in arriving if flow.sender != sender)]
        for flow in both:
            flow.left -= (time - flow.since) * flow.rate
            flow.since = time
            flow.rate = 1.0 / max(len(self.leaving[flow.sender]), len(self.arriving[flow.receiver]))
            self._expect_end(flow)

    def _expect_end(self, flow: _Flow) -> None:
        flow.version += 1
        version = flow.version
        self._at(flow.since + max(flow.left, 0.0) / flow.rate, self._end, flow, version)

    def _end(self, time: float, flow: _Flow, version: int) -> None:
        """Ends the first message of a flow, unless its rate has changed since."""
        if version != flow.version:
            return
        message, hop = flow.queue.popleft()
        self._arrive(message, hop, time + hop.latency_s)
        if flow.queue:
            flow.left, flow.since = flow.queue[0][1].transfer_s, time
            self._expect_end(flow)
            return
        self.leaving[flow.sender].remove(flow)
        self.arriving[flow.receiver].remove(flow)
        self._share(flow.sender, flow.receiver, time)

    def _arrive(self, message: Message, hop: Hop, time: float) -> None:
        self.arrived[message] = time, hop.decode_s
        waiting = self.missed.pop(message, None)
        if waiting is not None:
            self._queue(waiting)
