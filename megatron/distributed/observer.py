"""Observers of a run: traces and experiments.

The hot paths call the observers in ``Ledger.observers``, a list that is empty by default. Observers are selected where
the engines are built (``megatron/training/observers.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.compression.api import Codec, Payload, RoundCompressor
from megatron.compression.approximation import subtract
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.group import Pending
from megatron.distributed.policy import Position

C = TypeVar("C", Codec, RoundCompressor)


@dataclass(frozen=True)
class SentMessage:
    """An encoded tensor with the receiver's arguments for decoding.

    Args:
        point, position: the point, and the message's position in the step.
        x: the codec's input, without the loss scale.
        codec, payload, state, key: the arguments of ``Codec.decode``.
    """

    point: Point
    position: Position
    x: Tensor
    codec: Codec
    payload: Payload
    state: CompressorState
    key: Hashable

    def error(self) -> Tensor:
        """Difference between the input and the decoded tensor; the residual if the codec keeps it."""
        residual = self.state.get(RESIDUAL)
        if residual is not None and residual.shape == self.x.shape:
            return residual
        error = self.x.clone(memory_format=torch.contiguous_format)
        subtract(self.codec.reconstruct(self.payload, self.x, self.state, self.key), error)
        return error


@dataclass(frozen=True)
class Finding:
    """An observer's report on a step: a record for the JSON log, and optionally a line for the text log."""

    kind: str
    values: Mapping[str, Any]
    line: str | None = None


class Observer:
    """Base class of observers: callbacks for the events of a run, all no-ops by default.

    ``launches_kernels`` says whether steps with this observer launch other kernels than steps without it.
    """

    launches_kernels = False

    def begin_step(self, iteration: int) -> None:
        """Called when a step begins (0-based; -1: an evaluation)."""

    def end_step(self) -> None:
        """Called when the step is done on this rank, or launched on its device."""

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Context manager around a timed block."""
        return nullcontext()

    def on_complete(self, name: str, point: Point, pending: Pending) -> None:
        """Called when a communication has completed."""

    def audit(self, point: Point, compressor: C) -> C:
        """Called when a tensor is about to be compressed; returns its compressor, or one that wraps it."""
        return compressor

    def on_send(self, sent: SentMessage) -> None:
        """Called when a message between stages has been encoded."""

    def on_receive(self, point: Point, position: Position, x: Tensor) -> None:
        """Called when a message between stages has been decoded."""

    def on_schedule(self, name: str) -> None:
        """Called when the run has chosen the pipeline schedule of the next steps."""

    def findings(self, iteration: int) -> Iterable[Finding]:
        """Reports of a step, counted from 1. Every rank must call it; the last rank's reports are written."""
        return ()


class StepSampler(Observer):
    """Base class of observers that sample compressed tensors in some steps.

    They join the observers for these steps only, since observers slow every operation down.

    Args:
        observers: observers of the run.
    """

    launches_kernels = True

    def __init__(self, observers: list[Observer]) -> None:
        self._observers = observers

    def watch(self, is_needed: bool) -> None:
        """Sample the next step, or stop sampling."""
        if is_needed and self not in self._observers:
            self._observers.append(self)
        elif not is_needed and self in self._observers:
            self._observers.remove(self)
