"""Check of step times under the compressors that ``--compress auto`` chose."""

from __future__ import annotations

import math
import statistics
from collections import deque

from megatron.distributed.observer import Finding
from megatron.planner.compressor_search import CompressorSet
from megatron.training.metrics import StepMetrics

_SETTLING_STEPS, _FIRST_STEPS = 2, 5
"""Number of steps that are not measured, and of the next steps, whose median time is the expected time."""

_LATEST_STEPS, _CHANGE = 20, 1.5
"""Number of steps whose median time is compared, and the factor from the expected time at which it is reported."""

_TRAINING_PER_CHOICE = 50.0
"""Minimum training time between two choices, relative to the time that a choice takes: choices then take at most 2% of
a run, even where other programs slow a machine down again and again."""


class StepTimeCheck:
    """Report of the first steps' time beside the expected time, and of later steps that take much more or less time.

    Later steps are compared per token, since batches and sequences may grow. Larger batches take less time per token,
    so a step is only faster if it takes less time than a step of the first size.

    Args:
        chosen: the chosen set; None in a run that keeps the choice of its checkpoint.
        warmup_iters: first iterations of the run, which are not measured.
        adapts: whether the run chooses again when steps take much longer or less.
        expected_s_per_token, expected_tokens: seconds of a step per token, and tokens of a step, in the run that saved
            the checkpoint.
        choice_s: seconds that a choice within the run took; 0 for the choice at its start.

    ``measured_s`` is the median time of the first steps with the chosen set, None before. ``needs_choice`` is true when
    steps have become much slower or faster and the run should choose again.
    """

    def __init__(
        self,
        chosen: CompressorSet | None,
        warmup_iters: int,
        adapts: bool = False,
        expected_s_per_token: float | None = None,
        expected_tokens: int | None = None,
        choice_s: float = 0.0,
    ) -> None:
        self._chosen, self._adapts = chosen, adapts
        self.measured_s: float | None = None
        self.needs_choice = False
        self._seconds_left = _TRAINING_PER_CHOICE * choice_s
        self._warmup_iters = warmup_iters
        self._first_steps: list[StepMetrics] = []
        self.expected_s_per_token = expected_s_per_token
        self.expected_tokens = expected_tokens
        self._latest_steps: deque[StepMetrics] = deque(maxlen=_LATEST_STEPS)

    def after_step(self, step: StepMetrics) -> Finding | None:
        """Count a step with its seconds; return a finding if it completes the first steps, or if the time of the latest
        steps has changed."""
        self._seconds_left -= step.seconds_per_iteration
        if step.iteration <= self._warmup_iters or step.skipped_iterations:
            return None
        if self.expected_s_per_token is None:
            self._first_steps.append(step)
            if len(self._first_steps) < _SETTLING_STEPS + _FIRST_STEPS:
                return None
            steps = self._first_steps[_SETTLING_STEPS:]
            self.expected_s_per_token = statistics.median(map(_s_per_token, steps))
            self.expected_tokens = _tokens(steps[0])
            if self._chosen is None:
                return None
            self.measured_s = measured_s = statistics.median(step.seconds_per_iteration for step in steps)
            predicted_s, trial_s = self._chosen.prediction.seconds, self._chosen.trial_s
            values = {"predicted_s": predicted_s, "trial_s": trial_s, "measured_s": measured_s}
            expected_text = f"predicted: {predicted_s:.3g} s" if trial_s is None else f"trial steps: {trial_s:.3g} s"
            line = f"--compress auto: an iteration takes {measured_s:.3g} s ({expected_text})"
            return Finding("auto_compression", values, line)
        self._latest_steps.append(step)
        if len(self._latest_steps) < _LATEST_STEPS or (self._adapts and self._seconds_left > 0.0):
            return None
        expected_s_per_token, first_tokens = self.expected_s_per_token, self.expected_tokens
        # A speed-up is judged as if the latest steps had no more tokens than a first step; it is never reported if that
        # number is unknown, in a run that resumes from a checkpoint of an earlier version.
        s_per_token_at_first_size = math.inf
        if first_tokens is not None:
            s_per_token_at_first_size = statistics.median_high(
                latest.seconds_per_iteration / min(_tokens(latest), first_tokens) for latest in self._latest_steps
            )
        latest_s_per_token = statistics.median_low(map(_s_per_token, self._latest_steps))
        if latest_s_per_token >= _CHANGE * expected_s_per_token:
            kind, text = "slowdown", "up from {:.3g} s: links or devices are slower"
        elif s_per_token_at_first_size <= expected_s_per_token / _CHANGE:
            kind, text = "speedup", "down from {:.3g} s: links or devices are faster"
        else:
            return None
        tokens = _tokens(self._latest_steps[-1])
        expected_s, measured_s = expected_s_per_token * tokens, latest_s_per_token * tokens
        self._latest_steps.clear()
        if self._adapts:
            # The checkpoint keeps the expected time, so a run resumed before the new choice notices the change, too.
            self.needs_choice, remedy = True, "the compressors are chosen again"
        else:
            self.expected_s_per_token, self.expected_tokens = latest_s_per_token, tokens
            remedy = "to choose again, stop the run and resume it with --compress-adapt"
        line = f"--compress auto: an iteration takes {measured_s:.3g} s by now, {text.format(expected_s)}; {remedy}"
        return Finding(kind, {"expected_s": expected_s, "measured_s": measured_s}, line)

    def restart(self) -> None:
        """Measure the expected time anew, after a change of compressors."""
        self._chosen, self.expected_s_per_token, self.expected_tokens = None, None, None
        self._first_steps.clear()
        self._latest_steps.clear()


def _tokens(step: StepMetrics) -> int:
    return step.global_batch_size * step.seq_length


def _s_per_token(step: StepMetrics) -> float:
    return step.seconds_per_iteration / _tokens(step)
