"""Soft capping of logits: cap * tanh(x / cap), which lies within (-cap, cap) and is close to x for small x."""

from __future__ import annotations

from torch import Tensor


def soft_cap_(logits: Tensor, cap: float | None) -> None:
    """Soft-cap logits in place; no-op if ``cap`` is None."""
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)


def slope_of_capped(capped: Tensor, cap: float) -> Tensor:
    """Derivative of capped logits with respect to the uncapped logits: 1 - tanh(x / cap)^2."""
    return capped.div(cap).square_().neg_().add_(1.0)
