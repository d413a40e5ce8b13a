"""Messages between pipeline stages: activations forward, their gradients backward, through a codec.

Receives are posted ahead of their use and sends are left to complete in the background, so both overlap with
compute. A message is addressed by its boundary (the number of the earlier of the two virtual stages).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.comm.points import Point
from megatron.comm.policy import CompressionPlan, Position
from megatron.compression.api import Codec, Payload
from megatron.compression.state import CompressorState
from megatron.topology.group import Group, Pending, num_bytes


@dataclass
class _Direction:
    """One way along the pipeline: who is sent to, who is received from, and what encodes the messages."""

    point: Point
    group: Group
    send_to: int
    recv_from: int
    codec: Codec
    posted: dict[tuple[int, int], tuple[Payload, Pending]]
    sending: deque[tuple[Payload, Pending]]
    states: dict[int, CompressorState]

    def state(self, boundary: int) -> CompressorState:
        return self.states.setdefault(boundary, CompressorState())


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
        self.ledger = ledger
        self.shape = shape
        self.dtype = dtype
        self.device = device
        rank, size = forward_link.rank, forward_link.size
        following, previous = (rank + 1) % size, (rank - 1) % size

        def direction(point: Point, group: Group, send_to: int, recv_from: int) -> _Direction:
            return _Direction(point, group, send_to, recv_from, plan.codec(point), {}, deque(), {})

        self.forward = direction(Point.PP_FWD, forward_link, following, previous)
        self.backward = direction(Point.PP_BWD, backward_link, previous, following)

    def send(self, way: _Direction, x: Tensor, position: Position, key: Hashable) -> None:
        """Starts sending ``x`` over a boundary."""
        payload = way.codec.encode(x.detach(), way.state(position.boundary), key)
        pending = way.group.send(payload.wire, way.send_to, tag=position.boundary)
        self.ledger.sent(way.point, payload.nbytes, num_bytes(x))
        way.sending.append((payload, pending))
        while way.sending and way.sending[0][1].done():
            way.sending.popleft()[1].wait()

    def post(self, way: _Direction, position: Position) -> None:
        """Starts receiving the message of a position, unless that was done already."""
        slot = (position.boundary, position.micro_batch)
        if slot not in way.posted:
            payload = way.codec.empty_payload(self.shape, self.dtype, self.device)
            way.posted[slot] = (payload, way.group.recv(payload.wire, way.recv_from, tag=position.boundary))

    def recv(self, way: _Direction, position: Position, key: Hashable) -> Tensor:
        """Waits for the message of a position and decodes it."""
        self.post(way, position)
        payload, pending = way.posted.pop((position.boundary, position.micro_batch))
        with self.ledger.waiting(way.point):
            pending.wait()
        return way.codec.decode(payload, self.shape, self.dtype, way.state(position.boundary), key)

    def flush(self, keep: int = 0) -> None:
        """Waits until all but ``keep`` messages of each direction have left."""
        for way in (self.forward, self.backward):
            while len(way.sending) > keep:
                with self.ledger.waiting(way.point):
                    way.sending.popleft()[1].wait()
