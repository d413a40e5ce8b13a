"""Number formats and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.base.option import derived, option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The format of parameters and activations: fp32 unless one of the switches says otherwise."""

    fp16: bool = option(False, "Train in fp16 with a loss scale.")
    bf16: bool = option(False, "Train in bf16; gradients accumulate in fp32.")
    fp64: bool = option(False, "Train in float64 everywhere: a test mode that shows errors hidden by rounding.")
    loss_scale: float | None = derived(
        "a dynamic scale", "Constant loss scale for --fp16; a power of two is best.", above=0
    )
    initial_loss_scale: float = option(2.0**32, "First value of the dynamic loss scale.", above=0)
    min_loss_scale: float = option(1.0, "The dynamic loss scale never falls below this.", above=0)
    loss_scale_window: int = option(
        1000, "The dynamic loss scale doubles after this many clean iterations.", unit="iterations", minimum=1
    )
    hysteresis: int = option(
        2, "Overflows that are tolerated before the loss scale halves.", unit="iterations", minimum=1
    )

    @property
    def params_dtype(self) -> torch.dtype:
        """The dtype of the model's parameters and activations."""
        import torch

        if self.fp16:
            return torch.float16
        if self.bf16:
            return torch.bfloat16
        return torch.float64 if self.fp64 else torch.float32
