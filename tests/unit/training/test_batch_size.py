"""Batch sizes that change during a run."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.config.batch_size import BatchSizeSchedule, read_steps


def test_a_constant_batch_size() -> None:
    schedule = BatchSizeSchedule(96, micro_batch_size=1, dp_size=6)
    assert (schedule.at(0), schedule.at(10**9), schedule.num_micro_batches(0)) == (96, 96, 16)
    assert schedule.iterations_for(300_000_000) == 3_125_000
    assert BatchSizeSchedule(1024, micro_batch_size=1, dp_size=4).iterations_for(300_000_000) == 292_968


def test_the_default_is_one_micro_batch_per_rank() -> None:
    assert BatchSizeSchedule(None, micro_batch_size=3, dp_size=4).at(0) == 12


def test_the_published_ramp_of_gpt3() -> None:
    schedule = BatchSizeSchedule(1536, micro_batch_size=1, dp_size=8, rampup=(16, 16, 5_859_375))
    assert [schedule.at(n) for n in (0, 61_677, 61_678, 5_859_374, 5_859_375)] == [16, 16, 32, 1520, 1536]
    assert schedule.num_micro_batches(61_678) == 4
    iterations = schedule.iterations_for(146_484_375)
    assert 146_484_375 - 1536 < schedule.samples_ahead(0, iterations) <= 146_484_375
    assert schedule.samples_ahead(0, 10**15) > 10**18


def _check_against_a_loop(
    schedule: BatchSizeSchedule, size_at: Callable[[int], int], start: int, iterations: int, train_samples: int
) -> None:
    """Compares the steps from sample ``start`` on, and the number of iterations for ``train_samples``."""
    consumed, micro_batches = start, 0
    for _ in range(iterations):
        assert schedule.at(consumed) == size_at(consumed)
        micro_batches += schedule.num_micro_batches(consumed)
        consumed += size_at(consumed)
    assert schedule.samples_ahead(start, iterations) == consumed - start
    assert (consumed - start) // schedule.samples_per_micro_batch == micro_batches
    consumed = count = 0
    while consumed + size_at(consumed) <= train_samples:
        consumed, count = consumed + size_at(consumed), count + 1
    assert schedule.iterations_for(train_samples) == count


ramps = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 12), st.integers(0, 400))


@given(ramps, st.integers(0, 500), st.integers(0, 200), st.integers(0, 1000))
def test_ramps_match_exact_arithmetic(
    ramp: tuple[int, int, int, int], start: int, iterations: int, train_samples: int
) -> None:
    smallest, increment, increments, samples = ramp
    largest = smallest + increment * increments
    rampup = (2 * smallest, 2 * increment, samples)
    schedule = BatchSizeSchedule(2 * largest, micro_batch_size=1, dp_size=2, rampup=rampup)

    def size_at(consumed: int) -> int:
        if consumed >= samples or not increments:
            return 2 * largest
        return 2 * (smallest + int(Fraction(consumed) / Fraction(samples, increments)) * increment)

    _check_against_a_loop(schedule, size_at, start, iterations, train_samples)


def test_an_increment_is_not_late_where_floats_round() -> None:
    schedule = BatchSizeSchedule(1 + 49, micro_batch_size=1, dp_size=1, rampup=(1, 1, 147))
    assert [schedule.at(3 * k) for k in range(50)] == list(range(1, 51))


@pytest.mark.parametrize(
    ("global_batch_size", "rampup", "message"),
    [
        (10, None, r"--global-batch-size 10 is not divisible by --micro-batch-size 2 x 2.*multiple of 4"),
        (0, None, "--global-batch-size 0"),
        (16, (6, 2, 100), r"--global-batch-size 6 \(reached by --rampup-batch-size\)"),
        (16, (4, 6, 100), r"--global-batch-size 10 \(reached by --rampup-batch-size\)"),
        (16, (4, 8, 100), "does not divide the range from 4 to --global-batch-size 16"),
        (16, (20, 4, 100), "above --global-batch-size 16"),
        (16, (4, 0, 100), "at least 1"),
        (16, (4, 4), "three values"),
    ],
)
def test_invalid_sizes_are_refused(global_batch_size: int, rampup: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        BatchSizeSchedule(global_batch_size, micro_batch_size=2, dp_size=2, rampup=rampup)
    assert "\n" not in str(error.value)


step_lists = st.dictionaries(st.integers(1, 60), st.integers(1, 12), max_size=6).map(
    lambda later: [(0, 3), *sorted(later.items())]
)


@example([(0, 3), (9, 5), (24, 2)], 0, 12, 33)
@given(step_lists, st.integers(0, 70), st.integers(0, 60), st.integers(0, 200))
def test_the_first_sample_of_a_step_decides_its_size(
    steps: list[tuple[int, int]], start: int, iterations: int, train_samples: int
) -> None:
    """Sizes may also fall."""
    schedule = BatchSizeSchedule(steps[-1][1], micro_batch_size=1, dp_size=1, steps=steps)

    def size_at(consumed: int) -> int:
        return [size for threshold, size in steps if consumed >= threshold][-1]

    _check_against_a_loop(schedule, size_at, start, iterations, train_samples)


def test_thresholds_are_tokens_in_any_order() -> None:
    text = "0:768 250B:1536 500B:3072 750B:6144"
    thresholds = [0, 250 * 10**9, 500 * 10**9, 750 * 10**9]
    expected = [(tokens // 4096, size) for tokens, size in zip(thresholds, (768, 1536, 3072, 6144), strict=True)]
    assert read_steps(text, 4096) == expected
    assert read_steps(",".join(reversed(text.split())), 4096) == expected
    assert read_steps("0:1k 1.5m:2K 2e3:8", 1) == [(0, 1000), (2000, 8), (1_500_000, 2000)]
    assert read_steps("0:2 33:4", 16) == [(0, 2), (2, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:2 x:4", "x:4 is not THRESHOLD:SIZE"),
        ("0:2 4", "4 is not THRESHOLD:SIZE"),
        ("0:2 1:2:3", "1:2:3 is not"),
        ("0:2 -5:4", "-5:4 is not"),
        ("0:2 5:0", "5:0 is not"),
        ("0:2 1.2345K:4", "is not THRESHOLD:SIZE"),
        ("0:2 nan:4", "nan:4 is not"),
        ("0:2 1e999:4", "1e999:4 is not"),
        ("100:2", "no size begins at 0; add one, such as 0:2"),
        ("", "no size begins at 0"),
        ("0:2 40:4 47:6", "two sizes begin at sample 2 of 16 tokens"),
    ],
)
def test_invalid_step_lists_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_steps(text, 16)
    assert str(error.value).startswith("--step-batch-size-schedule ")
    assert "\n" not in str(error.value)
