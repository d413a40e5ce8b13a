"""Ranks chosen from measured times of pipeline stages."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from megatron.compression.stage_times import StageTimes, ranks_to_try

TIMES = StageTimes(
    ranks=[2, 4, 8, 16],
    exact_s=[10.0, 10.0, 10.0],
    tried_s=[[2.0, 4.0, 8.0, 16.0]] * 3,
    ahead_s=[0.0, 3.0, 7.0],
)


@pytest.mark.parametrize(
    ("greatest", "tried"),
    [(2, [2]), (3, [2, 3]), (4, [2, 4]), (64, [2, 4, 8, 16, 32, 64]), (70, [2, 4, 8, 16, 32, 64, 70])],
)
def test_powers_of_two_and_the_greatest_rank_are_tried(greatest: int, tried: list[int]) -> None:
    assert ranks_to_try(greatest) == tried


def test_times_between_two_ranks_are_interpolated() -> None:
    assert [TIMES.seconds(0, rank) for rank in (1, 2, 3, 6, 12, 16, 20)] == [2, 2, 3, 6, 12, 16, 16]


def test_times_never_decrease_with_the_rank() -> None:
    noisy = StageTimes([2, 4, 8], [10.0], [[3.0, 2.5, 8.0]], [0.0])
    assert [noisy.seconds(0, rank) for rank in (2, 3, 4, 8)] == [3, 3, 3, 8]


def test_a_stage_has_the_time_of_the_first_stage_plus_its_head_start() -> None:
    """No rank where the exact sum fits, or where compression of the first stage gains nothing."""
    assert [TIMES.rank(stage, 4, (2, 16)) for stage in range(3)] == [4, 7, None]
    assert [TIMES.rank(stage, 6, (2, 16)) for stage in range(3)] == [6, 9, None]
    assert [TIMES.rank(stage, 2, (2, 16)) for stage in range(3)] == [2, 5, 9]
    assert [TIMES.rank(stage, 4, (2, 6)) for stage in range(3)] == [4, 6, None]
    assert [TIMES.rank(stage, 10, (2, 16)) for stage in range(3)] == [None, None, None]


def test_a_slow_stage_has_a_lower_rank_or_is_exact() -> None:
    slow = StageTimes([2, 4, 8], [10.0, 20.0], [[1.0, 2.0, 4.0], [3.0, 6.0, 12.0]], [0.0, 1.0])
    assert slow.rank(1, 4, (2, 8)) == 2
    assert slow.rank(1, 2, (2, 8)) == 2, "the least rank, even if it takes longer"
    dense = StageTimes([2, 4, 8], [10.0, 2.0], [[1.0, 2.0, 4.0], [3.0, 6.0, 12.0]], [0.0, 0.0])
    assert dense.rank(1, 2, (2, 8)) is None, "the exact sum is faster than the least rank"


def test_a_stage_is_as_slow_as_its_slowest_rank_and_as_early_as_its_last() -> None:
    rows = [[1, 5.0, 9.0, 3.0], [0, 0.5, 8.0, 2.0], [0, 1.0, 7.0, 4.0], [1, 4.0, 6.0, 5.0]]
    assert StageTimes.from_rows([4], rows) == StageTimes([4], [8.0, 9.0], [[4.0], [5.0]], [0.0, 3.5])
    late = [[0, 1.0, 8.0, 2.0], [1, 0.0, 9.0, 3.0]]
    assert StageTimes.from_rows([4], late).ahead_s == [0.0, 0.0]


def test_state_goes_through_json() -> None:
    assert StageTimes.from_state(json.loads(json.dumps(asdict(TIMES)))) == TIMES


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": [4, 2, 8, 16]},
        {"ranks": []},
        {"ranks": [0, 2, 4, 8]},
        {"exact_s": [1.0]},
        {"exact_s": [1.0, 2.0, math.nan]},
        {"ahead_s": [0.0, -1.0, 0.0]},
        {"tried_s": [[1.0]] * 3},
        {"tried_s": None},
    ],
)
def test_invalid_times_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        StageTimes.from_state({**asdict(TIMES), **changes})
