"""Pipeline schedules, simulated with blocking receives and asynchronous sends."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.distributed.layout import Layout
from megatron.parallel.pipeline.list_schedule import AUTO, rank_schedules
from megatron.parallel.pipeline.messages import max_pending_sends
from megatron.parallel.pipeline.schedule import (
    NO_LIMITS,
    SCHEDULES,
    WITH_WEIGHT_PASSES,
    Pass,
    PipelineOp,
    ScheduleLimits,
    make_forward_schedule,
    make_schedule,
)
from megatron.parallel.pipeline.simulate import Hop, Pipeline
from megatron.parallel.pipeline.timetable import MAX_POSTED_AHEAD, Route

Message = tuple[bool, int, int]
"""(forward, boundary, micro-batch)"""


@dataclass(frozen=True)
class Case:
    """A pipeline; ``kind`` "eval" is the forward-only schedule (also "in V form"), "list" a list for random times drawn
    with ``seed``."""

    kind: str
    pp: int
    chunks: int
    count: int
    seed: int = 0
    limits: ScheduleLimits = NO_LIMITS

    def schedules(self) -> list[list[PipelineOp]]:
        if self.kind == "list":
            return [list(ops) for ops in random_list(self.pp, self.count, self.seed, self.limits.weight_records)]
        if self.kind.startswith("eval"):
            return [make_forward_schedule(self.chunks, self.pp, self.count) for _ in range(self.pp)]
        shape = self.chunks, self.count, self.limits
        return [make_schedule(self.kind, self.pp, s, *shape) for s in range(self.pp)]

    @cached_property
    def layout(self) -> Layout:
        return Layout(pp=self.pp, chunks=self.chunks, v_shaped=self.kind == "zb-v" or self.kind.endswith("in V form"))

    def incoming(self, stage: int, op: PipelineOp) -> Message | None:
        virtual = self.layout.virtual_stage(stage, op.chunk)
        return self._message(op, virtual - 1 if op.is_forward else virtual)

    def outgoing(self, stage: int, op: PipelineOp) -> Message | None:
        virtual = self.layout.virtual_stage(stage, op.chunk)
        return self._message(op, virtual if op.is_forward else virtual - 1)

    def _message(self, op: PipelineOp, boundary: int) -> Message | None:
        if not 0 <= boundary < self.pp * self.chunks - 1 or op.computation is Pass.WEIGHT:
            return None
        message = op.is_forward, boundary, op.micro_batch
        sender, receiver = self.ends(message)
        return message if sender != receiver else None

    def ends(self, message: Message) -> tuple[int, int]:
        """Sender and receiver."""
        forward, boundary, _ = message
        return self.layout.ends_of(boundary, forward)

    def route(self, message: Message) -> Route:
        """Route of a message at its receiver."""
        return message[0], self.ends(message)[0]


@cache
def random_list(pp: int, count: int, seed: int, max_records: int | None = None) -> list[list[PipelineOp]]:
    """Operations of every stage by the list scheduler, for random times of passes and messages and a random limit."""
    draw = random.Random(seed).uniform
    passes_s = [[draw(0.1, 3.0) for _ in range(pp)] for _ in range(3)]
    joint_s = [inputs + weights for inputs, weights in zip(*passes_s[1:], strict=True)]
    hops = [Hop(*(draw(0.0, 2.0) for _ in range(4))) for _ in range(2)]
    limits = ScheduleLimits(3 * pp, max_records)
    pipeline = Pipeline("1f1b", passes_s[0], joint_s, passes_s[2], pp, lambda forward, *_: hops[forward], limits)
    lists = [candidate for candidate in rank_schedules(pipeline, count) if candidate.kind == AUTO]
    return lists[seed % len(lists)].schedules(pipeline, count)


@st.composite
def cases(draw: st.DrawFn, *kinds: str) -> Case:
    kind = draw(st.sampled_from(kinds or (*SCHEDULES, "interleaved", "eval", "eval in V form", "list")))
    max_records = draw(st.none() | st.integers(1, 8)) if kind in (*WITH_WEIGHT_PASSES, "list") else None
    if kind in ("zb-v", "eval in V form"):
        limits = ScheduleLimits(weight_records=max_records)
        return Case(kind, draw(st.integers(2, 6)), 2, draw(st.integers(1, 20)), limits=limits)
    if kind == "interleaved":
        pp = draw(st.integers(2, 6))
        return Case("1f1b", pp, draw(st.integers(2, 4)), pp * draw(st.integers(1, 4)))
    pp = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 4)) if kind == "eval" and pp > 1 else 1
    seed = draw(st.integers(0, 9)) if kind == "list" else 0
    max_in_flight = draw(st.none() | st.integers(pp, 5 * pp)) if kind == "eager-1f1b" else None
    return Case(kind, pp, chunks, draw(st.integers(1, 20)), seed, ScheduleLimits(max_in_flight, max_records))


class Wires:
    """Point-to-point messages; a queue between two ranks executes its messages in the order issued.

    Args:
        case: the pipeline.
        queue: returns the queue of a message. A queue for each message models tags, as in gloo.
    """

    def __init__(self, case: Case, queue: Callable[[Message], Hashable]) -> None:
        self.case = case
        self.queue = queue
        self.issued: dict[tuple[Hashable, frozenset[int]], dict[int, deque[tuple[str, Message]]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        self.arrived: set[Message] = set()
        self.sent: list[list[Message]] = [[] for _ in range(case.pp)]

    def issue(self, rank: int, operation: str, message: Message) -> None:
        ends = self.case.ends(message)
        assert rank == ends[operation == "recv"]
        queues = self.issued[self.queue(message), frozenset(ends)]
        queues[rank].append((operation, message))
        a, b = ends
        while queues[a] and queues[b] and queues[a][0][1] == queues[b][0][1]:
            self.arrived.add(queues[a].popleft()[1])
            queues[b].popleft()
        if operation == "send":
            self.sent[rank].append(message)

    def leaving(self, rank: int, forward: bool) -> int:
        """Number of sent messages of a direction that have not arrived."""
        return sum(m[0] == forward and m not in self.arrived for m in self.sent[rank])


def rank_program(case: Case, stage: int, wires: Wires, ahead: int, keep: int | None) -> Iterator[Callable[[], bool]]:
    """Operations of a rank with ``ahead`` posted receives per direction; yields conditions to wait for."""
    ops = case.schedules()[stage]
    incoming: dict[bool, deque[Message]] = {True: deque(), False: deque()}
    for op in ops:
        message = case.incoming(stage, op)
        if message is not None:
            incoming[op.is_forward].append(message)
    posted = {True: 0, False: 0}
    for op in ops:
        for forward, messages in incoming.items():
            while messages and posted[forward] < ahead:
                wires.issue(stage, "recv", messages.popleft())
                posted[forward] += 1
        needed = case.incoming(stage, op)
        if needed is not None:
            yield lambda m=needed: m in wires.arrived  # type: ignore[misc]
            posted[op.is_forward] -= 1
        result = case.outgoing(stage, op)
        if result is not None:
            wires.issue(stage, "send", result)
            if keep is not None:
                yield lambda f=op.is_forward: wires.leaving(stage, f) <= keep  # type: ignore[misc]


def finishes(
    case: Case, queue: Callable[[Message], Hashable], ahead: int = MAX_POSTED_AHEAD, keep: int | None = None
) -> bool:
    """Whether all ranks finish."""
    wires = Wires(case, queue)
    programs = {s: rank_program(case, s, wires, ahead, keep) for s in range(case.pp)}
    blocked: dict[int, Callable[[], bool]] = {}
    progress = True
    while programs and progress:
        progress = False
        for stage in list(programs):
            if stage in blocked and not blocked[stage]():
                continue
            progress = True
            following = next(programs[stage], None)
            if following is None:
                del programs[stage]
                blocked.pop(stage, None)
            else:
                blocked[stage] = following
    return not programs


def _tagged(message: Message) -> Hashable:
    return message


@given(cases())
def test_every_pass_of_a_micro_batch_runs_once_and_in_order(case: Case) -> None:
    for stage, schedule in enumerate(case.schedules()):
        passes = [Pass.FORWARD] if case.kind.startswith("eval") else [Pass.FORWARD, Pass.BACKWARD]
        separates = (case.kind in ("zb-h1", "list") and stage > 0) or case.kind == "zb-v"
        passes += [Pass.WEIGHT] if separates else []
        order = [(op.chunk, op.micro_batch, op.computation) for op in schedule]
        assert Counter(order) == Counter(product(range(case.chunks), range(case.count), passes))
        for chunk, micro_batch, _ in order:
            assert [p for c, m, p in order if (c, m) == (chunk, micro_batch)] == passes


@given(cases(), st.integers(1, 4))
def test_bounded_messages_in_flight_do_not_deadlock(case: Case, ahead: int) -> None:
    """A sender of eager 1F1B runs ahead by at most a share of the micro-batches in flight."""
    shares = math.ceil(((case.limits.in_flight or 1) - 1) / max(case.pp - 1, 1))
    assert finishes(case, _tagged, ahead, max(max_pending_sends(case.layout), shares + 1))


@given(cases())
def test_ordered_messages_of_a_pair_do_not_deadlock(case: Case) -> None:
    """NCCL's rule, with a process group for each direction and each way around the ring."""

    def queue(message: Message) -> Hashable:
        sender, receiver = case.ends(message)
        return message[0], sender < receiver

    assert finishes(case, queue)


