"""Soft bounds of logits: cap * tanh(x / cap), which stays within (-cap, cap) and changes little where x is small."""

from __future__ import annotations

from torch import Tensor


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Logits within the bound, with autograd's gradient."""
    return logits.div(cap).tanh().mul(cap)


def soft_cap_(logits: Tensor, cap: float | None) -> None:
    """Bounds logits in place; a cap of None leaves them as they are."""
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)


def slope_of_capped(capped: Tensor, cap: float) -> Tensor:
    """Derivative of bounded logits by those before the bound: 1 - tanh(x / cap)^2."""
    return capped.div(cap).square_().neg_().add_(1.0)
