"""Gradients that backward functions write directly to the bucket, without autograd.

Autograd stores a gradient in separate memory, which must be copied or added to the bucket. The C library returns memory
of that size to the system, which clears it page by page for the next gradient. A backward function with a ``MainGrad``
for its weight writes to the bucket and returns None, like Megatron-LM's fused accumulation. Autograd still runs the
parameter's accumulation node, without a gradient, after all functions of a backward have written.

A schedule may compute weight gradients apart from the input gradients (``WeightGrads``): backward functions then only
record them.

From ``FlatBuffer.begin_grads`` to ``complete_grads``, only plain ``backward()`` is supported: ``torch.autograd.grad``
and ``backward(inputs=...)`` would write the gradients of all weights in the graph and return none of them, and hooks on
a weight receive None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ATTRIBUTE = "main_grad"
_CONVERTED_ELEMENTS = 1 << 18
"""Elements per conversion, few enough to stay in the CPU cache until they are added."""

Compute = Callable[[Sequence[Tensor] | None, Sequence[Tensor]], Sequence[Tensor]]
"""(memory, inputs) -> the gradients of some weights, in their shapes. It may write them to ``memory``, if not None."""


class WeightGrads:
    """Weight gradients of backward passes that only record them, for weight passes that compute them later.

    The previous pipeline stage waits only for the gradients of inputs (zero bubble schedules, Qi et al. 2024, section
    2). A record holds a layer's input, gathered under sequence parallelism, and the gradient of its output; their 8-bit
    numbers where the weight's gradient is a product of these.

    ``separate``: whether the schedule of this rank's running step has weight passes.
    """

    def __init__(self) -> None:
        self.separate = False
        self._records: dict[Hashable, list[_Record]] = {}
        self._recording: list[_Record] | None = None

    def begin_step(self, separate: bool) -> None:
        """Begin a step; forget the records of an abandoned step."""
        self.separate = separate
        self._records.clear()

    @contextmanager
    def recording(self, key: Hashable) -> Iterator[None]:
        """Record weight gradients inside the context, a backward pass, under a key."""
        self._recording = self._records[key] = []
        try:
            yield
        finally:
            self._recording = None

    def record(self, main_grads: Sequence[MainGrad], inputs: Sequence[Tensor], compute: Compute) -> bool:
        """Record weight gradients; return False, without an effect, outside ``recording``."""
        if self._recording is None:
            return False
        # Without its history, an input keeps no other tensor of the graph alive.
        self._recording.append(_Record(main_grads, [x.detach() for x in inputs], compute))
        for main_grad in main_grads:
            main_grad.num_recorded += 1
        return True

    def tensors(self, key: Hashable) -> Iterator[Tensor]:
        """Tensors that are recorded under a key."""
        for record in self._records[key]:
            yield from record.inputs

    @torch.no_grad()
    def compute(self, key: Hashable) -> None:
        """Compute the gradients that were recorded under a key, and add them to the main gradients."""
        records = self._records.pop(key)
        records.reverse()
        while records:  # frees the memory of each record
            record = records.pop()
            add_grads(record.main_grads, record.inputs, record.compute)
            for main_grad in record.main_grads:
                main_grad.num_recorded -= 1
                main_grad.on_added()


@dataclass(frozen=True, eq=False)
class _Record:
    """Weight gradients to compute."""

    main_grads: Sequence[MainGrad]
    inputs: Sequence[Tensor]
    compute: Compute


class MainGrad:
    """Gradient of a parameter in its bucket; undefined from ``begin_step`` to the first write.

    Args:
        memory: range of the bucket, in the parameter's shape.
        weight_grads: records of the parameter's gradients.
        direct: whether ``memory`` has the parameter's dtype.
        on_added: called after a recorded gradient has been added.

    ``open``: whether a step accumulates gradients, so that backward functions may write to ``memory``. ``written``:
    whether ``memory`` holds the sum of the step's gradients so far. ``num_recorded``: number of gradients that are
    recorded and not yet added.
    """

    __slots__ = ("_claim", "_unclaimed_sum", "direct", "memory", "num_recorded", "on_added", "open", "weight_grads",
                 "written")  # fmt: skip

    def __init__(self, memory: Tensor, weight_grads: WeightGrads, direct: bool, on_added: Callable[[], None]) -> None:
        self.memory, self.weight_grads, self.direct, self.on_added = memory, weight_grads, direct, on_added
        self.open, self.written = False, True
        self.num_recorded = 0
        self._claim: object | None = None
        self._unclaimed_sum: Tensor | None = None  # of gradients added while the memory was claimed

    def begin_step(self) -> None:
        """Begin the gradients of a step."""
        self.open, self.written = self.direct, False
        self._claim = self._unclaimed_sum = None

    def end_step(self) -> None:
        """End the gradients of a step; zero the memory if there was no gradient."""
        if not self.written:
            self.memory.zero_() if self._unclaimed_sum is None else self.memory.copy_(self._unclaimed_sum)
        self.open, self.written = False, True
        self._claim = self._unclaimed_sum = None

    @property
    def free_memory(self) -> Tensor | None:
        """Memory for the step's first gradient; None if it is in use or has another dtype."""
        return self.memory if self.direct and not self.written and self._claim is None else None

    def add(self, grad: Tensor) -> None:
        """Add a gradient, which may have been computed in ``free_memory``."""
        if self.written:
            # Another dtype is added in chunks: on a CPU, torch would convert a copy of the complete gradient.
            if self.direct or not self.memory.is_cpu:
                self.memory.add_(grad)
                return
            flat, addends = self.memory.view(-1), grad.reshape(-1)
            for start in range(0, flat.numel(), _CONVERTED_ELEMENTS):
                chunk = slice(start, start + _CONVERTED_ELEMENTS)
                flat[chunk].add_(addends[chunk])
        elif self._claim is not None:
            self._unclaimed_sum = grad.clone() if self._unclaimed_sum is None else self._unclaimed_sum.add_(grad)
        else:
            if grad.data_ptr() != self.memory.data_ptr():
                self.memory.copy_(grad)
            self.written = True

    def add_rows(self, index_n: Tensor, rows_nh: Tensor) -> None:
        """Add a gradient that is zero outside some rows; rows may repeat."""
        if self.written:
            self.memory.index_add_(0, index_n, rows_nh)
        else:
            free = self.free_memory
            grad = torch.zeros_like(self.memory) if free is None else free.zero_()
            self.add(grad.index_add_(0, index_n, rows_nh))

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
        if self._unclaimed_sum is not None:
            self.memory.add_(self._unclaimed_sum)
        self.written, self._claim, self._unclaimed_sum = True, None, None


