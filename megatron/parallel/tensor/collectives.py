"""Collectives of tensor and sequence parallelism with autograd.

A tensor-parallel region begins with f (identity forward, all-reduce backward) and ends with g (all-reduce forward,
identity backward). Sequence parallelism splits the activations between regions along the sequence: f becomes an
all-gather and g a reduce-scatter (Korthikanti et al. 2022, section 4.2.2). Linear layers fuse f, to overlap its
backward all-reduce with their weight gradients.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.compression.api import Codec
from megatron.compression.approximation import write
from megatron.compression.identity import IdentityCodec, IdentityRounds
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.distributed.compressed_gather import PendingGather
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.message_seeds import MessageSeeds
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.round_driver import PackedReduction, TensorReduction

_EXACT_ROUNDS = IdentityRounds()
_EXACT_CODEC = IdentityCodec()


@dataclass(eq=False)
class PendingReduce:
    """A pending tensor-parallel all-reduce or reduce-scatter; see ``TensorComm.start_reduce``."""

    reduction: PackedReduction | None
    x: Tensor
    group: Group
    scatter: bool

    def wait(self) -> Tensor:
        """Wait for the result; return it, or with ``scatter`` this rank's chunk of dimension 0."""
        if self.reduction is not None:
            self.reduction.finish()
            write(self.reduction.reductions[0].x, self.x)
        if not self.scatter:
            return self.x
        return self.x.chunk(self.group.size, dim=0)[self.group.rank]


