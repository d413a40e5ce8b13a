"""Discrete-event simulation of a pipeline schedule: compute, coding and waiting times of each rank."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.distributed.layout import Layout
from megatron.parallel.pipeline.schedule import (
    NO_LIMITS,
    ZERO_BUBBLE_V,
    Pass,
    PipelineOp,
    ScheduleLimits,
    TimedPass,
    add_weight_passes,
    make_schedule,
    one_f_one_b,
    warm_ups_without_flush,
)

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
    """Times of a step on a pipeline rank, which computes, encodes and decodes, and waits for messages.

    Args:
        end: completion time of the last operation.
        busy: seconds of computing.
        coding: seconds of encoding and decoding messages.
        passes: the passes, in a step that is simulated in full.
    """

    end: float
    busy: float
    coding: float
    passes: Sequence[TimedPass] = ()


@dataclass(frozen=True)
class Pipeline:
    """The shape of a pipeline and the times of its chunks.

    Args:
        kind: schedule: 1f1b, eager-1f1b, zb-h1, zb-v or gpipe.
        forward_s, backward_s: seconds of a micro-batch, by virtual stage.
        weight_s: the part of ``backward_s`` that a weight pass computes, if the schedule has weight passes.
        stages: number of pipeline ranks.
        hops: messages between the virtual stages.
        limits: limits on what a stage stores.
    """

    kind: str
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_s: Sequence[float]
    stages: int
    hops: Hops
    limits: ScheduleLimits = NO_LIMITS

    @property
    def chunks(self) -> int:
        """Number of virtual stages on each rank."""
        return len(self.forward_s) // self.stages

    @property
    def layout(self) -> Layout:
        """Places of the virtual stages."""
        return Layout(pp=self.stages, chunks=self.chunks, v_shaped=self.kind == ZERO_BUBBLE_V)

    def run(self, micro_batches: int) -> list[RankTimes]:
        """Simulate a step; return the times of every rank."""
        if self.kind == "gpipe" or micro_batches * len(self.forward_s) <= _MAX_FULL_FORWARDS:
            return self.simulate_in_full(micro_batches)
        return self._extrapolate(micro_batches)

    def run_without_flush(self, micro_batches: int) -> list[RankTimes]:
        """Simulate steps in which passes of two steps take turns; return the mean times once the pipeline is full.

        Passes of several such steps have the order of one long step with the same warm-up.
        """
        count = min(micro_batches, max(4 * self.stages, _MAX_FULL_FORWARDS // (7 * self.stages)))
        warm_ups = warm_ups_without_flush(self.kind, self.stages, micro_batches, self.limits)
        long_steps = ([one_f_one_b(warm_up, steps * count) for warm_up in warm_ups] for steps in (3, 7))
        lists = ([add_weight_passes(ops, stage) for stage, ops in enumerate(stages)] for stages in long_steps)
        few, many = (self.simulate_orders([ListedOrder(ops) for ops in stages]) for stages in lists)
        share = micro_batches / (4 * count)
        return [
            RankTimes((b.end - a.end) * share, (b.busy - a.busy) * share, (b.coding - a.coding) * share)
            for a, b in zip(few, many, strict=True)
        ]

    def _extrapolate(self, micro_batches: int) -> list[RankTimes]:
        """Simulate only the beginning of a long step, and extrapolate.

        In the steady state of 1F1B every further group of micro-batches takes the same time, and all ranks run at the
        pace of the slowest rank. Slightly faster ranks reach that pace late, so the pace is at least the computing and
        coding time of any rank.
        """
        short, period = max(3 * self.stages + 12, _MAX_FULL_FORWARDS // (2 * len(self.forward_s))), 2 * self.stages
        in_groups = self.chunks > 1 and self.kind != ZERO_BUBBLE_V
        if in_groups:
            short = -(-short // self.stages) * self.stages
        if micro_batches <= short + period:
            return self.simulate_in_full(micro_batches)
        short += 0 if in_groups else (micro_batches - short) % period
        pairs = list(zip(self.simulate_in_full(short), self.simulate_in_full(short + period), strict=True))
        periods = (micro_batches - short) / period
        pace = max(max(b.end - a.end, b.busy + b.coding - a.busy - a.coding) for a, b in pairs)
        return [
            RankTimes(
                a.end + periods * pace,
                a.busy + periods * (b.busy - a.busy),
                a.coding + periods * (b.coding - a.coding),
            )
            for a, b in pairs
        ]

    def simulate_in_full(self, micro_batches: int, flush: bool = True) -> list[RankTimes]:
        """Simulate all passes of a step, with weight passes if it has no ``flush``; return the times of every rank."""
        shape = self.chunks, micro_batches, self.limits
        lists = [make_schedule(self.kind, self.stages, rank, *shape) for rank in range(self.stages)]
        if not flush and any(self.weight_s):
            lists = [add_weight_passes(ops, rank) for rank, ops in enumerate(lists)]
        return self.simulate_orders([ListedOrder(ops) for ops in lists])

    def simulate_orders(self, orders: Sequence[PassOrder]) -> list[RankTimes]:
        """Simulate a step whose operations each rank chooses by its order; return the times of every rank."""
        simulation = _Simulation(self, orders)
        simulation.run()
        return [RankTimes(rank.clock, rank.busy, rank.coding, rank.passes) for rank in simulation.ranks]


HasInput = Callable[[PipelineOp], bool]
"""Whether an operation needs no message, or its message has arrived."""


class PassOrder(Protocol):
    """A rank's choice of operations, made whenever the rank is free."""

    def choose(self, has_input: HasInput) -> PipelineOp | None:
        """Choose the next operation; None to wait for another message, or at the end."""

    def separates(self, op: PipelineOp) -> bool:
        """Whether the chunk and micro-batch of a backward pass have a weight pass."""

    @property
    def has_ended(self) -> bool:
        """Whether all operations have been chosen."""

    @property
    def in_epilogue(self) -> bool:
        """Whether all forward passes have been chosen."""


