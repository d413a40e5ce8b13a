"""The end of a run that has diverged, and warnings of spikes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron.config.training import TrainingConfig
from megatron.training.divergence import DivergenceCheck
from megatron.training.metrics import StepMetrics
from megatron.training.progress_state import Progress

STEP = StepMetrics(
    iteration=1, losses={"lm loss": 3.0}, global_batch_size=4, seq_length=8, loss_scale=1.0, grad_norm=1.0
)
SKIPPED = replace(STEP, grad_norm=None, skipped_iterations=1, finite_gradients=False)
SEARCHING = replace(SKIPPED, searches_loss_scale=True)
NOTHING_COUNTED = replace(SKIPPED, finite_gradients=True)


class _Probe:
    """Stands for a probe that finds a compressor at fault, or none."""

    def __init__(self, spec: str | None, points: Sequence[str] = ("dp-grad", "pp-forward")) -> None:
        self.spec, self.compressed_points = spec, points
        self.watched: list[bool] = []

    def watch(self, is_needed: bool) -> None:
        self.watched.append(is_needed)

    def find_faulty_spec(self) -> str | None:
        return self.spec


def _check(probe: _Probe | None = None, **options: object) -> tuple[DivergenceCheck, Progress]:
    progress, config = Progress(), TrainingConfig(micro_batch_size=1, **options)  # type: ignore[arg-type]
    return DivergenceCheck(config, progress, probe or _Probe(None)), progress  # type: ignore[arg-type]


def _explain(probe: _Probe, *steps: StepMetrics, **options: object) -> str:
    """The last line of a run with these steps."""
    check, progress = _check(probe, max_skipped_steps=2, **options)
    _problems(check, progress, *steps)
    return check.explain("--load x --ckpt-step 7")


def _problems(check: DivergenceCheck, progress: Progress, *steps: StepMetrics) -> list[bool]:
    """Whether the run has diverged after each step."""
    diverged = []
    for step in steps:
        progress.iteration += 1
        check.after_step(replace(step, iteration=progress.iteration))
        diverged.append(check.problem is not None)
    return diverged


def test_only_consecutive_skips_count() -> None:
    check, progress = _check(max_skipped_steps=2)
    assert _problems(check, progress, SKIPPED, STEP, SKIPPED, SKIPPED) == [False, False, False, True]
    assert progress.last_update == 2


@pytest.mark.parametrize(("losses", "counts"), [({"lm loss": 0.0}, False), ({"lm loss": math.nan}, True)])
def test_a_step_without_counted_tokens_does_not_end_a_row_of_skips(losses: dict[str, float], counts: bool) -> None:
    check, progress = _check(max_skipped_steps=2)
    idle = replace(NOTHING_COUNTED, losses=losses)
    assert _problems(check, progress, SKIPPED, idle) == [False, counts]
    assert _problems(check, progress, SKIPPED) == [True]
    quiet, progress = _check(max_skipped_steps=2)
    _problems(quiet, progress, *[NOTHING_COUNTED] * 3)
    assert progress.consecutive_skips == 0


def test_a_search_for_the_loss_scale_does_not_end_a_row_of_skips() -> None:
    check, progress = _check(max_skipped_steps=2)
    assert _problems(check, progress, SKIPPED, SEARCHING, SEARCHING, SKIPPED) == [False, False, False, True]


def test_zero_never_ends_a_run() -> None:
    check, progress = _check(max_skipped_steps=0)
    assert not any(_problems(check, progress, *[SKIPPED] * 50))


@pytest.mark.parametrize(
    ("step", "number"),
    [
        (replace(STEP, losses={"lm loss": 3.0, "sop loss": math.nan}), "the loss of iteration 1"),
        (replace(SEARCHING, losses={"lm loss": math.inf}), "the loss of iteration 1"),
        (SKIPPED, "a gradient of iteration 1"),
        (SEARCHING, None),
        (NOTHING_COUNTED, None),
        (STEP, None),
    ],
)
def test_the_check_for_nan_ends_a_run_at_once(step: StepMetrics, number: str | None) -> None:
    check, progress = _check(check_for_nan_in_loss_and_grad=True)
    assert _problems(check, progress, step) == [number is not None]
    assert number is None or number in check.explain(None)


@pytest.mark.parametrize("last", [STEP, SKIPPED])
def test_the_first_problem_is_the_one_that_ends_the_run(last: StepMetrics) -> None:
    """A pipeline without a flush reports one more step."""
    check, progress = _check(check_for_nan_in_loss_and_grad=True)
    not_a_number = replace(STEP, losses={"lm loss": math.nan})
    assert _problems(check, progress, STEP, not_a_number, last) == [False, True, True]
    assert "the loss of iteration 2 is not finite" in check.explain(None)
    # Without a flush, an update goes with it, but it was computed with the parameters of the update before.
    assert "the last update was that of iteration 1;" in check.explain(None)


def test_steps_after_a_skipped_step_are_watched() -> None:
    check, progress = _check(probe := _Probe(None), max_skipped_steps=4)
    _problems(check, progress, STEP, SKIPPED, SKIPPED, STEP, SEARCHING, NOTHING_COUNTED, SKIPPED)
    assert probe.watched == [False, True, True, False, False, False, True]


def test_a_compressor_at_fault_is_named() -> None:
    text = _explain(_Probe("dp-grad=mine"), STEP, SKIPPED, SKIPPED)
    assert text == (
        "the run has diverged: 2 steps in a row were skipped (--max-skipped-steps); dp-grad=mine turned finite numbers "
        "into NaN or infinity; the last update was that of iteration 1; go on from before it (--load x --ckpt-step 7) "
        "without --compress dp-grad=mine, or with a lower --lr"
    )


def test_without_a_compressor_at_fault_the_compressed_points_are_listed() -> None:
    text = _explain(_Probe(None), SKIPPED, SKIPPED)
    assert text.endswith(" with a lower --lr or other data, or without --compress (dp-grad, pp-forward)")
    text = _explain(_Probe(None), SKIPPED, check_for_nan_in_loss_and_grad=True)
    assert "or without --compress (dp-grad, pp-forward); without --check-for-nan-in-loss-and-grad, this line" in text
    assert _explain(_Probe(None, []), SKIPPED, SKIPPED).endswith(" with a lower --lr or other data")


def test_losses_ten_times_above_the_first_hundred_are_spikes() -> None:
    check, _ = _check(check_for_spiky_loss=True)
    losses = [2.0, 3.0, *[1.0] * 98, 29.9, 30.0, math.nan, 4.0]
    warnings = []
    for iteration, loss in enumerate(losses, 1):
        warnings.append(check.after_step(replace(STEP, iteration=iteration, losses={"lm loss": loss})))
    assert [number for number, line in enumerate(warnings) if line is not None] == [101]
    assert "the loss of iteration 102 is 3.000000E+01" in str(warnings[101])
    quiet, _ = _check()
    assert not any(quiet.after_step(replace(STEP, losses={"lm loss": loss})) for loss in losses)
