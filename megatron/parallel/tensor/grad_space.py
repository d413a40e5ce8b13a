"""A parameter's place among the flat gradients, to which its first gradient of a step may be written at once.

Other memory would be copied there; and a C library gives blocks as large as an embedding's gradient back to the system,
which clears the next one page by page.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

_NAME = "_grad_place"


class GradPlace:
    """The place of a parameter's gradient in one step; what it holds in the beginning is anything.

    Args:
        param: the parameter.
        space: the memory, in the parameter's shape.
    """

    __slots__ = ("_added_in", "_lost", "_param", "_returned_in", "_uses", "space")

    def __init__(self, param: nn.Parameter, space: Tensor) -> None:
        self.space = space
        self._param = weakref.ref(param)  # which has the place
        self._uses = 0
        self._lost = False
        self._returned_in: int | None = None  # the backward, by torch's number
        self._added_in: int | None = None

    def accumulates(self) -> bool:
        """Whether the backward that is running leaves its gradient in the parameter, and nobody differentiates that."""
        param = self._param()
        if torch.is_grad_enabled() or param is None or not param.requires_grad:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
        except RuntimeError:  # autograd.grad, which hands the gradient to its caller
            return False

    def take(self) -> bool:
        """Whether this use has the memory: two uses of a parameter have gradients of their own, which autograd adds."""
        self._uses += 1
        return self._uses == 1

    def hand_over(self) -> Tensor:
        """The gradient for autograd, once; the caller has written it to the memory that it took.

        Raises:
            RuntimeError: when another gradient lies there by now.
        """
        if self._lost or self._returned_in is not None:
            raise RuntimeError(
                "a gradient that was computed in the forward pass has been overwritten: call backward once, in the "
                "order of the forward passes, and between the beginning of a step's gradients and its end"
            )
        self._returned_in = torch._C._current_graph_task_id()
        return self.space if self.accumulates() else self.space.clone()

    def add(self) -> Tensor | None:
        """The memory with the gradient that this backward has returned, if autograd adds no other to it; else None."""
        if self._uses > 1 or self._returned_in != torch._C._current_graph_task_id() or not self.accumulates():
            return None
        self._added_in = self._returned_in
        return self.space

    def lose(self) -> bool:
        """Something else is put there from now on; returns whether that loses what this backward has added."""
        self._lost = True
        return self._added_in is not None and self._added_in == torch._C._current_graph_task_id()


def offer(param: nn.Parameter, space: Tensor) -> None:
    """Offers memory for the next gradient of a parameter, whose numbers nobody needs."""
    last: GradPlace | None = vars(param).get(_NAME)
    if last is not None:
        last.lose()
    setattr(param, _NAME, GradPlace(param, space))


def withdraw(param: nn.Parameter, kept: bool) -> None:
    """Takes the offer back; ``kept``: the parameter's gradient lies there.

    Raises:
        RuntimeError: when something was added there to a gradient that is not kept.
    """
    place: GradPlace | None = vars(param).pop(_NAME, None)
    if place is not None and not kept and place.lose():
        raise RuntimeError(
            "rows were added to a tied weight's gradient, and autograd has made another one of it without them: use "
            "the weight in lookups and in one output layer alone"
        )


def _place_of(weight: Tensor) -> GradPlace | None:
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
    place = _place_of(weight)
    if place is None or not place.accumulates() or not place.take():
        return None
    return place.hand_over().view(weight.shape)


def add_to(weight: Tensor) -> Tensor | None:
    """The memory with a gradient of ``weight`` that this backward has returned, which another may be added to, or None.

    Who adds there returns None to autograd.
    """
    # A hook makes another gradient of the sum, which looks as if autograd had added up without the place.
    place = None if weight._backward_hooks else _place_of(weight)
    there = None if place is None else place.add()
    return None if there is None else there.view(weight.shape)


def take_ahead(weight: Tensor) -> GradPlace | None:
    """The place of a gradient that the forward pass computes, or None; its backward returns what ``hand_over`` does."""
    place = _place_of(weight)
    return place if place is not None and place.take() else None
