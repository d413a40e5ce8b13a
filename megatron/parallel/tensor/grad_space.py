"""Memory that a parameter's first gradient of a step may be written to: its place among the flat gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NAME = "_grad_space"


def offer(param: nn.Parameter, space: Tensor) -> None:
    """Offers memory for the next gradient of a parameter, whose numbers nobody needs."""
    setattr(param, _NAME, space)


def withdraw(param: nn.Parameter) -> None:
    """Takes the offer back, if nobody has taken it."""
    vars(param).pop(_NAME, None)


def take(weight: Tensor) -> Tensor | None:
    """The memory that is offered for a gradient of ``weight``, in its shape and type, or None.

    Who takes it writes the whole gradient there and returns it to autograd in the same backward. It is given once, so
    that two uses of a parameter have gradients of their own, which autograd adds up.

    Args:
        weight: a parameter, or a view of all of one.
    """
    # A gradient that is itself differentiated must have memory of its own, and compiled code plans its memory itself.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    param = weight if weight._base is None else weight._base
    space: Tensor | None = getattr(param, _NAME, None)
    if space is None:
        return None
    if weight.numel() != space.numel() or weight.dtype != space.dtype or not weight.is_contiguous():
        return None
    delattr(param, _NAME)
    return space.view(weight.shape)