def test_a_single_queue_for_both_ways_would_deadlock() -> None:
    """Between two stages with virtual stages, activations travel both ways."""
    assert not finishes(Case("1f1b", 2, 2, 4), lambda message: message[0])


@given(cases())
def test_both_ends_of_a_link_agree_on_the_order(case: Case) -> None:
    sent: dict[tuple[bool, int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[bool, int, int], list[Message]] = defaultdict(list)
    for stage, schedule in enumerate(case.schedules()):
        for op in schedule:
            out, needed = case.outgoing(stage, op), case.incoming(stage, op)
            if out is not None:
                sent[(op.is_forward, *case.ends(out))].append(out)
            if needed is not None:
                received[(op.is_forward, *case.ends(needed))].append(needed)
    assert sent == received


def _most_activations(schedule: list[PipelineOp]) -> int:
    """Maximum number of micro-batches between their forward and their last pass, summed over chunks."""
    last = schedule[-1].computation
    count = most = 0
    for op in schedule:
        count += op.is_forward
        most = max(most, count)
        count -= op.computation is last
    return most


@given(cases("1f1b", "eager-1f1b", "zb-h1", "zb-v", "interleaved"))
def test_activations_in_flight_are_bounded(case: Case) -> None:
    for stage, schedule in enumerate(case.schedules()):
        if case.kind == "eager-1f1b" and case.limits.in_flight is None:
            assert _most_activations(schedule) == min(case.count, 2 * (case.pp - stage) - 1)
        elif case.limits.in_flight is not None:
            last = case.pp - 1
            share = 1 + (case.limits.in_flight - 1) * (last - stage) / max(last, 1)
            assert share <= _most_activations(schedule) < share + 1 or _most_activations(schedule) == case.count < share
        elif case.kind == "zb-h1":
            delay = min(stage, (case.limits.weight_records or case.pp) - 1)
            assert _most_activations(schedule) == min(case.count, case.pp - stage + delay)
        elif case.kind == "zb-v":
            assert _most_activations(schedule) <= 2 * min(case.count, case.pp)
        elif case.chunks == 1:
            assert _most_activations(schedule) == min(case.count, case.pp - stage)
        else:
            warm_up = 2 * (case.pp - stage - 1) + (case.chunks - 1) * case.pp
            assert _most_activations(schedule) == min(case.count * case.chunks, warm_up + 1)


@given(cases("zb-h1", "zb-v", "list"))
@example(Case("zb-h1", 4, 1, 12, limits=ScheduleLimits(weight_records=2)))
@example(Case("zb-v", 4, 2, 12, limits=ScheduleLimits(weight_records=2)))
@example(Case("list", 4, 1, 12, limits=ScheduleLimits(weight_records=2)))
def test_weight_gradients_that_wait_are_bounded(case: Case) -> None:
    """With a limit of one, each weight pass follows its backward pass before the next."""
    for schedule in case.schedules():
        records = most = 0
        for op in schedule:
            records += op.is_backward - (op.computation is Pass.WEIGHT)
            most = max(most, records)
        assert not records or all(op.computation is not Pass.WEIGHT for op in schedule)
        if case.limits.weight_records is not None and not records:
            assert most <= case.limits.weight_records


def _duration(case: Case, forward: int, backward: int, message: float = 0, weight: int = 0) -> float:
    """Time until the last rank finishes, with messages that take a fixed time and do not queue; ``weight``: of the
    weights' gradients, in a weight pass or after the other part of the backward."""
    ready: dict[Message, float] = {}
    clock = [0.0] * case.pp
    queues = [deque(schedule) for schedule in case.schedules()]
    separate = [any(op.computation is Pass.WEIGHT for op in queue) for queue in queues]
    while any(queues):
        before = sum(map(len, queues))
        for stage, queue in enumerate(queues):
            while queue:
                needed = case.incoming(stage, queue[0])
                if needed is not None and needed not in ready:
                    break
                op = queue.popleft()
                start = max(clock[stage], ready[needed] if needed is not None else 0)
                seconds = {Pass.FORWARD: forward, Pass.BACKWARD: backward, Pass.WEIGHT: weight}[op.computation]
                clock[stage] = start + seconds + (weight if op.is_backward and not separate[stage] else 0)
                out = case.outgoing(stage, op)
                if out is not None:
                    ready[out] = clock[stage] + message
        assert sum(map(len, queues)) < before, "deadlock"
    return max(clock)


@given(cases("1f1b", "eager-1f1b", "gpipe", "interleaved"), st.integers(1, 3), st.integers(1, 3))
def test_the_bubble_has_the_published_size(case: Case, forward: int, backward: int) -> None:
    """(p - 1) (f + b) of idle time, with f and b of a chunk (Narayanan et al. 2021, section 2.2)."""
    work = case.count * case.chunks * (forward + backward)
    assert _duration(case, forward, backward) == work + (case.pp - 1) * (forward + backward)


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20))
def test_twice_the_warm_up_hides_messages(pp: int, forward: int, backward: int, count: int) -> None:
    """Messages no longer than either pass of a micro-batch cost time only in warm-up and cool-down."""
    message = min(forward, backward)
    hidden = count * (forward + backward) + (pp - 1) * (forward + backward + 2 * message)
    assert _duration(Case("eager-1f1b", pp, 1, count), forward, backward, message) == hidden
    if count > 2 * pp:
        assert _duration(Case("1f1b", pp, 1, count), forward, backward, message) > hidden


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
def test_more_in_flight_hide_longer_messages(pp: int, forward: int, backward: int, more: int, count: int) -> None:
    """Two messages as long as ``more`` micro-batches cost time only in warm-up and cool-down."""
    message = more * (forward + backward) / 2
    case = Case("eager-1f1b", pp, 1, count, limits=ScheduleLimits(1 + (1 + more) * (pp - 1)))
    hidden = count * (forward + backward) + (pp - 1) * (forward + backward + 2 * message)
    assert _duration(case, forward, backward, message) == pytest.approx(hidden)
    if count > (2 + more) * pp:
        fewer = replace(case, limits=ScheduleLimits(1 + more * (pp - 1)))
        assert _duration(fewer, forward, backward, message) > hidden


