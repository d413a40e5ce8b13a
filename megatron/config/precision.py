"""Number formats and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.config.conditions import needs, unless

if TYPE_CHECKING:
    import torch


_DYNAMIC_SCALE = needs("precision.fp16"), unless("precision.loss_scale")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Data type of parameters and activations: fp32 unless a switch says otherwise."""

    fp16: bool = option(False, "Train in fp16 with a loss scale.", common="precision")
    bf16: bool = option(False, "Train in bf16; gradients accumulate in fp32.", common="precision")
    fp64: bool = option(
        False, "Compute everything in float64: a test mode that shows errors otherwise hidden by rounding."
    )
    fp8: Literal["tensorwise", "rowwise"] | None = derived(
        "all products in the training precision",
        "With --bf16, on GPUs of compute capability 8.9 or more: compute the matrix products of linear layers "
        "from 8-bit numbers, with one scale per tensor, or one per row (and weight gradients in bf16).",
        common="precision",
    )
    loss_scale: float | None = derived(
        "a dynamic scale", "Constant loss scale for --fp16; a power of two is best.", above=0
    )
    initial_loss_scale: float = option(
        2.0**32, "First value of the dynamic loss scale.", above=0, only_if=_DYNAMIC_SCALE
    )
    min_loss_scale: float = option(
        1.0, "The dynamic loss scale never falls below this.", above=0, only_if=_DYNAMIC_SCALE
    )
    loss_scale_window: int = option(
        1000,
        "The dynamic loss scale doubles after this many clean iterations.",
        unit="iterations",
        minimum=1,
        only_if=_DYNAMIC_SCALE,
    )
    hysteresis: int = option(
        2,
        "The loss scale halves at this many overflows since it last doubled, and at each one after them.",
        unit="iterations",
        minimum=1,
        only_if=_DYNAMIC_SCALE,
    )

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        import torch

        if self.fp16:
            return torch.float16
        if self.bf16:
            return torch.bfloat16
        return torch.float64 if self.fp64 else torch.float32


def check_precision(precision: PrecisionConfig, accumulates_in_fp32: bool) -> None:
    """Check number formats and loss scales; raise UserError for contradictions."""
    formats = [
        flag for flag, on in (("--fp16", precision.fp16), ("--bf16", precision.bf16), ("--fp64", precision.fp64)) if on
    ]
    if len(formats) > 1:
        raise UserError(f"{' and '.join(formats)} exclude each other; keep one number format")
    if precision.fp64 and accumulates_in_fp32:
        raise UserError("--fp64 and --accumulate-allreduce-grads-in-fp32 exclude each other; leave the latter out")
    if precision.fp8 is not None and not precision.bf16:
        raise UserError(f"--fp8 {precision.fp8} needs --bf16, the format of all other computation; add it")
    if precision.loss_scale is not None and not precision.fp16:
        raise UserError("--loss-scale is for --fp16 only; leave it out or add --fp16")
    if precision.min_loss_scale > precision.initial_loss_scale:
        raise UserError(
            f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale "
            f"{precision.initial_loss_scale:g}; lower the former"
        )


def check_fp8(precision: PrecisionConfig, on_cuda: bool) -> None:
    """Raise UserError for fp8 matrix products without CUDA."""
    if precision.fp8 is not None and not on_cuda:
        raise UserError(f"--fp8 {precision.fp8} needs GPUs, and this run is on CPUs; leave it out")
