"""The list scheduler: valid schedules within the limit, never slower than the fixed ones by its own prediction."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.distributed.layout import Layout
from megatron.parallel.pipeline.bounds import list_bounds
from megatron.parallel.pipeline.list_schedule import AUTO, Candidate, MeasuredPipeline, rank_schedules
from megatron.parallel.pipeline.schedule import Pass, PipelineOp, ScheduleLimits, make_schedule
from megatron.parallel.pipeline.simulate import Hop, ListedOrder, Pipeline
from megatron.parallel.pipeline.timetable import build_timetable

SECONDS = st.floats(0.1, 3.0)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    stages = draw(st.integers(2, 5))
    forward_s, inputs_s, weight_s = (draw(st.lists(SECONDS, min_size=stages, max_size=stages)) for _ in range(3))
    hops = [Hop(*draw(st.tuples(*[st.floats(0.0, 2.0)] * 4))) for _ in range(2)]
    backward_s = [inputs + weights for inputs, weights in zip(inputs_s, weight_s, strict=True)]
    return Pipeline("1f1b", forward_s, backward_s, weight_s, stages, lambda forward, *_: hops[forward])


def _seconds(pipeline: Pipeline, schedules: list[list[PipelineOp]]) -> float:
    return max(times.end for times in pipeline.simulate_orders([ListedOrder(ops) for ops in schedules]))


@given(pipelines(), st.integers(1, 12), st.integers(0, 8))
def test_schedules_are_complete_within_the_limit_and_as_fast_as_predicted(
    pipeline: Pipeline, count: int, more: int
) -> None:
    limit = pipeline.stages + more
    pipeline = replace(pipeline, limits=ScheduleLimits(limit))
    for candidate in rank_schedules(pipeline, count):
        schedules = candidate.schedules(pipeline, count)
        build_timetable(Layout(tp=1, pp=pipeline.stages, dp=1), schedules)  # no deadlock
        for stage, ops in enumerate(schedules):
            assert max(Counter(ops).values()) == 1
            separate = {op.micro_batch for op in ops if op.computation is Pass.WEIGHT}
            assert separate in (set(), set(range(count)))
            in_flight = highest = 0
            last = Pass.WEIGHT if separate else Pass.BACKWARD
            for computation in Pass:
                numbers = [op.micro_batch for op in ops if op.computation is computation]
                assert numbers == (list(range(count)) if computation is not Pass.WEIGHT or separate else [])
            for op in ops:
                in_flight += op.is_forward
                highest = max(highest, in_flight)
                in_flight -= op.computation is last
            assert highest <= (candidate.limits[stage] if candidate.kind == AUTO else limit)
        assert _seconds(pipeline, schedules) == pytest.approx(candidate.seconds)


@given(pipelines(), st.integers(1, 12))
def test_the_choice_is_never_slower_than_a_fixed_schedule_that_fits(pipeline: Pipeline, count: int) -> None:
    stages = pipeline.stages
    chosen = MeasuredPipeline(pipeline).schedules(count)
    for kind in ("1f1b", "zb-h1", "eager-1f1b"):
        fixed = [make_schedule(kind, stages, stage, 1, count) for stage in range(stages)]
        assert _seconds(pipeline, chosen) <= _seconds(pipeline, fixed) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("transfer_s", "limit", "bound"), [(0.0, 4, 1.0), (0.3, 7, 0.9), (1.0, 7, 0.88), (1.5, 7, 0.93), (1.0, 8, 0.8)]
)
def test_gain_over_the_best_fixed_schedule_of_four_stages(transfer_s: float, limit: int, bound: float) -> None:
    """Where a micro-batch's forward, input gradients and weight gradients take a second each."""
    hop = Hop(0.0, transfer_s, 0.05)
    pipeline = Pipeline("1f1b", [1.0] * 4, [2.0] * 4, [1.0] * 4, 4, lambda *_: hop, ScheduleLimits(limit))
    best, *others = rank_schedules(pipeline, 8)
    fixed_s = min(candidate.seconds for candidate in (best, *others) if candidate.kind != AUTO)
    assert max(list_bounds(pipeline, 8)) <= best.seconds * (1 + 1e-9)
    assert best.seconds <= bound * fixed_s


def test_fixed_schedules_that_hold_more_than_the_limit_are_left_out() -> None:
    pipeline = Pipeline("1f1b", [1.0] * 4, [2.0] * 4, [1.0] * 4, 4, lambda *_: Hop())
    kinds = {}
    for limit in (8, 9):
        candidates = rank_schedules(replace(pipeline, limits=ScheduleLimits(limit)), 9)
        kinds[limit] = {candidate.kind for candidate in candidates} - {AUTO}
    small = {"1f1b", "zb-h1", "eager-1f1b"}
    assert kinds == {8: small, 9: {*small, "gpipe"}}


def test_a_long_step_is_compared_by_its_beginning() -> None:
    pipeline = Pipeline("1f1b", [1.0] * 4, [2.0] * 4, [1.0] * 4, 4, lambda *_: Hop(0.0, 0.5, 0.05))
    best, *_ = candidates = rank_schedules(pipeline, 300)
    assert [c.seconds for c in candidates] == [c.seconds * 300 / 256 for c in rank_schedules(pipeline, 256)]
    schedules = best.schedules(pipeline, 300)
    assert all(sum(op.is_backward for op in ops) == 300 for ops in schedules)
    assert _seconds(pipeline, schedules) == pytest.approx(best.seconds, rel=0.01)


def test_names() -> None:
    assert str(Candidate("zb-h1", (), 1.0)) == "zb-h1"
    assert str(Candidate(AUTO, (3, 2), 1.0)) == "a list with at most 3, 2 micro-batches in flight"