class ListedOrder:
    """The order of a list of operations."""

    def __init__(self, ops: Sequence[PipelineOp]) -> None:
        self._ops = ops
        self._chosen = 0
        self._separate = frozenset((op.chunk, op.micro_batch) for op in ops if op.computation is Pass.WEIGHT)
        self._epilogue = max((index for index, op in enumerate(ops) if op.is_forward), default=-1) + 1

    def choose(self, has_input: HasInput) -> PipelineOp | None:
        if self.has_ended or not has_input(op := self._ops[self._chosen]):
            return None
        self._chosen += 1
        return op

    def separates(self, op: PipelineOp) -> bool:
        return (op.chunk, op.micro_batch) in self._separate

    @property
    def has_ended(self) -> bool:
        return self._chosen == len(self._ops)

    @property
    def in_epilogue(self) -> bool:
        return self._chosen >= self._epilogue


@dataclass
class _Rank:
    """State of a rank in a simulation.

    Args:
        order: the rank's choice of operations.
        is_waiting: whether the rank waits for another message, or has ended.
        clock: time at which the rank is free.
        busy, coding: seconds of computing and coding so far.
        passes: the completed operations.
    """

    order: PassOrder
    is_waiting: bool = False
    clock: float = 0.0
    busy: float = 0.0
    coding: float = 0.0
    passes: list[TimedPass] = field(default_factory=list)


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


