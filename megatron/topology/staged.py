"""Groups over gloo for tensors on a device, which travel through the machine's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.topology.group import Group, Pending


class StagedGroup(Group):
    """A group over gloo whose operations take tensors of any device, by copies in the machine's memory.

    An operation waits until the device has computed what it sends. Results are on the device after ``Pending.wait``:
    what is launched there from then on sees them. For links that are slower than the way to the device.
    """

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        staged = _copied(x)
        return _landing(super().all_reduce(staged, op), [(x, staged)])

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        return _through(super().all_gather, out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        return _through(super().reduce_scatter, out, x)

    def exchange(self, out: Tensor, x: Tensor) -> Pending:
        return _through(super().exchange, out, x)

    def exchange_parts(self, out: Sequence[Tensor], x: Sequence[Tensor]) -> Pending:
        # The own part stays where it is.
        others = [rank for rank in range(self.size) if rank != self.rank]
        staged, given = list(out), list(x)
        for rank in others:
            staged[rank], given[rank] = _room(out[rank]), _copied(x[rank])
        return _landing(super().exchange_parts(staged, given), [(out[rank], staged[rank]) for rank in others])

    def broadcast(self, x: Tensor, src: int = 0) -> Pending:
        staged = _copied(x) if self.rank == src else _room(x)
        return _landing(super().broadcast(staged, src), [(x, staged)] if self.rank != src else [])

    def collect(self, out: Tensor, x: Tensor) -> Pending:
        staged = _room(out)
        return _landing(super().collect(staged, _copied(x)), [(out, staged)] if self.rank == 0 else [])

    def distribute(self, x: Tensor) -> Pending:
        staged = _copied(x) if self.rank == 0 else _room(x)
        return _landing(super().distribute(staged), [(x, staged)] if self.rank != 0 else [])

    def send(self, x: Tensor, dst: int, tag: int = 0) -> Pending:
        staged = _copied(x)
        # A landing keeps what is sent alive until then.
        return _landing(super().send(staged, dst, tag), [(staged, staged)])

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Pending:
        staged = _room(x)
        return _landing(super().recv(staged, src, tag), [(x, staged)])


def _room(x: Tensor) -> Tensor:
    """Memory of the machine like ``x``. Not page-locked, of which torch's allocator would keep twice as much."""
    return torch.empty(x.shape, dtype=x.dtype)


def _copied(x: Tensor) -> Tensor:
    return _room(x).copy_(x)


def _through(call: Callable[[Tensor, Tensor], Pending], out: Tensor, x: Tensor) -> Pending:
    """An operation from ``x`` to ``out``."""
    staged = _room(out)
    return _landing(call(staged, _copied(x)), [(out, staged)])


def _landing(pending: Pending, landings: Sequence[tuple[Tensor, Tensor]]) -> Pending:
    """The operation, which in the end copies what has come to where it was asked for: (out, staged) each."""
    before = pending.finish

    def finish() -> None:
        if before is not None:
            before()
        for out, staged in landings:
            out.copy_(staged)

    pending.finish = finish
    return pending
