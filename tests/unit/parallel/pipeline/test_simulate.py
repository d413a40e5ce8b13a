"""Simulated pipelines."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.parallel.pipeline.bounds import list_bounds
from megatron.parallel.pipeline.schedule import SCHEDULES, Pass, ScheduleLimits, add_weight_passes, make_schedule
from megatron.parallel.pipeline.simulate import Hop, Pipeline

FREE = Hop()
KINDS = ("1f1b", "eager-1f1b", "gpipe")


def _pipeline(kind: str, stages: int, chunks: int, forward: float, backward: float, hop: Hop) -> Pipeline:
    virtual = stages * chunks
    return Pipeline(kind, [forward] * virtual, [backward] * virtual, [0.0] * virtual, stages, lambda *_: hop)


@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 40), st.floats(0.1, 3), st.floats(0.1, 3))
def test_the_bubble_without_messages_matches_the_formula(
    kind: str, stages: int, count: int, forward: float, backward: float
) -> None:
    times = _pipeline(kind, stages, 1, forward, backward, FREE).run(count)
    assert max(time.end for time in times) == pytest.approx((count + stages - 1) * (forward + backward))
    assert all(time.busy == pytest.approx(count * (forward + backward)) for time in times)


@given(
    st.sampled_from(("1f1b", "eager-1f1b")), st.integers(1, 6), st.integers(0, 20), st.floats(0.1, 3), st.floats(0.1, 3)
)
def test_a_full_pipeline_has_no_bubble(kind: str, stages: int, more: int, forward: float, backward: float) -> None:
    """With a micro-batch of each step in each of its stages but one."""
    count = max(stages - 1, 1) + more
    times = _pipeline(kind, stages, 1, forward, backward, FREE).run_without_flush(count)
    for time in times:
        assert time.end == pytest.approx(count * (forward + backward))
        assert time.busy == pytest.approx(count * (forward + backward))


def test_steps_of_too_few_micro_batches_leave_a_bubble_without_a_flush() -> None:
    """No more than one micro-batch besides those of a step is in flight."""
    times = _pipeline("1f1b", 3, 1, 1.0, 1.0, FREE).run_without_flush(1)
    assert [time.end for time in times] == pytest.approx([4.0] * 3)


@pytest.mark.parametrize(
    ("kind", "limit", "count", "in_flight"),
    [("1f1b", None, 8, 4), ("eager-1f1b", None, 8, 7), ("eager-1f1b", 10, 16, 10), ("eager-1f1b", 10, 6, 7)],
)
@pytest.mark.parametrize("weight", [0.0, 0.75])
def test_micro_batches_in_flight_hide_messages_in_a_full_pipeline(
    kind: str, limit: int | None, count: int, in_flight: int, weight: float
) -> None:
    """The first stage waits for a micro-batch's way to the last stage and back, while others are in flight, and at most
    one more than a step has. Only the first stage's weight gradients are part of it."""
    pipeline = _pipeline(kind, 4, 1, 1.0, 2.0, Hop(latency_s=4.0))
    pipeline = replace(pipeline, limits=ScheduleLimits(limit), weight_s=[weight] * 4)
    round_trip = 4 * (1.0 + 2.0) - 3 * weight + 6 * 4.0
    times = pipeline.run_without_flush(count)
    assert times[0].end == pytest.approx(count * round_trip / in_flight, rel=0.03)
    assert [time.busy for time in times] == pytest.approx([count * 3.0] * 4)


def test_a_long_step_without_a_flush_is_extrapolated() -> None:
    times = _pipeline("eager-1f1b", 4, 1, 1.0, 2.0, Hop(latency_s=4.0)).run_without_flush(3000)
    assert times[0].end == pytest.approx(3000 * 36.0 / 7, rel=0.03)


@given(st.integers(1, 6), st.integers(0, 30), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.0, 1.0))
def test_weight_passes_fill_the_bubble(stages: int, more: int, forward: float, inputs: float, share: float) -> None:
    """All but (p - 1) (f + b - w) of idle time (Qi et al. 2024, table 2)."""
    count, weight = stages + more, share * min(forward, inputs)
    backward_s, weight_s = [inputs + weight] * stages, [weight] * stages
    times = Pipeline("zb-h1", [forward] * stages, backward_s, weight_s, stages, lambda *_: FREE).run(count)
    bubble = (stages - 1) * (forward + inputs - weight)
    assert max(time.end for time in times) == pytest.approx(count * (forward + inputs + weight) + bubble)
    assert all(time.busy == pytest.approx(count * (forward + inputs + weight)) for time in times)


