"""Collectives of tensor and sequence parallelism, and their autograd functions.

A tensor-parallel region begins with f (identity forward, sum backward) and ends with g (sum forward, identity
backward). With sequence parallelism the activations between the regions are split along the sequence: f becomes a
gather and g a reduce-scatter (Korthikanti et al. 2022, section 4.2.2). f is fused into the layers that need it, to
overlap its backward sum with their weight gradients; g is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.comm.gather import GatherInFlight
from megatron.comm.ledger import Ledger
from megatron.comm.points import Point
from megatron.comm.rounds import RoundsInFlight
from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.state import CompressorState
from megatron.topology.group import Group


class SumInFlight:
    """A tensor-parallel sum under way; see ``TensorComm.start_sum``."""

    def __init__(self, rounds: RoundsInFlight | None, x: Tensor, group: Group, scatter: bool) -> None:
        self.rounds, self.x, self.group, self.scatter = rounds, x, group, scatter

    def wait(self) -> Tensor:
        """The sum, or this rank's part of it along dimension 0."""
        total = self.x if self.rounds is None else self.rounds.wait().total
        if not self.scatter:
            return total
        return total.chunk(self.group.size, dim=0)[self.group.rank]


class TensorComm:
    """The tensor-parallel points of one rank.

    Args:
        group: the tensor-parallel ranks.
        ledger: where the bytes are counted.
        rounds: the algorithm that sums activations and their gradients.
        codec: the codec of gathered activations.
        sequence_parallel: activations between parallel regions are split along the sequence.
        asynchronous: backward collectives overlap with the weight gradients' products.
    """

    def __init__(
        self,
        group: Group,
        ledger: Ledger,
        rounds: RoundCompressor,
        codec: Codec,
        sequence_parallel: bool = False,
        asynchronous: bool = True,
    ) -> None:
        self.group = group
        self.ledger = ledger
        self.rounds = rounds
        self.codec = codec
        self.sequence_parallel = sequence_parallel and group.size > 1
        self.asynchronous = asynchronous

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def start_sum(self, x: Tensor, point: Point, scatter: bool = False) -> SumInFlight:
        """Starts summing ``x`` over the group; it may be overwritten.

        Args:
            x: this rank's contribution, contiguous.
            point: TP_FWD or TP_BWD.
            scatter: return only this rank's equal part of dimension 0.
        """
        rounds = None
        if self.group.size > 1:
            rounds = RoundsInFlight(self.rounds, x, CompressorState(), self.group, self.ledger, point, scatter)
        pending = SumInFlight(rounds, x, self.group, scatter)
        if rounds is not None and not self.asynchronous:
            rounds.wait()
        return pending

    def start_gather(self, x: Tensor, point: Point) -> GatherInFlight:
        """Starts concatenating the ranks' ``x`` along dimension 0."""
        return GatherInFlight(self.codec, x, CompressorState(), None, self.group, self.ledger, point)

    def gather(self, x: Tensor, point: Point) -> Tensor:
        """Concatenates the ranks' ``x`` along dimension 0."""
        return x if self.group.size == 1 else self.start_gather(x.contiguous(), point).wait()

    def gather_exact(self, x: Tensor) -> Tensor:
        """Stacks small per-rank results along a new dimension 0; never compressed."""
        out = torch.empty((self.group.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        pending = self.group.all_gather(out, x.contiguous())
        self.ledger.sent(Point.CONTROL, pending.sent_bytes)
        with self.ledger.waiting(Point.CONTROL):
            pending.wait()
        return out.view(self.group.size, *x.shape)

    def own_part(self, x: Tensor) -> Tensor:
        """This rank's equal part of dimension 0 (a view)."""
        return x if self.group.size == 1 else x.chunk(self.group.size, dim=0)[self.group.rank]


class _Reduce(torch.autograd.Function):
    """g: sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: TensorComm) -> Tensor:
        if not x.is_contiguous():
            return comm.start_sum(x.contiguous(), Point.TP_FWD).wait()
        ctx.mark_dirty(x)
        total = comm.start_sum(x, Point.TP_FWD).wait()
        return x if total.data_ptr() == x.data_ptr() else x.copy_(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    """g with sequence parallelism: sum and keep the own part of the sequence; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: TensorComm) -> Tensor:
        ctx.comm = comm
        # The input is a fresh product that no other backward reads, so it may serve as the work space.
        return comm.start_sum(x.contiguous(), Point.TP_FWD, scatter=True).wait().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.gather(grad, Point.TP_BWD), None


def leave_parallel_region(x_sbh: Tensor, comm: TensorComm) -> Tensor:
    """Partial sums out of a tensor-parallel region: summed, and split along the sequence where that is on."""
    if comm.size == 1:
        return x_sbh
    result: Tensor = (_ReduceScatter if comm.sequence_parallel else _Reduce).apply(x_sbh, comm)
    return result
