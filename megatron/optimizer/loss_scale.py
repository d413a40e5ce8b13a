"""Loss scaling: the factor that keeps fp16 gradients from underflowing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megatron.base.errors import UserError
from megatron.config.precision import PrecisionConfig


class LossScale(Protocol):
    """A loss scale, as the optimizer uses it."""

    @property
    def scale(self) -> float:
        """Factor of the loss; gradients are divided by it before clipping."""

    @property
    def can_fall(self) -> bool:
        """Whether the scale can still be reduced, so that overflowed gradients may become finite."""

    def update(self, found_inf: bool) -> None:
        """Update the scale. Called once per step, skipped or not; all ranks pass the same ``found_inf``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ConstantLossScale:
    """A constant scale (1 for bf16 and fp32), from the command line even if a checkpoint has another."""

    can_fall = False

    def __init__(self, scale: float = 1.0) -> None:
        if scale <= 0:
            raise UserError(f"--loss-scale {scale:g} must be positive")
        self.scale = float(scale)

    def update(self, found_inf: bool) -> None:
        """Do nothing: a constant scale ignores overflows."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing: the scale is a setting, not a state."""


class DynamicLossScale:
    """A scale that halves after overflows, doubles after a window of clean steps, and has a minimum.

    ``hysteresis`` is a budget of overflows: the overflow that exhausts it, and each later overflow, halves the scale.
    The budget is refilled when a window completes and the scale grows. So with a budget of 2, a lone overflow is
    forgiven, and in a series of overflows each one after the first halves the scale.

    Raises:
        UserError: when a value cannot work.
    """

    growth_factor = 2.0
    backoff_factor = 0.5

    def __init__(
        self, initial: float = 2.0**32, *, minimum: float = 1.0, window: int = 1000, hysteresis: int = 2
    ) -> None:
        if minimum <= 0:
            raise UserError(f"--min-loss-scale {minimum:g} must be positive")
        if initial < minimum:
            raise UserError(f"--initial-loss-scale {initial:g} is below --min-loss-scale {minimum:g}: raise it")
        if window < 1:
            raise UserError(f"--loss-scale-window {window} must be at least 1")
        if hysteresis < 1:
            raise UserError(f"--hysteresis {hysteresis} must be at least 1")
        self.scale = float(initial)
        self.minimum = float(minimum)
        self.window = window
        self.hysteresis = hysteresis
        self.clean_steps = 0
        self.overflows_left = hysteresis

    @property
    def can_fall(self) -> bool:
        return self.scale > self.minimum

    def update(self, found_inf: bool) -> None:
        """Update the scale; ``found_inf``: the last step's gradients held an inf or a nan."""
        if found_inf:
            self.clean_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.minimum)
            return
        self.clean_steps += 1
        if self.clean_steps == self.window:
            self.clean_steps = 0
            self.overflows_left = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean_steps": self.clean_steps, "overflows_left": self.overflows_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint. After a constant scale, counting starts afresh.

        Raises:
            UserError: when the scale is not a positive number.
        """
        try:
            scale = float(state["scale"])
            clean_steps = int(state.get("clean_steps", 0))
            overflows_left = int(state.get("overflows_left", self.hysteresis))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"the checkpoint's loss scale cannot be read ({error!r}): use --no-load-optim") from error
        if not 0 < scale < float("inf"):
            raise UserError(f"the checkpoint's loss scale is {scale}: use --no-load-optim")
        # The command line may have tightened the limits since.
        self.scale = max(scale, self.minimum)
        self.clean_steps = min(max(clean_steps, 0), self.window - 1)
        self.overflows_left = min(overflows_left, self.hysteresis)


def build_loss_scale(precision: PrecisionConfig) -> LossScale:
    """Build a constant scale if ``--loss-scale`` gives one; else a dynamic scale for fp16, and 1 for other dtypes."""
    if precision.loss_scale is not None:
        return ConstantLossScale(precision.loss_scale)
    if precision.fp16:
        return DynamicLossScale(
            precision.initial_loss_scale,
            minimum=precision.min_loss_scale,
            window=precision.loss_scale_window,
            hysteresis=precision.hysteresis,
        )
    return ConstantLossScale(1.0)