@given(st.integers(2, 4), st.integers(2, 4), st.integers(1, 12), st.floats(0.1, 3), st.floats(0.1, 3))
def test_interleaving_divides_the_bubble(stages: int, chunks: int, groups: int, f: float, b: float) -> None:
    count = groups * stages
    times = _pipeline("1f1b", stages, chunks, f, b, FREE).run(count)
    assert max(time.end for time in times) == pytest.approx((count * chunks + stages - 1) * (f + b))


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.sampled_from(("1f1b", "eager-1f1b", "zb-h1", "zb-v")),
    st.integers(2, 4),
    st.integers(1025, 2600),
    st.lists(st.floats(0.5, 2.0), min_size=16, max_size=16),
    st.builds(Hop, st.floats(0, 0.3), st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 0.3)),
)
@example("eager-1f1b", 2, 1600, [0.6875, 0.765625, *[1.0] * 6, 1.75, 1.5625, *[1.0] * 6], FREE)
@example("1f1b", 2, 2600, [1.0, 0.995, *[1.0] * 14], FREE)
def test_shortened_simulations_match_full_ones(
    kind: str, stages: int, operations: int, seconds: list[float], hop: Hop
) -> None:
    """Also for ranks of nearly the same speed, which reach a steady state late."""
    chunks = 2 if kind == "zb-v" else 1
    backward_s = seconds[8 : 8 + chunks * stages]
    weight_s = [0.4 * s for s in backward_s]
    pipeline = Pipeline(kind, seconds[: chunks * stages], backward_s, weight_s, stages, lambda *_: hop)
    count = operations // (chunks * stages) + 1
    with mock.patch.object(Pipeline, "_extrapolate", autospec=True, side_effect=Pipeline._extrapolate) as extrapolate:
        times = pipeline.run(count)
    assert extrapolate.called
    for short, long in zip(times, pipeline.simulate_in_full(count), strict=True):
        assert short.end == pytest.approx(long.end, rel=0.01)
        assert short.busy == pytest.approx(long.busy)


@settings(deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(2, 4),
    st.integers(1, 60),
    st.lists(st.floats(0.5, 2.0), min_size=16, max_size=16),
    st.builds(Hop, st.floats(0, 0.3), st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 0.3)),
)
def test_no_step_is_shorter_than_its_bound(kind: str, stages: int, count: int, seconds: list[float], hop: Hop) -> None:
    chunks = 2 if kind == "zb-v" else 1
    backward_s = seconds[8 : 8 + chunks * stages]
    weight_s = [0.4 * s for s in backward_s]
    pipeline = Pipeline(kind, seconds[: chunks * stages], backward_s, weight_s, stages, lambda *_: hop)
    assert max(list_bounds(pipeline, count)) <= max(time.end for time in pipeline.run(count)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("hop", "bound_s"),
    [
        (FREE, 10 * 3.0 + 1.0),  # of the last stage, after the first forward of the other
        (Hop(encode_s=2.0), 10 * (3.0 + 2.0) + 1.0 + 2.0),
        (Hop(decode_s=2.0), 10 * (3.0 + 2.0) + 1.0),
        (Hop(transfer_s=9.0), 10 * 9.0 + 1.0 + 9.0),
    ],
)
def test_bounds_count_coding_and_transfers(hop: Hop, bound_s: float) -> None:
    pipeline = Pipeline("zb-h1", [1.0] * 2, [2.0] * 2, [1.0] * 2, 2, lambda *_: hop)
    assert max(list_bounds(pipeline, 10)) == pytest.approx(bound_s)


def test_a_slow_link_is_shared_by_both_directions() -> None:
    """The middle of three stages sends activations and gradients through the same interface."""
    hop = Hop(transfer_s=1.0)
    times = _pipeline("eager-1f1b", 3, 1, 1e-3, 1e-3, hop).run(50)
    assert max(time.end for time in times) == pytest.approx(2 * 50, rel=0.1)


def test_coding_keeps_ranks_busy() -> None:
    times = _pipeline("1f1b", 2, 1, 1.0, 1.0, Hop(encode_s=0.5, decode_s=0.25)).run(4)
    # The first stage encodes four activations and decodes four gradients; the last stage vice versa.
    assert [time.coding for time in times] == pytest.approx([4 * 0.5 + 4 * 0.25, 4 * 0.5 + 4 * 0.25])


