"""Compressed all-gather of parameters and sequence-parallel activations."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from megatron.compression.api import Codec, Payload
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group, Pending
from megatron.distributed.ledger import Ledger


class PendingGather:
    """A pending all-gather along dimension 0."""

    def __init__(
        self,
        codec: Codec,
        x: Tensor,
        state: CompressorState,
        key: Hashable,
        group: Group,
        ledger: Ledger,
        point: Point,
        out: Tensor | None = None,
        raw_bytes: int | None = None,
    ) -> None:
        """Start the all-gather.

        ``out``, shaped (n * x.shape[0], ...), receives the result if it is not None. ``raw_bytes`` is the uncompressed
        size, if it differs from the size of ``x``.
        """
        self.codec = codec
        self.shape, self.dtype = x.shape, x.dtype
        self.state, self.key, self.group, self.ledger, self.point = state, key, group, ledger, point
        with ledger.encoding(point):
            wire = ledger.audited(point, codec).encode(x, state, key).wire
        self.out = out
        if out is not None and wire.dtype == x.dtype and wire.shape == x.shape:
            self.wires = out
        else:
            self.wires = wire.new_empty((group.size * wire.shape[0], *wire.shape[1:]))
        self._alive = wire  # until the all-gather has sent it
        self.pending: Pending = group.all_gather(self.wires, wire)
        if group.size > 1:
            raw = x.nbytes if raw_bytes is None else raw_bytes
            ledger.count_message(point, self.pending.sent_bytes, (group.size - 1) * raw)

    def wait(self) -> Tensor:
        """Wait, and return the gathered tensor."""
        self.ledger.wait_for(self.point, self.pending)
        with self.ledger.decoding(self.point):
            result = self.codec.decode_gathered(
                Payload(self.wires), self.group.size, self.shape, self.dtype, self.state, self.key
            )
        if self.out is not None and result.data_ptr() != self.out.data_ptr():
            self.out.copy_(result)
            return self.out
        return result
