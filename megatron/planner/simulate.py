"""Discrete-event simulation of a pipeline schedule: compute, coding and waiting times of each rank."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.parallel.pipeline.schedule import Pass, PipelineOp, TimedPass, make_schedule

_MAX_FULL_FORWARDS = 1024
"""Maximum number of forward operations in a step that is simulated in full."""


@dataclass(frozen=True)
class Hop:
    """A message between two virtual stages, in seconds.

    Args:
        encode_s, decode_s: encoding on the sender and decoding on the receiver, which keep those ranks busy.
        transfer_s: time for which the message occupies the link.
        latency_s: time between the end of the transfer and the arrival.
    """

    encode_s: float = 0.0
    transfer_s: float = 0.0
    latency_s: float = 0.0
    decode_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the start of encoding to the end of decoding."""
        return self.encode_s + self.transfer_s + self.latency_s + self.decode_s


Hops = Callable[[bool, int, bool], Hop]
"""(forward, boundary, late) -> the message; late messages are sent in the sender's epilogue."""


@dataclass(frozen=True)
class RankTimes:
    """Times of a pipeline rank's step, which consists of computing, coding and waiting for messages.

    Args:
        end: time at which the last operation has completed.
        busy: seconds of computing.
        coding: seconds of encoding and decoding messages.
    """

    end: float
    busy: float
    coding: float