def _simulate_by_rounds(pipeline: Pipeline, count: int, hop: Hop) -> list[list[tuple[float, float]]]:
    """Start and end of each pass by a plain loop: a rank runs its next pass as soon as its message has arrived."""
    ranks, chunks, last = range(pipeline.stages), pipeline.chunks, len(pipeline.forward_s) - 1
    schedules = [make_schedule(pipeline.kind, pipeline.stages, rank, chunks, count) for rank in ranks]

    def number(rank: int, chunk: int) -> int:
        """Virtual stage of a chunk; in V form, the second chunks' run back."""
        return 2 * pipeline.stages - 1 - rank if pipeline.kind == "zb-v" and chunk else chunk * pipeline.stages + rank

    sent: dict[tuple[Pass, int, int], float] = {}
    clocks = [0.0 for _ in ranks]
    times: list[list[tuple[float, float]]] = [[] for _ in ranks]
    while any(len(row) < len(ops) for row, ops in zip(times, schedules, strict=True)):
        for rank, ops in enumerate(schedules):
            if len(times[rank]) == len(ops):
                continue
            op = ops[len(times[rank])]
            virtual, step = number(rank, op.chunk), 1 if op.computation is Pass.FORWARD else -1
            source = (op.computation, virtual - step, op.micro_batch)
            here = [number(rank, chunk) for chunk in range(chunks)]
            receives = op.computation is not Pass.WEIGHT and 0 <= virtual - step <= last and virtual - step not in here
            if receives and source not in sent:
                continue
            start = max(clocks[rank], sent[source] + hop.latency_s) + hop.decode_s if receives else clocks[rank]
            seconds = {
                Pass.FORWARD: pipeline.forward_s,
                Pass.BACKWARD: pipeline.backward_s,
                Pass.WEIGHT: pipeline.weight_s,
            }
            end = start + seconds[op.computation][virtual]
            if op.computation is Pass.BACKWARD and any(o.computation is Pass.WEIGHT for o in ops):
                end -= pipeline.weight_s[virtual]
            sends = op.computation is not Pass.WEIGHT and 0 <= virtual + step <= last and virtual + step not in here
            clocks[rank] = end + sends * hop.encode_s
            sent[op.computation, virtual, op.micro_batch] = clocks[rank]
            times[rank].append((start, end))
    return times


@settings(deadline=None)
@given(
    st.sampled_from((*((kind, 1) for kind in (*KINDS, "zb-h1")), ("1f1b", 2), ("1f1b", 3), ("zb-v", 2))),
    st.integers(2, 4),
    st.integers(1, 4),
    st.lists(st.floats(0.5, 2.0), min_size=24, max_size=24),
    st.builds(Hop, st.floats(0, 0.3), st.just(0.0), st.floats(0, 0.4), st.floats(0, 0.3)),
)
@example(("zb-v", 2), 3, 2, [1.0] * 24, Hop(0.2, 0.0, 0.3, 0.1))
def test_every_pass_runs_once_at_the_time_of_a_plain_loop(
    schedule: tuple[str, int], stages: int, groups: int, seconds: list[float], hop: Hop
) -> None:
    (kind, chunks), count = schedule, groups * stages
    virtual = stages * chunks
    forward_s, backward_s = seconds[:virtual], seconds[12 : 12 + virtual]
    pipeline = Pipeline(kind, forward_s, backward_s, [0.4 * s for s in backward_s], stages, lambda *_: hop)
    rows = [times.passes for times in pipeline.simulate_in_full(count)]
    for rank, (row, expected) in enumerate(zip(rows, _simulate_by_rounds(pipeline, count, hop), strict=True)):
        weights = (kind == "zb-h1" and rank > 0) or kind == "zb-v"
        passes = {(timed.op.computation, timed.op.chunk, timed.op.micro_batch) for timed in row}
        assert len(row) == len(passes) == count * chunks * (3 if weights else 2)
        assert passes == {
            (computation, chunk, micro_batch)
            for computation in Pass
            if weights or computation is not Pass.WEIGHT
            for chunk in range(chunks)
            for micro_batch in range(count)
        }
        assert [timed.start_s for timed in row] == pytest.approx([start for start, _ in expected])
        assert [timed.end_s for timed in row] == pytest.approx([end for _, end in expected])
        assert all(before.end_s <= after.start_s for before, after in pairwise(row))
    ends = [time.busy for time in pipeline.run(count)]
    assert [sum(timed.seconds for timed in row) for row in rows] == pytest.approx(ends)


@pytest.mark.parametrize("weight_s", [0.5, 0.0])
def test_steps_without_a_flush_are_simulated_in_full_with_their_weight_passes(weight_s: float) -> None:
    """A weight pass right after each backward pass, except on the first stage; none if they take no time."""
    pipeline = Pipeline("1f1b", [1.0] * 3, [2.0] * 3, [weight_s] * 3, 3, lambda *_: Hop(0.0, 0.1))
    for rank, (times, joint) in enumerate(
        zip(pipeline.simulate_in_full(4, flush=False), pipeline.simulate_in_full(4), strict=True)
    ):
        ops = [timed.op for timed in times.passes]
        expected = [timed.op for timed in joint.passes]
        assert ops == (add_weight_passes(expected, rank) if weight_s else expected)
        assert (len(ops) == 12) == (weight_s > 0 and rank > 0)
        assert times.busy == pytest.approx(joint.busy)


def test_late_messages_are_marked() -> None:
    hops_seen: set[tuple[bool, int, bool]] = set()

    def hops(forward: bool, boundary: int, late: bool) -> Hop:
        hops_seen.add((forward, boundary, late))
        return FREE

    Pipeline("1f1b", [1.0] * 3, [1.0] * 3, [0.0] * 3, 3, hops).run(6)
    assert hops_seen == {(True, 0, False), (True, 1, False), (False, 0, False), (False, 0, True), (False, 1, False),
                    (False, 1, True)}  # fmt: skip
