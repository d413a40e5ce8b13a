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
        staged = _copy_to_host(x)
        return _copy_back_at_end(super().all_reduce(staged, op), [(x, staged)])

    def all_reduce_numbers(self, x: Tensor) -> Pending:
        staged = _copy_to_host(x)
        return _copy_back_at_end(super().all_reduce_numbers(staged), [(x, staged)])

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        return _stage(super().all_gather, out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        return _stage(super().reduce_scatter, out, x)

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        return _stage(super().all_to_all, out, x)

    def all_to_all_uneven(self, out: Sequence[Tensor], x: Sequence[Tensor]) -> Pending:
        # This rank's own part stays where it is.
        other_ranks = [rank for rank in range(self.size) if rank != self.rank]
        staged, inputs = list(out), list(x)
        for rank in other_ranks:
            staged[rank], inputs[rank] = _host_memory_like(out[rank]), _copy_to_host(x[rank])
        return _copy_back_at_end(
            super().all_to_all_uneven(staged, inputs), [(out[rank], staged[rank]) for rank in other_ranks]
        )

    def broadcast(self, x: Tensor, src: int = 0) -> Pending:
        staged = _copy_to_host(x) if self.rank == src else _host_memory_like(x)
        return _copy_back_at_end(super().broadcast(staged, src), [(x, staged)] if self.rank != src else [])

    def collect(self, out: Tensor, x: Tensor) -> Pending:
        staged = _host_memory_like(out)
        return _copy_back_at_end(super().collect(staged, _copy_to_host(x)), [(out, staged)] if self.rank == 0 else [])

    def distribute(self, x: Tensor) -> Pending:
        staged = _copy_to_host(x) if self.rank == 0 else _host_memory_like(x)
        return _copy_back_at_end(super().distribute(staged), [(x, staged)] if self.rank != 0 else [])

    def send(self, x: Tensor, dst: int, tag: int = 0) -> Pending:
        staged = _copy_to_host(x)
        # The copy at the end keeps the staged tensor alive until the send is done.
        return _copy_back_at_end(super().send(staged, dst, tag), [(staged, staged)])

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Pending:
        staged = _host_memory_like(x)
        return _copy_back_at_end(super().recv(staged, src, tag), [(x, staged)])


def _host_memory_like(x: Tensor) -> Tensor:
    """Allocate host memory like ``x``. Not pinned: torch's allocator would keep twice the size of pinned memory."""
    return torch.empty(x.shape, dtype=x.dtype)


def _copy_to_host(x: Tensor) -> Tensor:
    return _host_memory_like(x).copy_(x)


def _stage(call: Callable[[Tensor, Tensor], Pending], out: Tensor, x: Tensor) -> Pending:
    """Run an operation from ``x`` to ``out``, staged."""
    staged = _host_memory_like(out)
    return _copy_back_at_end(call(staged, _copy_to_host(x)), [(out, staged)])


def _copy_back_at_end(pending: Pending, copies: Sequence[tuple[Tensor, Tensor]]) -> Pending:
    """Extend the operation to copy the received data to its destination at the end: (out, staged) pairs."""
    before = pending.finish

    def finish() -> None:
        if before is not None:
            before()
        for out, staged in copies:
            out.copy_(staged)

    pending.finish = finish
    return pending
