"""Messages between pipeline stages: activations forward, their gradients backward, through a codec.

Receives are posted ahead of their use and sends are left to complete in the background, so both overlap with
compute. A message is addressed by its boundary (the number of the earlier of the two virtual stages).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.comm.error_probe import ErrorProbe
from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan, Position
from megatron.compression.api import Codec, Payload
from megatron.compression.approximation import subtract
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.identity import IdentityCodec
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.topology.group import Group, Pending, num_bytes

_IDENTITY = IdentityCodec()


@dataclass
class Direction:
    """One way along the pipeline: who is sent to and who is received from, and the ends of its boundaries."""

    point: Point
    group: Group
    send_to: int
    recv_from: int
    posted: dict[tuple[int, int], tuple[Payload, Pending]] = field(default_factory=dict)
    sending: deque[tuple[Payload, Pending]] = field(default_factory=deque)
    sent: dict[int, CompressorState] = field(default_factory=dict)
    received: dict[int, CompressorState] = field(default_factory=dict)


class PipelineChannel:
    """Both directions of this rank's pipeline traffic.

    Args:
        forward_link, backward_link: the pipeline's ranks, one group per direction.
        plan: the compressors of ``PP_FWD`` and ``PP_BWD``.
        ledger: where the bytes are counted.
        shape: of one micro-batch's activation on this rank, (sequence, batch, hidden).
        dtype, device: of activations and their gradients.
    """

    def __init__(
        self,
        forward_link: Group,
        backward_link: Group,
        plan: CompressionPlan,
        ledger: Ledger,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.ledger = ledger
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.probe: ErrorProbe | None = None
        self._scale = 1.0
        rank, size = forward_link.rank, forward_link.size
        following, previous = (rank + 1) % size, (rank - 1) % size

        def direction(point: Point, group: Group, send_to: int, recv_from: int) -> Direction:
            return Direction(point, group, send_to, recv_from)

        self.forward = direction(Point.PP_FWD, forward_link, following, previous)
        self.backward = direction(Point.PP_BWD, backward_link, previous, following)

    def begin(self, scale: float) -> None:
        """A step begins, whose gradients carry the loss scale ``scale``; residuals that last a step start afresh."""
        self._scale = scale
        for way in (self.forward, self.backward):
            spec = self.plan.specs.get(way.point)
            if spec is not None and spec.feedback == "lazy-reset":
                for state in way.sent.values():
                    state.tensors.pop(RESIDUAL, None)

    def states(self) -> Iterator[CompressorState]:
        """What the codecs remember at this rank's ends of the boundaries."""
        for way in (self.forward, self.backward):
            yield from (*way.sent.values(), *way.received.values())

    def residuals(self) -> Iterator[tuple[Point, str, CompressorState]]:
        """Point, name and state of this rank's senders."""
        for way in (self.forward, self.backward):
            for boundary, state in way.sent.items():
                yield way.point, f"boundary {boundary}", state

    def _codec(self, way: Direction, position: Position) -> Codec:
        """The codec of one message, which both of its ends derive alike."""
        sender = position.boundary + (way.point is Point.PP_BWD)
        covered = self.plan.covers(way.point, sender % self.plan.stages)
        on = covered and self.plan.activation(way.point).on(position.iteration, position.epilogue)
        codec = self.plan.codec(way.point) if on else _IDENTITY
        # Decided here, as codecs are given wider numbers than those that would be sent without them.
        return codec if codec.pays(self.shape, self.dtype) else _IDENTITY

    def _unscaled(self, way: Direction, codec: Codec) -> tuple[torch.dtype, float]:
        """What a codec is given: fp32 (or fp64) numbers unless it takes any, and gradients without the loss scale."""
        if codec.exact or (way.point is Point.PP_FWD and not codec.widened):
            return self.dtype, 1.0
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return wide, self._scale if way.point is Point.PP_BWD else 1.0

    def send(self, way: Direction, x: Tensor, position: Position, key: Hashable) -> None:
        """Starts sending ``x`` over a boundary."""
        codec = self._codec(way, position)
        dtype, scale = self._unscaled(way, codec)
        with self.ledger.encoding(way.point):
            wide = x.detach().to(dtype)
            state = way.sent.setdefault(position.boundary, CompressorState())
            wide = wide if scale == 1.0 else wide / scale
            payload = codec.encode(wide, state, key)
        if self.probe is not None and way is self.backward and not codec.exact:
            left = state.get(RESIDUAL)
            whole = left is not None and left.shape == wide.shape
            if whole and left is not None:
                error = left
            else:
                error = wide.clone(memory_format=torch.contiguous_format)
                subtract(codec.reconstruct(payload, wide, state, key), error)
            self.probe.error(position.boundary, position.micro_batch, error)
        pending = way.group.send(payload.wire, way.send_to, tag=position.boundary)
        self.ledger.sent(way.point, payload.nbytes, num_bytes(x))
        way.sending.append((payload, pending))
        while way.sending and way.sending[0][1].done():
            self.ledger.wait(way.point, way.sending.popleft()[1])

    def expect(self, way: Direction, position: Position, key: Hashable) -> None:
        """Something will soon be sent from a position."""
        state = way.sent.setdefault(position.boundary, CompressorState())
        self._codec(way, position).expect(self.shape, state, key)

    def post(self, way: Direction, position: Position, key: Hashable) -> None:
        """Starts receiving the message of a position, unless that was done already."""
        slot = (position.boundary, position.micro_batch)
        if slot not in way.posted:
            codec = self._codec(way, position)
            state = way.received.setdefault(position.boundary, CompressorState())
            dtype, _ = self._unscaled(way, codec)
            payload = codec.empty_payload(self.shape, dtype, self.device, state, key)
            way.posted[slot] = (payload, way.group.recv(payload.wire, way.recv_from, tag=position.boundary))

    def recv(self, way: Direction, position: Position, key: Hashable) -> Tensor:
        """Waits for the message of a position and decodes it."""
        self.post(way, position, key)
        payload, pending = way.posted.pop((position.boundary, position.micro_batch))
        self.ledger.wait(way.point, pending)
        codec = self._codec(way, position)
        dtype, scale = self._unscaled(way, codec)
        with self.ledger.decoding(way.point):
            x = codec.decode(payload, self.shape, dtype, way.received[position.boundary], key)
            x = (x if scale == 1.0 else x * scale).to(self.dtype)
        if self.probe is not None and way is self.forward and position.iteration >= 0:
            self.probe.activation(position.boundary, position.micro_batch, x)
        return x

    def flush(self, keep: int = 0) -> None:
        """Waits until all but ``keep`` messages of each direction have left."""
        for way in (self.forward, self.backward):
            while len(way.sending) > keep:
                self.ledger.wait(way.point, way.sending.popleft()[1])