class _Simulation:
    """A discrete-event simulation: concurrent flows out of a rank share its egress bandwidth, and concurrent flows into
    it share its ingress bandwidth."""

    def __init__(self, pipeline: Pipeline, orders: Sequence[PassOrder]) -> None:
        self.pipeline = pipeline
        self.ranks = [_Rank(order) for order in orders]
        self.layout = pipeline.layout
        self.last = len(pipeline.forward_s) - 1
        self.arrived: dict[Message, float] = {}
        """Messages that have arrived and are not decoded yet, with the seconds of their decoding."""
        self.flows: dict[tuple[int, int], _Flow] = {}
        self.leaving: list[list[_Flow]] = [[] for _ in orders]
        self.arriving: list[list[_Flow]] = [[] for _ in orders]
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def run(self) -> None:
        """Run all operations.

        Raises:
            RuntimeError: when the schedule waits for a message that is never sent.
        """
        for rank in range(len(self.ranks)):
            self._begin_op(0.0, rank)
        while self.events:
            time, _, event, arguments = heapq.heappop(self.events)
            event(time, *arguments)
        if not all(rank.order.has_ended for rank in self.ranks):
            raise RuntimeError("the schedule waits for a message that is never sent")

    def _schedule(self, time: float, event: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self.events, (time, self._count, event, arguments))

    def _input(self, number: int, op: PipelineOp) -> Message | None:
        """The message that an operation of a rank needs."""
        virtual = self.layout.virtual_stage(number, op.chunk)
        boundary = virtual - 1 if op.is_forward else virtual
        return (op.is_forward, boundary, op.micro_batch) if self._is_message(op, boundary) else None

    def _is_message(self, op: PipelineOp, boundary: int) -> bool:
        """Whether a boundary's input or output of an operation is a message."""
        return 0 <= boundary < self.last and op.computation is not Pass.WEIGHT and self.layout.crosses(boundary)

    def _begin_op(self, time: float, number: int) -> None:
        """Begin the next operation of a free rank, if there is one with its input."""
        pipeline, rank = self.pipeline, self.ranks[number]
        late = rank.order.in_epilogue
        op = rank.order.choose(lambda op: (message := self._input(number, op)) is None or message in self.arrived)
        rank.is_waiting = op is None
        if op is None:
            return
        rank.clock = max(rank.clock, time)
        message = self._input(number, op)
        if message is not None:
            decode_s = self.arrived.pop(message)
            rank.clock += decode_s
            rank.coding += decode_s
        virtual = self.layout.virtual_stage(number, op.chunk)
        if op.is_forward:
            compute_s = pipeline.forward_s[virtual]
        elif op.is_backward:
            compute_s = pipeline.backward_s[virtual] - rank.order.separates(op) * pipeline.weight_s[virtual]
        else:
            compute_s = pipeline.weight_s[virtual]
        rank.passes.append(TimedPass(op, rank.clock, rank.clock + compute_s))
        rank.clock += compute_s
        rank.busy += compute_s
        boundary = virtual if op.is_forward else virtual - 1
        if self._is_message(op, boundary):
            # Nothing overlaps backward messages after the last forward.
            hop = pipeline.hops(op.is_forward, boundary, late and not op.is_forward)
            rank.clock += hop.encode_s
            rank.coding += hop.encode_s
            _, receiver = self.layout.ends_of(boundary, op.is_forward)
            self._schedule(rank.clock, self._send, number, receiver, (op.is_forward, boundary, op.micro_batch), hop)
        self._schedule(rank.clock, self._begin_op, number)

    def _send(self, time: float, sender: int, receiver: int, message: Message, hop: Hop) -> None:
        if hop.transfer_s == 0.0:
            self._schedule(time + hop.latency_s, self._arrive, receiver, message, hop)
            return
        flow = self.flows.setdefault((sender, receiver), _Flow(sender, receiver))
        flow.queue.append((message, hop))
        if len(flow.queue) == 1:
            flow.remaining_s, flow.since, flow.rate = hop.transfer_s, time, 0.0
            self.leaving[sender].append(flow)
            self.arriving[receiver].append(flow)
            self._update_rates(sender, receiver, time)

    def _update_rates(self, sender: int, receiver: int, time: float) -> None:
        """Recompute the rates of all flows at both ends of a link after a flow has started or ended."""
        flows = [*self.leaving[sender], *(flow for flow in self.arriving[receiver] if flow.sender != sender)]
        for flow in flows:
            flow.remaining_s -= (time - flow.since) * flow.rate
            flow.since = time
            flow.rate = 1.0 / max(len(self.leaving[flow.sender]), len(self.arriving[flow.receiver]))
            self._schedule_end(flow)

    def _schedule_end(self, flow: _Flow) -> None:
        flow.version += 1
        self._schedule(flow.since + max(flow.remaining_s, 0.0) / flow.rate, self._end_transfer, flow, flow.version)

    def _end_transfer(self, time: float, flow: _Flow, version: int) -> None:
        """Complete the first message of a flow, unless the rate has changed since the event was scheduled."""
        if version != flow.version:
            return
        message, hop = flow.queue.popleft()
        self._schedule(time + hop.latency_s, self._arrive, flow.receiver, message, hop)
        if flow.queue:
            flow.remaining_s, flow.since = flow.queue[0][1].transfer_s, time
            self._schedule_end(flow)
            return
        self.leaving[flow.sender].remove(flow)
        self.arriving[flow.receiver].remove(flow)
        self._update_rates(flow.sender, flow.receiver, time)

    def _arrive(self, time: float, number: int, message: Message, hop: Hop) -> None:
        self.arrived[message] = hop.decode_s
        if self.ranks[number].is_waiting:
            self._begin_op(time, number)
