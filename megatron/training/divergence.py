"""Detection of divergence: by consecutive skipped steps, or by the first number that is not finite."""

from __future__ import annotations

import math

from megatron.config.training import TrainingConfig
from megatron.training.compressor_probe import CompressorProbe
from megatron.training.metrics import StepMetrics
from megatron.training.progress_state import Progress

SPIKE_FACTOR = 10.0
SPIKE_SAMPLES = 100
"""Steps of this process whose highest loss is the reference for a spike, as in Megatron-LM."""


class DivergenceCheck:
    """Check of a run's steps. Every rank has one and sees the same numbers.

    Args:
        config: the limits.
        progress: counters of the run; skipped steps in a row are counted in them.
        probe: search for a compressor at fault, in the steps after a skipped step.

    ``problem`` says why the run has diverged; None while it has not.
    """

    def __init__(self, config: TrainingConfig, progress: Progress, probe: CompressorProbe) -> None:
        self._config, self._progress, self._probe = config, progress, probe
        self._highest_loss, self._reference_steps = 0.0, 0
        self.problem: str | None = None

    def after_step(self, step: StepMetrics) -> str | None:
        """Count a step; return a warning, if any. Steps after a problem do not count."""
        if self.problem is not None:
            return None
        progress, config = self._progress, self._config
        finite_losses = all(map(math.isfinite, step.losses.values()))
        if not step.skipped:
            progress.consecutive_skips = 0
            # Without a pipeline flush, a step whose loss is not finite takes the update of the step before.
            progress.last_update = step.iteration if finite_losses else progress.last_update
        else:
            # A step in which no token counts is skipped as well, although all its numbers are finite.
            finite = step.finite_gradients and finite_losses
            progress.consecutive_skips += not finite and not step.searches_loss_scale
        gradients_fail = not step.finite_gradients and not step.searches_loss_scale
        if config.check_for_nan_in_loss_and_grad and (gradients_fail or not finite_losses):
            number = "a gradient" if finite_losses else "the loss"
            self.problem = f"{number} of iteration {step.iteration} is not finite (--check-for-nan-in-loss-and-grad)"
        elif config.max_skipped_steps and progress.consecutive_skips >= config.max_skipped_steps:
            self.problem = f"{progress.consecutive_skips} steps in a row were skipped (--max-skipped-steps)"
        self._probe.watch(progress.consecutive_skips > 0)
        if not config.check_for_spiky_loss or not math.isfinite(step.loss):
            return None
        if self._reference_steps < SPIKE_SAMPLES:
            self._highest_loss = max(self._highest_loss, step.loss)
            self._reference_steps += 1
        elif step.loss >= SPIKE_FACTOR * self._highest_loss:
            return (
                f"warning: the loss of iteration {step.iteration} is {step.loss:.6E}, and the highest of the "
                f"first {SPIKE_SAMPLES} iterations was {self._highest_loss:.6E} (--check-for-spiky-loss)"
            )
        return None

    def explain(self, checkpoint: str | None) -> str:
        """The last line of a diverged run. A collective call.

        Args:
            checkpoint: flags that load the newest checkpoint before the last update; None if there is none.
        """
        updated, cause, change = self._progress.last_update, "", "with a lower --lr or other data"
        last = f"the last update was that of iteration {updated}" if updated else "no update was ever taken"
        advice = f"go on from before it ({checkpoint})" if checkpoint is not None else "begin anew"
        spec = self._probe.find_faulty_spec()
        if spec is not None:
            cause = f"; {spec} turned finite numbers into NaN or infinity"
            change = f"without --compress {spec}, or with a lower --lr"
        elif self._probe.compressed_points:
            change += f", or without --compress ({', '.join(self._probe.compressed_points)})"
            if self._config.check_for_nan_in_loss_and_grad:
                change += "; without --check-for-nan-in-loss-and-grad, this line would name a compressor at fault"
        return f"the run has diverged: {self.problem}{cause}; {last}; {advice} {change}"
