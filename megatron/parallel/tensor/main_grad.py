"""Gradients that backward functions write directly to the bucket, without autograd.

Autograd stores a gradient in separate memory, which must be copied or added to the bucket. The C library returns memory
of that size to the system, which clears it page by page for the next gradient. A backward function with a ``MainGrad``
for its weight writes to the bucket and returns None, like Megatron-LM's fused accumulation. Autograd still runs the
parameter's accumulation node, without a gradient, after all functions of a backward have written.

From ``FlatBuffer.begin_grads`` to ``complete_grads``, only plain ``backward()`` is supported: ``torch.autograd.grad``
and ``backward(inputs=...)`` would write the gradients of all weights in the graph and return none of them, and hooks on
a weight receive None.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_ATTRIBUTE = "main_grad"


class MainGrad:
    """Gradient of a parameter in its bucket; undefined from ``begin_step`` to the first write.

    Args:
        memory: range of the bucket, in the parameter's shape and dtype.

    ``open``: a step accumulates gradients. ``written``: ``memory`` holds the sum of the step's gradients so far.
    """

    __slots__ = ("_claim", "_deferred", "memory", "open", "written")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.open, self.written = False, True
        self._claim: object | None = None
        self._deferred: Tensor | None = None  # sum of gradients added while the memory was claimed

    def begin_step(self) -> None:
        """Begin the gradients of a step."""
        self.open, self.written = True, False
        self._claim = self._deferred = None

    def end_step(self) -> None:
        """End the gradients of a step; zero the memory if there was no gradient."""
        if not self.written:
            self.memory.zero_() if self._deferred is None else self.memory.copy_(self._deferred)
        self.open, self.written = False, True
        self._claim = self._deferred = None

    def accumulate(self, compute: Callable[[Tensor | None], Tensor]) -> None:
        """Add a gradient.

        Args:
            compute: returns the gradient. If its argument is not None, it may write the gradient there.
        """
        if self.written:
            self.memory.add_(compute(None))
        elif self._claim is None:
            gradient = compute(self.memory)
            if gradient.data_ptr() != self.memory.data_ptr():
                self.memory.copy_(gradient)
            self.written = True
        else:
            gradient = compute(None)
            self._deferred = gradient.clone() if self._deferred is None else self._deferred.add_(gradient)

    def add_rows(self, index_n: Tensor, rows_nh: Tensor) -> None:
        """Add a gradient that is zero outside some rows; rows may repeat."""
        if self.written:
            self.memory.index_add_(0, index_n, rows_nh)
        else:
            memory = self.memory
            self.accumulate(
                lambda out: (torch.zeros_like(memory) if out is None else out.zero_()).index_add_(0, index_n, rows_nh)
            )

    def claim(self) -> object | None:
        """Claim the memory for a gradient computed in a forward pass; None if it is in use. See ``add_claimed``."""
        if not self.open or self.written or self._claim is not None:
            return None
        self._claim = object()
        return self._claim

    def add_claimed(self, claim: object, scale: Callable[[Tensor], None]) -> None:
        """Add the claimed gradient in backward, after scaling it in place.

        Raises:
            RuntimeError: when the step of the claim has ended, or the gradient was added before.
        """
        if self._claim is not claim or self.written:
            raise RuntimeError(
                "a gradient that was computed in the forward pass has been overwritten: call backward once, between "
                "begin_grads and complete_grads"
            )
        scale(self.memory)
        if self._deferred is not None:
            self.memory.add_(self._deferred)
        self.written, self._claim, self._deferred = True, None, None


def attach_main_grad(param: nn.Parameter, memory: Tensor) -> MainGrad:
    """Attach a main gradient to a parameter."""
    main_grad = MainGrad(memory)
    setattr(param, _ATTRIBUTE, main_grad)
    return main_grad


def detach_main_grad(param: nn.Parameter) -> None:
    """Detach the main gradient from a parameter, so that autograd stores all its gradients."""
    vars(param).pop(_ATTRIBUTE, None)


def main_grad_of(weight: Tensor) -> MainGrad | None:
    """Main gradient of a weight, for its backward function; None if the function must return the gradient.

    Args:
        weight: a parameter, or a contiguous view of a complete parameter.
    """
    # A gradient for higher derivatives needs separate memory, and compiled code manages its memory itself.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    param = weight if weight._base is None else weight._base
    main_grad: MainGrad | None = getattr(param, _ATTRIBUTE, None)
    if main_grad is None or not main_grad.open or not param.requires_grad or not weight.is_contiguous():
        return None
    return main_grad if weight.numel() == main_grad.memory.numel() else None


def store_grad(weight: Tensor, compute: Callable[[Tensor | None], Tensor]) -> Tensor | None:
    """Add the gradient to the weight's main gradient and return None; without a main gradient, return the gradient.

    Args:
        weight: see ``main_grad_of``.
        compute: returns the gradient in the weight's shape. If its argument is not None, it may write there.
    """
    main_grad = main_grad_of(weight)
    if main_grad is None:
        return compute(None)

    def compute_flat(memory: Tensor | None) -> Tensor:
        return compute(None if memory is None else memory.view(weight.shape)).view(main_grad.memory.shape)

    main_grad.accumulate(compute_flat)
    return None
