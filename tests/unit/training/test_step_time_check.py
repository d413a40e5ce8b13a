"""Times of steps with automatically chosen compressors, beside what was expected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.distributed.observer import Finding
from megatron.planner.compressor_search import CompressorSet
from megatron.training.metrics import StepMetrics
from megatron.training.step_time_check import StepTimeCheck

SKIPPED = 0.25
"""Seconds of a skipped step."""


def _check(trial_s: float | None, warmup_iters: int = 0, chosen: bool = True, **options: Any) -> StepTimeCheck:
    compressors = SimpleNamespace(prediction=SimpleNamespace(seconds=1.5), trial_s=trial_s)
    return StepTimeCheck(cast(CompressorSet, compressors) if chosen else None, warmup_iters, **options)


def _findings(check: StepTimeCheck, seconds: list[float], batch: int = 4, first: int = 1) -> dict[int, Finding]:
    findings = {}
    for iteration, step_s in enumerate(seconds, first):
        step = SimpleNamespace(
            iteration=iteration,
            seconds_per_iteration=step_s,
            global_batch_size=batch,
            seq_length=16,
            skipped_iterations=int(step_s == SKIPPED),
        )
        finding = check.after_step(cast(StepMetrics, step))
        if finding is not None:
            findings[iteration] = finding
    return findings


@pytest.mark.parametrize(("trial_s", "expected"), [(None, "predicted: 1.5 s"), (1.9, "trial steps: 1.9 s")])
def test_the_expected_time_is_compared_once_with_steps_after_the_warm_up(trial_s: float | None, expected: str) -> None:
    """Steps of 10 s in the warm-up, then two of 5 s that settle, then of 2 s."""
    findings = _findings(_check(trial_s, warmup_iters=3), [10.0] * 3 + [5.0] * 2 + [2.0] * 40)
    assert list(findings) == [10]
    assert findings[10].kind == "auto_compression"
    assert findings[10].values == {"predicted_s": 1.5, "trial_s": trial_s, "measured_s": 2.0}
    assert findings[10].line == f"--compress auto: an iteration takes 2 s ({expected})"


def test_steps_that_take_longer_are_reported_once_for_each_slowdown() -> None:
    check = _check(1.9, chosen=False)
    assert not _findings(check, [2.0] * 30)
    findings = _findings(check, [3.1] * 60, first=31)
    # More than half of the last 20 steps take that long after 11 of them.
    assert list(findings) == [41]
    assert findings[41].kind == "slowdown"
    assert findings[41].values == pytest.approx({"expected_s": 2.0, "measured_s": 3.1})
    assert findings[41].line is not None
    assert "takes 3.1 s by now, up from 2 s: links or devices are slower" in findings[41].line
    assert list(_findings(check, [5.0] * 20, first=91)) == [101]


def test_larger_batches_are_no_slowdown() -> None:
    check = _check(1.9, chosen=False)
    assert not _findings(check, [2.0] * 30)
    assert not _findings(check, [4.0] * 30, batch=8, first=31)


def test_steps_that_take_less_are_reported_once_for_each_speedup() -> None:
    check = _check(1.9, chosen=False)
    assert not _findings(check, [3.1] * 30)
    findings = _findings(check, [2.0] * 60, first=31)
    assert list(findings) == [41]
    assert findings[41].kind == "speedup"
    assert findings[41].values == pytest.approx({"expected_s": 3.1, "measured_s": 2.0})
    assert findings[41].line is not None
    assert "takes 2 s by now, down from 3.1 s: links or devices are faster" in findings[41].line
    assert list(_findings(check, [2.0] * 40 + [1.0] * 20, first=91)) == [141]


@pytest.mark.parametrize(("batch", "reported"), [(4, True), (8, False), (2, False)])
def test_less_time_per_token_in_other_batches_is_no_speedup(batch: int, reported: bool) -> None:
    """The seconds per token of a larger batch fall as it shares a step's messages; half a batch takes half the time."""
    check = _check(1.9, chosen=False)
    assert not _findings(check, [2.0] * 30)
    seconds = {4: 1.2, 8: 2.4, 2: 1.2}[batch]
    assert bool(_findings(check, [seconds] * 30, batch=batch, first=31)) is reported
    assert _findings(check, [0.1] * 30, batch=batch, first=61)