class TensorComm:
    """Tensor-parallel communication of a rank.

    The compressors have no state, because recomputation repeats the forward collectives.

    Args:
        group: tensor-parallel ranks.
        ledger: ledger that counts the bytes.
        plan: plan with the compressors of ``TP_FWD`` and ``TP_BWD``.
        sequence_parallel: whether to split activations between parallel regions along the sequence.
        asynchronous: whether to overlap backward collectives with the matrix products of the weight gradients.
        seeds: seeds of stochastic compressors, shared with the other communication points of the layers.
    """

    def __init__(
        self,
        group: Group,
        ledger: Ledger,
        plan: CompressionPlan,
        sequence_parallel: bool = False,
        asynchronous: bool = True,
        seeds: MessageSeeds | None = None,
    ) -> None:
        self.group = group
        self.ledger = ledger
        self.plan = plan
        self.sequence_parallel = sequence_parallel and group.size > 1
        self.asynchronous = asynchronous
        self.seeds = seeds or MessageSeeds()
        points = (Point.TP_FWD, Point.TP_BWD)
        self._active = dict.fromkeys(points, False)
        self._location: tuple[str, ...] = ()

    def begin_step(self, iteration: int) -> None:
        """Begin a step, or an evaluation (-1)."""
        self.seeds.begin_step(iteration)
        for point in self._active:
            self._active[point] = self.plan.compresses(point, iteration)

    def launch_signature(self, length: int) -> list[Hashable]:
        """Launch signatures of a step's collectives, by point.

        Args:
            length: sequence length of the step, which determines the shapes of reduced tensors.
        """
        signatures: list[Hashable] = []
        for point, active in self._active.items():
            if not active:
                signatures.append((point, None, length))
                continue
            rounds = self.plan.specs[point].registration.rounds
            signature = () if rounds is None else self.plan.rounds(point).launch_signature(CompressorState())
            signatures.append(None if signature is None else (point, self.plan.options(point), signature, length))
        return signatures

    def at(self, location: str) -> TensorComm:
        """Copy for a location in the model, with separate random seeds for its messages."""
        clone = copy(self)
        clone._location = (*self._location, location)
        return clone

    def without_tensor_parallelism(self) -> TensorComm:
        """Communication for layers that are not tensor-parallel: a group of only this rank."""
        return TensorComm(Group(None, (0,), 0, self.group.name, "none"), self.ledger, self.plan)

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def start_reduce(self, x: Tensor, point: Point, scatter: bool = False) -> PendingReduce:
        """Start an all-reduce of ``x`` over the group, or a reduce-scatter.

        Args:
            x: this rank's contribution, contiguous; the result replaces it.
            point: TP_FWD or TP_BWD.
            scatter: whether to return only this rank's chunk of dimension 0.
        """
        if self.group.size == 1:
            return PendingReduce(None, x, self.group, scatter)
        raw = (1 if scatter else 2) * (self.group.size - 1) * x.nbytes // self.group.size
        compressor = self.plan.rounds(point)
        batched = compressor.traits.batched
        if self._active[point] and (not batched or compressor.should_compress(tuple(x.shape))):
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            contribution = (x.unsqueeze(0) if batched else x).to(wide)
            reduction = TensorReduction(compressor, contribution, self._state(point))
        else:
            reduction = TensorReduction(_EXACT_ROUNDS, x, CompressorState())
        packed = PackedReduction([reduction], self.group, self.ledger, point, scatter, raw_bytes=raw)
        if not self.asynchronous:
            packed.wait()
        return PendingReduce(packed, x, self.group, scatter)

    def _state(self, point: Point) -> CompressorState:
        """New compressor state for a single collective."""
        if not self._active[point]:
            return CompressorState()
        return self.seeds.state(point.value, self.group.ranks[0], *self._location)

    def gather_codec(self, point: Point) -> Codec:
        """Codec of all-gathers in this step."""
        return self.plan.codec(point) if self._active[point] else _EXACT_CODEC

    def start_gather(self, x: Tensor, point: Point) -> PendingGather:
        """Start an all-gather of ``x`` along dimension 0. The parts of all ranks are decoded with the same state."""
        return PendingGather(self.gather_codec(point), x, self._state(point), None, self.group, self.ledger, point)

    def gather(self, x: Tensor, point: Point) -> Tensor:
        """All-gather ``x`` along dimension 0."""
        return x if self.group.size == 1 else self.start_gather(x.contiguous(), point).wait()

    def gather_exact(self, x: Tensor) -> Tensor:
        """All-gather a small tensor along a new dimension 0, uncompressed."""
        out = torch.empty((self.group.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        self.ledger.complete(Point.CONTROL, self.group.all_gather(out, x.contiguous()))
        return out.view(self.group.size, *x.shape)

    def all_reduce_max_(self, x: Tensor) -> Tensor:
        """All-reduce a small tensor with MAX in place, uncompressed."""
        if self.group.size > 1:
            self.ledger.complete(Point.CONTROL, self.group.all_reduce(x, dist.ReduceOp.MAX))
        return x

    def local_slice(self, x: Tensor) -> Tensor:
        """This rank's chunk of dimension 0 (a view)."""
        return x if self.group.size == 1 else x.chunk(self.group.size, dim=0)[self.group.rank]


class _Reduce(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: TensorComm) -> Tensor:
        if not x.is_contiguous():
            return comm.start_reduce(x.contiguous(), Point.TP_FWD).wait()
        ctx.mark_dirty(x)
        return comm.start_reduce(x, Point.TP_FWD).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    """g with sequence parallelism: reduce-scatter forward, all-gather backward, along the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: TensorComm) -> Tensor:
        ctx.comm = comm
        # No backward reads the input, so it can be reduced in place.
        return comm.start_reduce(x.contiguous(), Point.TP_FWD, scatter=True).wait().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.gather(grad, Point.TP_BWD), None


class _AllReduceExact(torch.autograd.Function):
    """All-reduce forward, identity backward; never compressed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: TensorComm) -> Tensor:
        return comm.gather_exact(x).sum(dim=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _EnterRegion(torch.autograd.Function):
    """f: identity forward, all-reduce backward; with sequence parallelism, all-gather and reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: TensorComm) -> Tensor:
        ctx.comm = comm
        return comm.gather(x, Point.TP_FWD) if comm.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        comm: TensorComm = ctx.comm
        # Other functions may read this gradient, so the all-reduce overwrites a copy.
        grad_copy = grad.clone(memory_format=torch.contiguous_format)
        return comm.start_reduce(grad_copy, Point.TP_BWD, scatter=comm.sequence_parallel).wait().clone(), None


class _EnterRegionExact(torch.autograd.Function):
    """f for small tensors: never compressed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: TensorComm) -> Tensor:
        ctx.comm = comm
        return comm.gather_exact(x).flatten(0, 1) if comm.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        comm: TensorComm = ctx.comm
        total = comm.gather_exact(grad).sum(dim=0)
        return (comm.local_slice(total) if comm.sequence_parallel else total), None


def enter_parallel_region(x_sbh: Tensor, comm: TensorComm, exact: bool = False) -> Tensor:
    """Enter a tensor-parallel region of layers that do not fuse f; return the complete sequence on every rank.

    The input's gradient is the sum of the ranks' gradients of the result.

    Args:
        x_sbh: activations; this rank's slice of s under sequence parallelism.
        comm: tensor-parallel communication.
        exact: whether to skip compression, for small tensors that must be identical on all ranks.
    """
    if comm.size == 1:
        return x_sbh
    result: Tensor = (_EnterRegionExact if exact else _EnterRegion).apply(x_sbh, comm)
    return result


def all_reduce_exact(x: Tensor, comm: TensorComm) -> Tensor:
    """All-reduce a small tensor, uncompressed. All ranks must use the sum in the same computation."""
    result: Tensor = _AllReduceExact.apply(x, comm)
    return result


def leave_parallel_region(x_sbh: Tensor, comm: TensorComm) -> Tensor:
    """Leave a tensor-parallel region: all-reduce partial sums, or reduce-scatter them with sequence parallelism."""
    if comm.size == 1:
        return x_sbh
    result: Tensor = (_ReduceScatter if comm.sequence_parallel else _Reduce).apply(x_sbh, comm)
    return result
