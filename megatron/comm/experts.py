"""The expert-parallel points: rows of tokens go to the ranks that hold their experts, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.compression.api import Codec, Payload
from megatron.compression.identity import IdentityCodec
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.state import CompressorState
from megatron.topology.group import Group, num_bytes

_EXACT_CODEC = IdentityCodec()


@dataclass(frozen=True)
class Leg:
    """One way of rows between ranks, and the way of their gradients.

    Args:
        forward, backward: the points of the rows and of their gradients.
        sent, received: rows that this rank sends to each rank, and gets from each.
    """

    forward: Point
    backward: Point
    sent: tuple[int, ...]
    received: tuple[int, ...]


class ExpertComm:
    """The expert-parallel points of one rank.

    A message holds the rows of one rank for another one, as the codec encodes them: rows are not compressed together
    with those of other ranks, and this rank's own rows not at all. Codecs keep no state: recomputation runs the forward
    ones again.

    Args:
        group: the ranks that share the experts of each layer.
        ledger: where the bytes are counted.
        plan: the codecs of the four points, and when they are on.
    """

    def __init__(self, group: Group, ledger: Ledger, plan: CompressionPlan) -> None:
        self.group = group
        self.ledger = ledger
        self.plan = plan
        self._on = dict.fromkeys(EXPERT_POINTS, False)
        self._iteration = 0

    @property
    def size(self) -> int:
        """Number of ranks that share the experts."""
        return self.group.size

    def begin(self, iteration: int) -> None:
        """Begins a step; -1 stands for an evaluation."""
        self._iteration = max(iteration, 0)
        for point in self._on:
            covered = self.plan.covers(point, self.plan.stage)
            self._on[point] = covered and self.plan.activation(point).on(iteration)

    def count(self, chosen: Tensor, experts: int, most: int | None = None) -> Tensor:
        """Rows of each expert, int64, from the expert of each row; other numbers are of rows that none takes.

        Args:
            chosen: int64 experts of any shape.
            experts: number of them.
            most: rows that each takes at most, None for any; for those that cannot look at ``chosen``.
        """
        return torch.bincount(chosen.flatten(), minlength=experts)[:experts]

    def exchange_counts(self, counts_re: Tensor) -> Tensor:
        """Rows that each rank has for each of this rank's experts, from those that this rank has for all of them.

        Args:
            counts_re: (ranks, experts of a rank), int64; they go as int32.
        """
        own = counts_re.to(torch.int32)
        result = torch.empty_like(own)
        pending = self.group.exchange(result, own)
        self.ledger.sent(Point.CONTROL, pending.sent_bytes)
        self.ledger.wait(Point.CONTROL, pending)
        return result.to(torch.int64)

    def move(self, rows: Tensor, leg: Leg) -> Tensor:
        """Sends rows (those for the first rank first) and returns those that came, in the order of the ranks.

        Gradients go the other way.
        """
        result: Tensor = _Move.apply(rows, self, leg)
        return result

    def exchange(self, rows: Tensor, point: Point, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends rows and returns those that came, without a gradient; see ``move``."""
        if self.size == 1:
            return rows
        rank = self.group.rank
        # As codecs have activations: tokens, samples, hidden.
        parts = rows.unsqueeze(1).split(list(sent))
        out = rows.new_empty((sum(received), rows.shape[1]))
        places = out.unsqueeze(1).split(list(received))
        with self.ledger.encoding(point):
            wires = [self._encode(part, point) if r != rank else _nothing(rows) for r, part in enumerate(parts)]
            places[rank].copy_(parts[rank])
            buffers = [self._buffer(place, point) if r != rank else _nothing(rows) for r, place in enumerate(places)]
        pending = self.group.exchange_parts([_flat(x) for x in buffers], [_flat(x) for x in wires])
        raw = num_bytes(rows) - num_bytes(parts[rank])
        self.ledger.sent(point, pending.sent_bytes, raw)
        self.ledger.wait(point, pending)
        with self.ledger.decoding(point):
            for r, (place, wire) in enumerate(zip(places, buffers, strict=True)):
                if r != rank and place.numel():
                    place.copy_(self._decode(wire, place, point))
        return out

    def _codec(self, rows: Tensor, point: Point) -> Codec:
        codec = self.plan.codec(point) if self._on[point] else _EXACT_CODEC
        return codec if codec.should_compress(rows.shape, rows.dtype) else _EXACT_CODEC

    def _state(self) -> CompressorState:
        """A state for one message, with the iteration in it, so that each iteration draws other noise."""
        return CompressorState(counters=dict.fromkeys(("draws", "messages"), self._iteration))

    def _encode(self, rows: Tensor, point: Point) -> Tensor:
        if not rows.numel():
            return _nothing(rows)
        codec = self._codec(rows, point)
        return codec.encode(rows.to(_input_dtype(codec, rows.dtype)), self._state(), None).wire

    def _buffer(self, rows: Tensor, point: Point) -> Tensor:
        if not rows.numel():
            return _nothing(rows)
        codec = self._codec(rows, point)
        dtype = _input_dtype(codec, rows.dtype)
        return codec.empty_payload(rows.shape, dtype, rows.device, self._state(), None).wire

    def _decode(self, wire: Tensor, rows: Tensor, point: Point) -> Tensor:
        codec = self._codec(rows, point)
        return codec.decode(Payload(wire), rows.shape, _input_dtype(codec, rows.dtype), self._state(), None)


class _Move(torch.autograd.Function):
    """Rows to their experts' ranks or back; their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: ExpertComm, leg: Leg) -> Tensor:
        ctx.comm, ctx.leg = comm, leg
        return comm.exchange(rows.contiguous(), leg.forward, leg.sent, leg.received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        leg: Leg = ctx.leg
        return ctx.comm.exchange(grad.contiguous(), leg.backward, leg.received, leg.sent), None, None


def _input_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """Dtype of what a codec is given: fp32 (or fp64), or for an exact one that of the rows."""
    return dtype if codec.traits.exact else torch.promote_types(dtype, torch.float32)


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)


def _flat(wire: Tensor) -> Tensor:
    """The bytes of a message, which may have any type."""
    return wire.view(-1).view(torch.uint8) if wire.numel() else wire
