"""Gradients that backward functions write where the bucket wants them, instead of handing them to autograd.

Autograd keeps a gradient in separate memory, to be copied or added to the bucket; and a C library returns blocks of an
embedding gradient's size to the system, which clears the next block page by page. A function with a ``MainGrad`` for
its weight writes there and returns None, as Megatron-LM's fused accumulation does. Autograd still runs the parameter's
accumulation node, without a gradient, after all functions of a backward have written.

While a step's gradients are open (``FlatBuffer.begin_grads`` to ``complete_grads``) only plain ``backward()`` may be
called: ``torch.autograd.grad`` and ``backward(inputs=...)`` would write the gradients of all weights that they pass,
and return none of them; hooks on a weight see None.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_NAME = "main_grad"


class MainGrad:
    """A parameter's gradient in its bucket. Between ``begin`` and the first write of a step its contents are undefined.

    Args:
        memory: range of the bucket, in the parameter's shape and dtype.

    ``open``: a step accumulates gradients. ``written``: the memory holds the sum of the gradients so far.
    """

    __slots__ = ("_claim", "_waiting", "memory", "open", "written")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.open, self.written = False, True
        self._claim: object | None = None
        self._waiting: Tensor | None = None  # sum of gradients that came while the memory was claimed

    def begin(self) -> None:
        """Open a step's gradients; the memory holds nothing yet."""
        self.open, self.written = True, False
        self._claim = self._waiting = None

    def complete(self) -> None:
        """Close the step's gradients; without any, the memory is zeroed."""
        if not self.written:
            self.memory.zero_() if self._waiting is None else self.memory.copy_(self._waiting)
        self.open, self.written = False, True
        self._claim = self._waiting = None

    def accumulate(self, compute: Callable[[Tensor | None], Tensor]) -> None:
        """Add a gradient.

        Args:
            compute: returns the gradient; may write it to its argument, which is then the memory for it.
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
            self._waiting = gradient.clone() if self._waiting is None else self._waiting.add_(gradient)

    def add_rows(self, index_n: Tensor, rows_nh: Tensor) -> None:
        """Add a gradient that is zero except in some rows, which may repeat."""
        if self.written:
            self.memory.index_add_(0, index_n, rows_nh)
        else:
            self.accumulate(lambda out: _zeros(self.memory, out).index_add_(0, index_n, rows_nh))

    def claim(self) -> object | None:
        """Claim the memory for a gradient that a forward pass computes; None if it is in use. See ``settle``."""
        if not self.open or self.written or self._claim is not None:
            return None
        self._claim = object()
        return self._claim

    def settle(self, claim: object, scale: Callable[[Tensor], None]) -> None:
        """Add the claimed gradient in backward, after scaling it in place.

        Raises:
            RuntimeError: when its step is over, or it was added before.
        """
        if self._claim is not claim or self.written:
            raise RuntimeError(
                "a gradient that was computed in the forward pass has been overwritten: call backward once, between "
                "the beginning of a step's gradients and its end"
            )
        scale(self.memory)
        if self._waiting is not None:
            self.memory.add_(self._waiting)
        self.written, self._claim, self._waiting = True, None, None


def _zeros(like: Tensor, out: Tensor | None) -> Tensor:
    return torch.zeros_like(like) if out is None else out.zero_()


def attach(param: nn.Parameter, memory: Tensor) -> MainGrad:
    """Give a parameter a main gradient."""
    main_grad = MainGrad(memory)
    setattr(param, _NAME, main_grad)
    return main_grad


def detach(param: nn.Parameter) -> None:
    """Take a parameter's main gradient away, so that all its gradients go to autograd."""
    vars(param).pop(_NAME, None)


def main_grad_of(weight: Tensor) -> MainGrad | None:
    """Open main gradient of a weight, for its backward function; None if the gradient must go to autograd.

    Args:
        weight: a parameter, or a contiguous view of a whole parameter.
    """
    # A gradient that is itself differentiated needs separate memory, and compiled code plans its memory itself.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    param = weight if weight._base is None else weight._base
    main_grad: MainGrad | None = getattr(param, _NAME, None)
    if main_grad is None or not main_grad.open or not param.requires_grad or not weight.is_contiguous():
        return None
    return main_grad if weight.numel() == main_grad.memory.numel() else None


def store_grad(weight: Tensor, compute: Callable[[Tensor | None], Tensor]) -> Tensor | None:
    """Add a weight's gradient to its main gradient and return None for autograd, or return it if there is none.

    Args:
        weight: see ``main_grad_of``.
        compute: returns the gradient in the weight's shape; may write it to its argument, unless that is None.
    """
    main_grad = main_grad_of(weight)
    if main_grad is None:
        return compute(None)

    def in_shape_of_param(memory: Tensor | None) -> Tensor:
        return compute(None if memory is None else memory.view(weight.shape)).view(main_grad.memory.shape)

    main_grad.accumulate(in_shape_of_param)
    return None