@dataclass(frozen=True)
class Pipeline:
    """The shape of a pipeline and the times of its chunks.

    Args:
        kind: schedule: 1f1b, eager-1f1b, zb-h1 or gpipe.
        forward_s, backward_s: seconds of a micro-batch, by virtual stage.
        weight_s: the part of ``backward_s`` that a weight pass computes, if the schedule has weight passes.
        stages: number of pipeline ranks; virtual stage v is on rank v % stages.
        hops: messages between the virtual stages.
    """

    kind: str
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_s: Sequence[float]
    stages: int
    hops: Hops

    @property
    def chunks(self) -> int:
        """Number of virtual stages on each rank."""
        return len(self.forward_s) // self.stages

    def lower_bound(self, micro_batches: int) -> float:
        """Lower bound on the step time over all orders of operations, in seconds.

        A rank computes all micro-batches after the first forward has passed the preceding ranks. The last backward,
        without its weight gradients, passes these ranks again.
        """
        bound = forth_s = back_s = 0.0
        for rank in range(self.stages):
            compute_s = sum(self.forward_s[rank :: self.stages]) + sum(self.backward_s[rank :: self.stages])
            late_s = back_s - micro_batches * sum(self.weight_s[rank :: self.stages])
            bound = max(bound, forth_s + micro_batches * compute_s + max(late_s, 0.0))
            if rank < self.stages - 1:
                forth_s += self.forward_s[rank] + self.hops(True, rank, False).seconds
                back_s += self.backward_s[rank] - self.weight_s[rank] + self.hops(False, rank, True).seconds
        return bound

    def run(self, micro_batches: int) -> list[RankTimes]:
        """Simulate a step; return the times of every rank."""
        if self.kind == "gpipe" or micro_batches * len(self.forward_s) <= _MAX_FULL_FORWARDS:
            return self._play(micro_batches)
        return self._lengthened(micro_batches)

    def _lengthened(self, micro_batches: int) -> list[RankTimes]:
        """Simulate only the beginning of a long step, and extrapolate.

        In the steady state of 1F1B every further group of micro-batches takes the same time, and all ranks run at the
        pace of the slowest rank. Slightly faster ranks reach that pace late, so the pace is at least the computing and
        coding time of any rank.
        """
        short, period = max(3 * self.stages + 12, _MAX_FULL_FORWARDS // (2 * len(self.forward_s))), 2 * self.stages
        if self.chunks > 1:
            short = -(-short // self.stages) * self.stages
        if micro_batches <= short + period:
            return self._play(micro_batches)
        remainder = (micro_batches - short) % period if self.chunks == 1 else 0
        short_times, long_times = self._play(short + remainder), self._play(short + remainder + period)
        periods = (micro_batches - short - remainder) / period
        pairs = list(zip(short_times, long_times, strict=True))
        pace = max(max(b.end - a.end, b.busy + b.coding - a.busy - a.coding) for a, b in pairs)
        return [
            RankTimes(
                a.end + periods * pace,
                a.busy + periods * (b.busy - a.busy),
                a.coding + periods * (b.coding - a.coding),
            )
            for a, b in pairs
        ]

    def simulate_passes(self, micro_batches: int) -> list[list[TimedPass]]:
        """Simulate a step in full; return the passes of every rank."""
        ranks = self._simulate(micro_batches)
        return [
            [TimedPass(op, start, end) for op, (start, end) in zip(rank.ops, rank.spans, strict=True)] for rank in ranks
        ]

    def _play(self, micro_batches: int) -> list[RankTimes]:
        return [RankTimes(rank.clock, rank.busy, rank.coding) for rank in self._simulate(micro_batches)]

    def _simulate(self, micro_batches: int) -> list[_Rank]:
        stages = range(self.stages)
        schedules = [make_schedule(self.kind, self.stages, rank, self.chunks, micro_batches) for rank in stages]
        play = _Play(self, schedules)
        play.run()
        return play.ranks


@dataclass
class _Rank:
    """State of a rank in a simulation.

    Args:
        ops: the rank's operations.
        separate: chunks and micro-batches with a weight pass.
        late: number of operations before the epilogue.
        next: number of completed operations.
        clock: time at which the rank is free.
        busy, coding: seconds of computing and coding so far.
        spans: start and end of the computation of each completed operation.
    """

    ops: Sequence[PipelineOp]
    separate: frozenset[tuple[int, int]]
    late: int
    next: int = 0
    clock: float = 0.0
    busy: float = 0.0
    coding: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)


Message = tuple[bool, int, int]
"""(forward, boundary, micro-batch)."""


@dataclass
class _Flow:
    """Queue of messages from a rank to a neighbor.

    Args:
        sender, receiver: the ranks.
        queue: messages that have not been transferred yet, in order.
        remaining_s: remaining transfer seconds of the first message at full rate.
        rate: current transfer rate, as a share of an idle link's.
        since: time at which ``remaining_s`` was computed.
        version: number of changes of the rate.
    """

    sender: int
    receiver: int
    queue: deque[tuple[Message, Hop]] = field(default_factory=deque)
    remaining_s: float = 0.0
    rate: float = 1.0
    since: float = 0.0
    version: int = 0


class _Play:
    """A discrete-event simulation.

    Concurrent flows out of a rank share its egress bandwidth, and concurrent flows into a rank share its ingress
    bandwidth.
    """

    def __init__(self, pipeline: Pipeline, schedules: Sequence[Sequence[PipelineOp]]) -> None:
        self.pipeline = pipeline
        self.ranks: list[_Rank] = []
        for ops in schedules:
            # Nothing overlaps backward messages after the last forward.
            late = max((index for index, op in enumerate(ops) if op.is_forward), default=-1) + 1
            separate = frozenset((op.chunk, op.micro_batch) for op in ops if op.computation is Pass.WEIGHT)
            self.ranks.append(_Rank(ops, separate, late))
        self.last = len(pipeline.forward_s) - 1
        self.arrived: dict[Message, tuple[float, float]] = {}
        """Arrived messages: arrival time and seconds of decoding."""
        self.missed: dict[Message, int] = {}
        self.flows: dict[tuple[int, int], _Flow] = {}
        self.leaving: list[list[_Flow]] = [[] for _ in schedules]
        self.arriving: list[list[_Flow]] = [[] for _ in schedules]
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def run(self) -> None:
        """Run all operations.

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
        """Schedule a rank's next operation, or register it as waiting for its message."""
        rank = self.ranks[number]
        if rank.next == len(rank.ops):
            return
        op = rank.ops[rank.next]
        virtual = op.chunk * self.pipeline.stages + number
        boundary = virtual - 1 if op.is_forward else virtual
        receives = 0 <= boundary < self.last and op.computation is not Pass.WEIGHT
        needs = (op.is_forward, boundary, op.micro_batch) if receives else None
        if needs is None or needs in self.arrived:
            start = rank.clock if needs is None else max(rank.clock, self.arrived[needs][0])
            self._at(start, self._do, number, needs)
        else:
            self.missed[needs] = number

    def _do(self, _: float, number: int, needs: Message | None) -> None:
        pipeline, rank = self.pipeline, self.ranks[number]
        op = rank.ops[rank.next]
        virtual = op.chunk * pipeline.stages + number
        if needs is not None:
            arrival, decode = self.arrived.pop(needs)
            rank.clock = max(rank.clock, arrival) + decode
            rank.coding += decode
        if op.is_forward:
            spent = pipeline.forward_s[virtual]
        elif op.is_backward:
            separate = (op.chunk, op.micro_batch) in rank.separate
            spent = pipeline.backward_s[virtual] - separate * pipeline.weight_s[virtual]
        else:
            spent = pipeline.weight_s[virtual]
        rank.spans.append((rank.clock, rank.clock + spent))
        rank.clock += spent
        rank.busy += spent
        boundary = virtual if op.is_forward else virtual - 1
        if 0 <= boundary < self.last and op.computation is not Pass.WEIGHT:
            hop = pipeline.hops(op.is_forward, boundary, not op.is_forward and rank.next >= rank.late)
            rank.clock += hop.encode_s
            rank.coding += hop.encode_s
            receiver = (number + (1 if op.is_forward else -1)) % pipeline.stages
            self._at(rank.clock, self._send, number, receiver, (op.is_forward, boundary, op.micro_batch), hop)
        rank.next += 1
        self._queue(number)

    def _send(self, time: float, number: int, to: int, message: Message, hop: Hop) -> None:
        if hop.transfer_s == 0.0:
            self._arrive(message, hop, time + hop.latency_s)
            return
        flow = self.flows.setdefault((number, to), _Flow(number, to))
        flow.queue.append((message, hop))
        if len(flow.queue) == 1:
            flow.remaining_s, flow.since, flow.rate = hop.transfer_s, time, 0.0
            self.leaving[number].append(flow)
            self.arriving[to].append(flow)
            self._share(number, to, time)

    def _share(self, sender: int, receiver: int, time: float) -> None:
        """Recompute the rates of all flows at both ends of a link after a flow has started or ended."""
        leaving, arriving = self.leaving[sender], self.arriving[receiver]
        flows = [*leaving, *(flow for flow in arriving if flow.sender != sender)]
        for flow in flows:
            flow.remaining_s -= (time - flow.since) * flow.rate
            flow.since = time
            flow.rate = 1.0 / max(len(self.leaving[flow.sender]), len(self.arriving[flow.receiver]))
            self._expect_end(flow)

    def _expect_end(self, flow: _Flow) -> None:
        flow.version += 1
        version = flow.version
        self._at(flow.since + max(flow.remaining_s, 0.0) / flow.rate, self._end, flow, version)

    def _end(self, time: float, flow: _Flow, version: int) -> None:
        """Complete the first message of a flow, unless the rate has changed since the event was scheduled."""
        if version != flow.version:
            return
        message, hop = flow.queue.popleft()
        self._arrive(message, hop, time + hop.latency_s)
        if flow.queue:
            flow.remaining_s, flow.since = flow.queue[0][1].transfer_s, time
            self._expect_end(flow)
            return
        self.leaving[flow.sender].remove(flow)
        self.arriving[flow.receiver].remove(flow)
        self._share(flow.sender, flow.receiver, time)

    def _arrive(self, message: Message, hop: Hop, time: float) -> None:
        self.arrived[message] = time, hop.decode_s
        waiting_rank = self.missed.pop(message, None)
        if waiting_rank is not None:
            self._queue(waiting_rank)
