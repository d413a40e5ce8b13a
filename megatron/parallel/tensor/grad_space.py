"""A parameter's place among the flat gradients, where its first gradient of a step may be written directly.

Gradients in other memory would be copied there; and a C library returns blocks of an embedding gradient's size to the
system, which clears the next block page by page.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

_NAME = "_grad_place"


class GradSlot:
    """The place of a parameter's gradient in a step; initially uninitialized.

    Args:
        param: the parameter.
        space: the memory, in the parameter's shape.
    """

    __slots__ = ("_added_in", "_lost", "_param", "_returned_in", "_uses", "space")

    def __init__(self, param: nn.Parameter, space: Tensor) -> None:
        self.space = space
        self._param = weakref.ref(param)  # which owns the place
        self._uses = 0
        self._lost = False
        self._returned_in: int | None = None  # the backward, by torch's number
        self._added_in: int | None = None

    def accumulates(self) -> bool:
        """Whether the running backward leaves its gradient in the parameter, and nobody differentiates it."""
        param = self._param()
        if torch.is_grad_enabled() or param is None or not param.requires_grad:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
        except RuntimeError:  # autograd.grad, which returns the gradient to its caller
            return False

    def claim(self) -> bool:
        """Whether this use gets the memory: two uses of a parameter have separate gradients, which autograd adds."""
        self._uses += 1
        return self._uses == 1

    def hand_over(self) -> Tensor:
        """Returns the gradient to autograd, once; the caller has written it to the memory.

        Raises:
            RuntimeError: when another gradient has overwritten it.
        """
        if self._lost or self._returned_in is not None:
            raise RuntimeError(
                "a gradient that was computed in the forward pass has been overwritten: call backward once, in the "
                "order of the forward passes, and between the beginning of a step's gradients and its end"
            )
        self._returned_in = torch._C._current_graph_task_id()
        return self.space if self.accumulates() else self.space.clone()

    def add(self) -> Tensor | None:
        """The memory with the gradient returned by this backward, if autograd adds no other to it; else None."""
        if self._uses > 1 or self._returned_in != torch._C._current_graph_task_id() or not self.accumulates():
            return None
        self._added_in = self._returned_in
        return self.space

    def lose(self) -> bool:
        """Gives up the memory to other data; returns whether that loses rows that this backward added."""
        self._lost = True
        return self._added_in is not None and self._added_in == torch._C._current_graph_task_id()


def offer(param: nn.Parameter, space: Tensor) -> None:
    """Offers memory for the next gradient of a parameter; its contents may be overwritten."""
    last: GradSlot | None = vars(param).get(_NAME)
    if last is not None:
        last.lose()
    setattr(param, _NAME, GradSlot(param, space))


def withdraw(param: nn.Parameter, kept: bool) -> None:
    """Withdraws the offer; ``kept``: the parameter's gradient lies there.

    Raises:
        RuntimeError: when rows were added there to a gradient that is not kept.
    """
    grad_place: GradSlot | None = vars(param).pop(_NAME, None)
    if grad_place is not None and not kept and grad_place.lose():
        raise RuntimeError(
            "rows were added to a tied weight's gradient, and autograd has made another one of it without them: use "
            "the weight in lookups and in one output layer alone"
        )


def _place_of(weight: Tensor) -> GradSlot | None:
    """The offered place of the gradient of ``weight``, of its size and dtype, or None.

    Args:
        weight: a parameter, or a view of a whole parameter.
    """
    # A gradient that is itself differentiated needs separate memory, and compiled code plans its memory itself.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    grad_place: GradSlot | None = getattr(weight if weight._base is None else weight._base, _NAME, None)
    if grad_place is None or not weight.is_contiguous():
        return None
    return grad_place if weight.numel() == grad_place.space.numel() and weight.dtype == grad_place.space.dtype else None


def take(weight: Tensor) -> Tensor | None:
    """The memory offered for a gradient of ``weight``, in its shape and dtype, or None.

    The caller must write the whole gradient there and return it to autograd in the same backward.
    """
    grad_place = _place_of(weight)
    if grad_place is None or not grad_place.accumulates() or not grad_place.claim():
        return None
    return grad_place.hand_over().view(weight.shape)


def add_to(weight: Tensor) -> Tensor | None:
    """The memory with a gradient of ``weight`` that this backward has returned and that may be added to, or None.

    A caller that adds to it must return None to autograd.
    """
    # A hook replaces the sum by another gradient, as if autograd had added up outside the place.
    grad_place = None if weight._backward_hooks else _place_of(weight)
    memory = None if grad_place is None else grad_place.add()
    return None if memory is None else memory.view(weight.shape)


def take_ahead(weight: Tensor) -> GradSlot | None:
    """The place of a gradient computed in the forward pass, or None; backward returns the result of ``hand_over``."""
    grad_place = _place_of(weight)
    return grad_place if grad_place is not None and grad_place.claim() else None
