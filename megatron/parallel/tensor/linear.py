"""Linear layers split over tensor-parallel ranks (Megatron-LM, Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.comm.tensor import TensorComm, leave_parallel_region
from megatron.compression.points import Point
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule, with_partial_grad


class _ColumnLinear(torch.autograd.Function):
    """x @ W^T + b for a slice of W's rows; the input gradient's all-reduce overlaps with the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x_sbh: Tensor, weight: Tensor, bias: Tensor | None, comm: TensorComm) -> Tensor:
        ctx.save_for_backward(x_sbh, weight)
        ctx.comm, ctx.has_bias = comm, bias is not None
        full = comm.gather(x_sbh, Point.TP_FWD) if comm.sequence_parallel else x_sbh
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_sbo: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_sbh, weight = ctx.saved_tensors
        comm: TensorComm = ctx.comm
        gathering = comm.start_gather(x_sbh, Point.TP_BWD) if comm.sequence_parallel else None
        grad_x = grad_sbo @ weight
        full = x_sbh if gathering is None else gathering.wait()
        pending = comm.start_reduce(grad_x, Point.TP_BWD, scatter=comm.sequence_parallel)
        grad_rows = grad_sbo.reshape(-1, grad_sbo.shape[-1])
        grad_weight = grad_rows.t() @ full.reshape(-1, full.shape[-1])
        grad_bias = grad_rows.sum(dim=0) if ctx.has_bias else None
        return pending.wait(), grad_weight, grad_bias, None


class ColumnParallelLinear(ShardedModule):
    """A linear layer split by outputs: (s, b, in) -> (s, b, out / tp).

    Args:
        logical_shape: (out, in), or (parts, out, in) for several stacked projections that are each split, such
            as gate and value of SwiGLU.
        bias: whether to add a bias.
        comm: the tensor-parallel points.
        device, dtype: those of the parameters.
    """

    def __init__(
        self,
        logical_shape: tuple[int, ...],
        bias: bool,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.comm = comm
        dim = len(logical_shape) - 2
        local_out = logical_shape[dim] // comm.size
        local_shape = (*logical_shape[:dim], local_out, logical_shape[-1])
        start = local_out * comm.rank
        self.weight = nn.Parameter(torch.empty(local_shape, device=device, dtype=dtype))
        self.specs["weight"] = ParamSpec(logical_shape, dim, start)
        self.bias = nn.Parameter(torch.zeros(local_shape[:-1], device=device, dtype=dtype)) if bias else None
        if bias:
            self.specs["bias"] = ParamSpec(logical_shape[:-1], dim, start)

    def forward(self, x_sbh: Tensor) -> Tensor:
        weight = self.weight.flatten(0, -2)
        bias = None if self.bias is None else self.bias.flatten()
        if self.comm.size == 1:
            return F.linear(x_sbh, weight, bias)
        result: Tensor = _ColumnLinear.apply(x_sbh, weight, bias, self.comm)
        return result


class RowParallelLinear(ShardedModule):
    """A linear layer split by inputs, whose products are all-reduced: (s, b, in / tp) -> (s, b, out).

    Returns the product without its bias, for the caller to add together with dropout and residual: the bias must be
    added once, after the all-reduce.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.comm = comm
        local_in = in_features // comm.size
        self.weight = nn.Parameter(torch.empty((out_features, local_in), device=device, dtype=dtype))
        self.specs["weight"] = ParamSpec((out_features, in_features), 1, local_in * comm.rank)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        if bias:
            spec = ParamSpec((out_features,))
            self.specs["bias"] = with_partial_grad(spec) if comm.sequence_parallel else spec

    def forward(self, x_sbi: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.comm.size == 1:
            return F.linear(x_sbi, self.weight, self.bias), None
        return leave_parallel_region(F.linear(x_sbi, self.weight), self.comm), self.bias
