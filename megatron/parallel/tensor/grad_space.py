"""A parameter's place among the flat gradients, to which its first gradient of a step may be written at once.

Other memory would be copied there; and a C library gives blocks as large as an embedding's gradient back to the system,
which clears the next one page by page.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NAME = "_grad_place"


class GradPlace:
    """The place of a parameter's gradient in one step; what it holds in the beginning is anything.

    Args:
        space: the memory, in the parameter's shape.
    """

    __slots__ = ("_added", "_handed", "_lost", "_taken", "space")

    def __init__(self, space: Tensor) -> None:
        self.space = space
        self._taken = self._handed = self._added = self._lost = False

    def take(self) -> bool:
        """Whether this use has the memory: two uses of a parameter have gradients of their own, which autograd adds."""
        first, self._taken = not self._taken, True
        return first

    def hand_over(self) -> Tensor:
        """The memory that was taken, with the gradient, to be returned to autograd (as a view of its own).

        Raises:
            RuntimeError: when another gradient has been put there since it was taken.
        """
        if self._lost:
            raise RuntimeError(
                "a gradient that was computed in the forward pass has been overwritten: call backward in the order of "
                "the forward passes, and between the beginning of a step's gradients and its end"
            )
        self._handed = True
        return self.space

    def add(self) -> Tensor | None:
        """The memory with the gradient of this backward, which others may be added to; None where none lies there."""
        self._added = self._added or self._handed
        return self.space if self._handed else None

    def lose(self) -> bool:
        """Something else is put there from now on; returns whether that loses what was added."""
        self._lost = True
        return self._added


def offer(param: nn.Parameter, space: Tensor) -> None:
    """Offers memory for the next gradient of a parameter, whose numbers nobody needs."""
    last: GradPlace | None = vars(param).get(_NAME)
    if last is not None:
        last.lose()
    setattr(param, _NAME, GradPlace(space))


def withdraw(param: nn.Parameter, kept: bool) -> None:
    """Takes the offer back; ``kept``: the parameter's gradient lies there.

    Raises:
        RuntimeError: when something was added there to a gradient that is not kept.
    """
    place: GradPlace | None = vars(param).pop(_NAME, None)
    if place is not None and not kept and place.lose():
        raise RuntimeError("what was added to a parameter's gradient is lost: autograd has made another one")


def place_of(weight: Tensor) -> GradPlace | None:
    """The place of the gradient of ``weight``, of its size and type, where one is offered.

    Args:
        weight: a parameter, or a view of all of one.
    """
    # A gradient that is itself differentiated must have memory of its own, and compiled code plans its memory itself.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    place: GradPlace | None = getattr(weight if weight._base is None else weight._base, _NAME, None)
    if place is None or not weight.is_contiguous():
        return None
    return place if weight.numel() == place.space.numel() and weight.dtype == place.space.dtype else None


def take(weight: Tensor) -> Tensor | None:
    """The memory that is offered for a gradient of ``weight``, in its shape and type, or None.

    Who takes it writes the whole gradient there and returns it to autograd in the same backward.
    """
    place = take_ahead(weight)
    return None if place is None else place.hand_over().view(weight.shape)


def add_to(weight: Tensor) -> Tensor | None:
    """The memory with a gradient of ``weight`` that this backward has returned, which another may be added to, or None.

    Who adds there returns None to autograd.
    """
    # A hook makes another gradient of the sum, which looks as if autograd had added up without the place.
    place = None if weight._backward_hooks else place_of(weight)
    there = None if place is None else place.add()
    return None if there is None else there.view(weight.shape)


def take_ahead(weight: Tensor) -> GradPlace | None:
    """The place of a gradient that the forward pass computes, or None; the backward that returns it hands it over."""
    place = place_of(weight)
    return place if place is not None and place.take() else None