def add_grads(main_grads: Sequence[MainGrad], inputs: Sequence[Tensor], compute: Compute) -> None:
    """Compute gradients, in their memory if all of it is free, and add them to the main gradients."""
    free = [memory for main_grad in main_grads if (memory := main_grad.free_memory) is not None]
    grads = compute(free if len(free) == len(main_grads) else None, inputs)
    for main_grad, grad in zip(main_grads, grads, strict=True):
        main_grad.add(grad.view(main_grad.memory.shape))


def attach_main_grad(param: nn.Parameter, main_grad: MainGrad) -> None:
    """Attach a main gradient to a parameter."""
    setattr(param, _ATTRIBUTE, main_grad)


def detach_main_grad(param: nn.Parameter) -> None:
    """Detach the main gradient from a parameter, so that autograd stores all its gradients."""
    vars(param).pop(_ATTRIBUTE, None)


def _attached_main_grad(weight: Tensor) -> MainGrad | None:
    param = weight if weight._base is None else weight._base
    main_grad: MainGrad | None = getattr(param, _ATTRIBUTE, None)
    if main_grad is None or not param.requires_grad or not weight.is_contiguous():
        return None
    return main_grad if weight.numel() == main_grad.memory.numel() else None


def records_grad(weight: Tensor) -> bool:
    """Whether the weight's gradient will be recorded in backward: the schedule has weight passes."""
    main_grad = _attached_main_grad(weight)
    return main_grad is not None and main_grad.weight_grads.separate


def main_grad_of(weight: Tensor) -> MainGrad | None:
    """Main gradient of a weight, for its backward function; None if the function must return the gradient.

    Args:
        weight: a parameter, or a contiguous view of a complete parameter.
    """
    # A gradient for higher derivatives needs separate memory, and compiled code manages its memory itself.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    main_grad = _attached_main_grad(weight)
    return main_grad if main_grad is not None and main_grad.open else None


def store_grads(weights: Sequence[Tensor], inputs: Sequence[Tensor], compute: Compute) -> Sequence[Tensor | None]:
    """Record the gradients or add them to the main gradients, and return None for each weight; return the gradients
    themselves if a weight has no main gradient to write to.

    Args:
        weights: see ``main_grad_of``. Tensors that autograd has saved may be copies without a main gradient.
        inputs: inputs of ``compute``, which may run after the backward function: they must not change.
        compute: computes the gradients.
    """
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        main_grads = [main_grad for weight in weights if (main_grad := _attached_main_grad(weight)) is not None]
        if len(main_grads) == len(weights):
            shapes = [weight.shape for weight in weights]

            def compute_in_shape(memory: Sequence[Tensor] | None, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
                if memory is None:
                    return compute(None, inputs)
                return compute([out.view(shape) for out, shape in zip(memory, shapes, strict=True)], inputs)

            nothing = [None] * len(weights)
            if main_grads[0].weight_grads.record(main_grads, inputs, compute_in_shape):
                return nothing
            if all(main_grad.open for main_grad in main_grads):
                add_grads(main_grads, inputs, compute_in_shape)
                return nothing
    return compute(None, inputs)


def store_grad(
    weight: Tensor, inputs: Sequence[Tensor], compute: Callable[[Tensor | None, Sequence[Tensor]], Tensor]
) -> Tensor | None:
    """Store a single gradient; see ``store_grads``."""
    (grad,) = store_grads(
        [weight], inputs, lambda memory, inputs: [compute(None if memory is None else memory[0], inputs)]
    )
    return grad