def test_a_resumed_run_notices_faster_links() -> None:
    """But takes no larger batches for faster links, and reports nothing if it does not know the first batch."""
    expected: dict[str, Any] = {"expected_s_per_token": 2.0 / 64}
    assert not _findings(_check(1.9, chosen=False, **expected), [1.2] * 30)
    assert not _findings(_check(1.9, chosen=False, **expected, expected_tokens=64), [2.4] * 30, batch=8)
    check = _check(1.9, chosen=False, adapts=True, **expected, expected_tokens=64)
    ((iteration, finding),) = _findings(check, [1.2] * 20).items()
    assert (iteration, finding.kind, check.needs_choice) == (20, "speedup", True)


def test_a_few_slow_steps_are_no_slowdown() -> None:
    check = _check(1.9, chosen=False)
    assert not _findings(check, [2.0] * 30)
    assert not _findings(check, ([9.0] * 5 + [2.0] * 15) * 3, first=31)


def test_a_large_slowdown_is_reported_once_with_the_time_that_steps_take() -> None:
    check = _check(1.9, chosen=False)
    assert not _findings(check, [1.0] * 30)
    ((_, finding),) = _findings(check, [4.0] * 40, first=31).items()
    assert finding.values == pytest.approx({"expected_s": 1.0, "measured_s": 4.0})


def test_skipped_steps_do_not_count() -> None:
    """Steps that search for a loss scale are short."""
    check = _check(1.9)
    findings = _findings(check, [SKIPPED] * 30 + [2.0] * 60)
    assert list(findings) == [37]
    assert findings[37].values["measured_s"] == 2.0


def test_a_change_of_compressors_is_no_slowdown() -> None:
    check = _check(1.9)
    assert list(_findings(check, [2.0] * 30)) == [7]
    check.restart()
    assert not _findings(check, [5.0] * 60, first=31)


def test_a_run_that_adapts_asks_for_a_choice_and_keeps_what_it_expected() -> None:
    """So that a run that resumes before it has chosen notices, too."""
    check = _check(1.9, chosen=False, adapts=True)
    assert not _findings(check, [2.0] * 30)
    assert not check.needs_choice
    ((_, finding),) = _findings(check, [3.1] * 11, first=31).items()
    assert check.needs_choice
    assert finding.line is not None
    assert finding.line.endswith("links or devices are slower; the compressors are chosen again")
    assert check.expected_s_per_token == pytest.approx(2.0 / 64)
    resumed = _check(1.9, chosen=False, adapts=True, expected_s_per_token=check.expected_s_per_token)
    assert list(_findings(resumed, [3.1] * 20, first=42)) == [61]
    assert resumed.needs_choice


def test_a_run_that_does_not_adapt_expects_the_longer_time() -> None:
    check = _check(1.9, chosen=False)
    _findings(check, [2.0] * 30 + [3.1] * 11)
    assert not check.needs_choice
    assert check.expected_s_per_token == pytest.approx(3.1 / 64)


def test_choices_within_a_run_take_a_small_share_of_its_time() -> None:
    """2% of it: after a choice of 2 s not before 100 s of steps, though 20 slow steps have passed by 54 s."""
    check = _check(1.9, chosen=False, adapts=True, choice_s=2.0)
    assert list(_findings(check, [2.0] * 7 + [3.1] * 27)) == []
    assert not check.needs_choice
    assert list(_findings(check, [3.1], first=35)) == [35]
    assert check.needs_choice
