"""Decisions about members and means of a round."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.diloco.membership import JoinReply
from megatron.diloco.round_decision import (
    OUTLIER_RATIO,
    Decision,
    RoundOutcome,
    RoundReport,
    Vote,
    check_mean,
    select_members,
)
from megatron.optimizer.step_summary import ExitReason
from tests.unit.diloco.support import GOOD


def _reports(*norms: float) -> dict[int, RoundReport]:
    return {island: RoundReport(norm, float(island)) for island, norm in enumerate(norms)}


def test_non_finite_and_outlying_differences_are_left_out() -> None:
    decision = select_members(_reports(1.0, math.nan, 2.0, OUTLIER_RATIO * 3))
    assert decision.members == (0, 2)
    assert set(decision.left_out) == {1, 3}
    assert decision.mean_loss == 1.0
    assert decision.stop == 0
    stopping = select_members({0: RoundReport(1.0, 2.0), 1: RoundReport(math.nan, 2.0, stop=3)})
    assert Decision.decode(stopping.encode()).stop == 3
    assert str(Decision.decode(decision.encode())) == str(decision)
    with pytest.raises(ValueError, match="no island has a finite difference"):
        select_members(_reports(math.inf))
    assert select_members(_reports(0.0, 5.0, 0.0)).members == (0, 1, 2)
    assert select_members(_reports(1e-9, 5.0)).members == (0, 1)  # of two, either may be the outlier
    # More than 100 times the median: the lower median of four, so that two outliers do not confirm each other.
    assert select_members(_reports(1.0, 2.0, 2.0 * 100, 2.0 * 101)).members == (0, 1, 2)
    assert select_members(_reports(1.0, 2.0, 300.0, 400.0)).members == (0, 1)


@pytest.mark.parametrize("reason", list(ExitReason))
def test_islands_understand_every_reason_to_stop(reason: ExitReason) -> None:
    report = RoundReport(1.0, 2.0, stop=reason)
    assert RoundReport.decode(report.encode()) == report
    for unknown in (-1, max(ExitReason) + 1):
        with pytest.raises(ValueError, match="is no reason to end a run"):
            RoundReport.decode(RoundReport(1.0, 2.0, stop=unknown).encode())


def test_the_last_mean_identifies_the_outlier_of_two_differences() -> None:
    reports = _reports(1.0, 1e30)
    assert select_members(reports, 2.0).members == (0,)
    assert "5e+29 times that of the last mean" in select_members(reports, 2.0).left_out[1]
    assert select_members(_reports(1e30, 1e30), 2.0).members == (0, 1)
    assert select_members(_reports(1e30), 2.0).members == (0,)
    # In the first round the parameters do; they may be small and change a lot.
    assert select_members(reports, 0.0, 10.0).members == (0,)
    assert select_members(reports, 0.0, 10.0).left_out == {
        1: "the norm of its difference is 1e+30, 1e+29 times that of the parameters"
    }
    assert select_members(_reports(1.0, 900.0), 0.0, 10.0).members == (0, 1)
    assert select_members(_reports(0.1, 1100.0), 20.0, 10.0).members == (0, 1)


def test_a_mean_is_judged_by_the_usual_norms_of_all_members() -> None:
    def outcome(mean_norm: float, *usual: float) -> RoundOutcome:
        return check_mean([Vote(False, mean_norm, norm) for norm in usual])

    assert outcome(math.nan, 1.0, 1.0) is outcome(math.inf, 1.0) is RoundOutcome.SPOILED
    assert outcome(1e29, 1.0, 1.0, 1.0) is RoundOutcome.SPOILED
    assert outcome(99.0, 1.0, 1.0, 1.0) is RoundOutcome.COUNTS
    assert outcome(101.0, 1.0, 1.0, 1.0, 1e30) is RoundOutcome.SPOILED  # a single deviating vote does not count
    assert outcome(500.0, 1.0, 1000.0) is RoundOutcome.COUNTS  # of two, either may be right
    assert outcome(5.0, 0.0, 0.0) is RoundOutcome.COUNTS
    assert check_mean([Vote(True, math.nan, 1.0), GOOD]) is RoundOutcome.FAILED


def test_invalid_decisions_are_refused() -> None:
    good = select_members(_reports(1.0, 1.0)).encode()
    changes: tuple[dict[str, Any], ...] = (
        {"members": []},
        {"members": [0, 7]},
        {"members": "x"},
        {"arrivals": {"0": ["1", "1", 99]}},
    )
    for change in changes:
        with pytest.raises((ValueError, TypeError, LookupError)):
            Decision.decode({**good, **change})
    with pytest.raises(ValueError, match="island 3 is none of islands"):
        JoinReply.decode({"source": 3, "round": "1/0/0", "members": [0, 1], "problem": ""})
