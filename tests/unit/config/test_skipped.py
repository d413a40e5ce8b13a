"""Ranges of iterations without a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.lengths import LengthSchedule
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes


def test_words_are_merged_into_ranges() -> None:
    assert SkippedIterations.parse(["9", "3-5", "6", "4", "20-21"]).ranges == ((3, 6), (9, 9), (20, 21))


@given(st.sets(st.integers(1, 30)), st.integers(0, 30), st.integers(0, 40))
def test_coming_steps_match_a_reference_loop(skipped: set[int], start: int, iterations: int) -> None:
    ranges = SkippedIterations.parse([str(number) for number in skipped])
    assert {number for number in range(1, 40) if number in ranges} == skipped
    batches = BatchSizeSchedule(4, micro_batch_size=1, dp_size=1, rampup=(2, 1, 11))
    sizes = StepSizes(batches, LengthSchedule.constant(8), ranges)
    consumed = batches.samples_ahead(0, start)
    steps = sum(stretch.iterations for stretch in sizes.ahead(start, consumed, iterations) if stretch.updates)
    samples = sum(stretch.samples for stretch in sizes.ahead(start, consumed, iterations))
    assert steps == sum(number not in skipped for number in range(start + 1, start + iterations + 1))
    assert samples == batches.samples_ahead(consumed, iterations)
    position, tokens = consumed, 0
    for number in range(start + 1, start + iterations + 1):
        tokens += 0 if number in skipped else batches.at(position) * 8
        position += batches.at(position)
    assert sizes.tokens_ahead(start, consumed, iterations) == tokens
