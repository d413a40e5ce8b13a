"""Observers of a run: traces and experiments.

The hot paths know no observer by name: they call those in ``Ledger.observers``, a list that is empty by default. The
observers are chosen where the engines are built (``megatron/training/observers.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.comm.policy import Position
from megatron.compression.api import Codec, Payload
from megatron.compression.approximation import subtract
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.topology.group import Pending


@dataclass(frozen=True)
class SentMessage:
    """A tensor that was encoded, and what its receiver decodes it with.

    Args:
        point, position: the point, and which message of the step it is.
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
        """The difference between the input and what the receiver decodes; the residual where there is one."""
        left = self.state.get(RESIDUAL)
        if left is not None and left.shape == self.x.shape:
            return left
        error = self.x.clone(memory_format=torch.contiguous_format)
        subtract(self.codec.reconstruct(self.payload, self.x, self.state, self.key), error)
        return error


@dataclass(frozen=True)
class Finding:
    """An observer's report on a step: a record for the JSON lines, and maybe a line for people."""

    kind: str
    values: Mapping[str, Any]
    line: str | None = None


class Observer:
    """The events of a run. Every method does nothing unless an observer overrides it."""

    def begin_step(self, iteration: int) -> None:
        """A step begins (0-based; -1: an evaluation)."""

    def end_step(self) -> None:
        """The step is done on this rank, or launched on its device."""

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """A timed block runs inside."""
        return nullcontext()

    def on_complete(self, name: str, point: Point, pending: Pending) -> None:
        """A communication has completed."""

    def on_send(self, sent: SentMessage) -> None:
        """A message between stages was encoded."""

    def on_receive(self, point: Point, position: Position, x: Tensor) -> None:
        """A message between stages was decoded."""

    def findings(self, iteration: int) -> Iterable[Finding]:
        """Reports of a step, counted from 1. Every rank calls it; the last rank's are written."""
        return ()
