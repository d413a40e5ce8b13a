"""gloo groups for tensors on a device, staged through host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.group import Group, Pending


class StagedGroup(Group):
    """A gloo group with operations on tensors of any device, staged through host memory.

    An operation waits until the device has computed its input. Results are on the device after ``Pending.wait``, for
    kernels launched from then on. For links that are slower than the transfer between host and device.
    """

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        staged = _copied(x)
        return _landing(super().all_reduce(staged, op), [(x, staged)])

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        return _through(super().all_gather, out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        return _through(super().reduce_scatter, out, x)

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        return _through(super().all_to_all, out, x)

    def all_to_all_uneven(self, out: Sequence[Tensor], x: Sequence[Tensor]) -> Pending:
        # This rank's own part stays where it is.
        other_ranks = [rank for rank in range(self.size) if rank != self.rank]
        staged, inputs = list(out), list(x)
        for rank in other_ranks:
            staged[rank], inputs[rank] = _room(out[rank]), _copied(x[rank])
        return _landing(super().all_to_all_uneven(staged, inputs), [(out[rank], staged[rank]) for rank in other_ranks])

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
        # The landing keeps the staged tensor alive until the send is done.
        return _landing(super().send(staged, dst, tag), [(staged, staged)])

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Pending:
        staged = _room(x)
        return _landing(super().recv(staged, src, tag), [(x, staged)])


def _room(x: Tensor) -> Tensor:
    """Host memory like ``x``. Not pinned: torch's allocator would keep twice the size of pinned memory."""
    return torch.empty(x.shape, dtype=x.dtype)


def _copied(x: Tensor) -> Tensor:
    return _room(x).copy_(x)


def _through(call: Callable[[Tensor, Tensor], Pending], out: Tensor, x: Tensor) -> Pending:
    """Run an operation from ``x`` to ``out``, staged."""
    staged = _room(out)
    return _landing(call(staged, _copied(x)), [(out, staged)])


def _landing(pending: Pending, landings: Sequence[tuple[Tensor, Tensor]]) -> Pending:
    """Extend the operation to copy the received data to its destination at the end: (out, staged) pairs."""
    before = pending.finish

    def finish() -> None:
        if before is not None:
            before()
        for out, staged in landings:
            out.copy_(staged)

    pending.finish = finish
    return pending