def test_combinations_without_a_schedule_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 2"):
        make_schedule("1f1b", 2, 0, 2, 3)
    with pytest.raises(ValueError, match="gpipe"):
        make_schedule("gpipe", 2, 0, 2, 4)
    with pytest.raises(ValueError, match="eager-1f1b"):
        make_schedule("eager-1f1b", 2, 0, 2, 4)
    with pytest.raises(ValueError, match="two virtual stages"):
        make_schedule("zb-v", 2, 0, 1, 4)
    with pytest.raises(ValueError, match=r"'zb'.*1f1b, eager-1f1b, zb-h1, zb-v, gpipe"):
        make_schedule("zb", 2, 0, 1, 4)


@given(cases("zb-h1"), st.integers(1, 3))
def test_the_zero_bubble_schedule_has_the_published_bubble(case: Case, seconds: int) -> None:
    """(p - 1) (f + b - w) of idle time for f = b = w (Qi et al. 2024, table 2), with at least p micro-batches."""
    case = replace(case, count=case.count + case.pp, limits=NO_LIMITS)
    assert _duration(case, seconds, seconds, weight=seconds) == (case.count * 3 + case.pp - 1) * seconds


@given(cases("zb-v"), st.integers(1, 3))
def test_in_v_form_the_zero_bubble_is_half_as_long(case: Case, seconds: int) -> None:
    """(p - 1) f of idle time for f = b = w of a chunk, half of a stage's: the last rank begins that late."""
    case = replace(case, count=case.count + 2 * case.pp, limits=NO_LIMITS)
    assert _duration(case, seconds, seconds, weight=seconds) == (6 * case.count + case.pp - 1) * seconds


@given(cases("zb-v"))
def test_in_v_form_messages_do_not_slow_the_pace(case: Case) -> None:
    """Messages as long as a pass cost time at the ends of a step, but not for each further micro-batch."""
    short, long = (replace(case, count=count * case.pp, limits=NO_LIMITS) for count in (3, 6))
    for message in (1, 2, 4):
        durations = [_duration(each, 4, 4, message, weight=4) for each in (short, long)]
        assert durations[1] - durations[0] == 6 * 4 * (long.count - short.count)


def test_a_single_rank_has_no_v_form() -> None:
    assert make_schedule("zb-v", 1, 0, 1, 3) == make_schedule("1f1b", 1, 0, 1, 3)
