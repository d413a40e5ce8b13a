"""Drives one ``RoundCompressor`` over one group: serves its requests and resumes it with the results."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from megatron.comm.ledger import Ledger
from megatron.comm.points import Point
from megatron.compression.api import Aggregate, Op, Request, RoundCompressor
from megatron.compression.state import CompressorState
from megatron.topology.group import Group, Pending, num_bytes


class RoundsInFlight:
    """A sum under way. The first request is communicated at once; ``wait`` drives the rest.

    Args:
        compressor: the algorithm.
        x: this rank's contribution, contiguous; overwritten.
        state: what the algorithm carries between steps.
        group: who sums.
        ledger, point: where the bytes are counted.
        sharded: the caller reads only its own equal share of the (flattened) sum, so a request that allows it
            is served by a reduce-scatter, whose result lies in place in ``x``.
    """

    def __init__(
        self,
        compressor: RoundCompressor,
        x: Tensor,
        state: CompressorState,
        group: Group,
        ledger: Ledger,
        point: Point,
        sharded: bool = False,
    ) -> None:
        self.group = group
        self.ledger = ledger
        self.point = point
        self.sharded = sharded
        self._raw_left = self._raw_bytes(x)
        self._generator: Generator[Request, Tensor, Aggregate] = compressor.rounds(x, state)
        self._aggregate: Aggregate | None = None
        self._resume(None)

    def _resume(self, result: Tensor | None) -> None:
        """Hands the algorithm a result (None: lets it begin) and starts what it asks for next."""
        try:
            request = next(self._generator) if result is None else self._generator.send(result)
        except StopIteration as stop:
            self._aggregate = stop.value
        else:
            self._serve(request)

    def _raw_bytes(self, x: Tensor) -> int:
        """Bytes of the exact sum by a ring, which is what a compressor is compared with."""
        passes = 1 if self.sharded else 2
        return passes * (self.group.size - 1) * num_bytes(x) // self.group.size

    def _serve(self, request: Request) -> None:
        x = request.tensor
        shares = request.shard_only and self.sharded and x.numel() % self.group.size == 0
        if request.op is Op.REDUCE and shares:
            flat = x.view(-1)
            share = flat.numel() // self.group.size
            own = flat[self.group.rank * share : (self.group.rank + 1) * share]
            self._pending, self._result = self.group.reduce_scatter(own, flat), x
        elif request.op is Op.REDUCE:
            self._pending, self._result = self.group.all_reduce(x), x
        elif request.op is Op.GATHER:
            gathered = torch.empty((self.group.size, *x.shape), dtype=x.dtype, device=x.device)
            self._pending, self._result = self.group.all_gather(gathered.view(-1), x.view(-1)), gathered
        else:
            self._pending, self._result = self.group.broadcast(x), x
        if self.group.size > 1:
            self.ledger.sent(self.point, self._pending.sent_bytes, self._raw_left)
            self._raw_left = 0

    def wait(self) -> Aggregate:
        """Finishes all rounds and returns the aggregate."""
        while self._aggregate is None:
            pending: Pending = self._pending
            with self.ledger.waiting(self.point):
                pending.wait()
            self._resume(self._result)
        return self._aggregate
