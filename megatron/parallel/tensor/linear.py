"""Linear layers split over tensor-parallel ranks (Megatron-LM, Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compression.points import Point
from megatron.kernels.fp8 import fits
from megatron.kernels.products import multiplies
from megatron.parallel.tensor.collectives import TensorComm, leave_parallel_region
from megatron.parallel.tensor.main_grad import records_grad, store_grad
from megatron.parallel.tensor.products import EXACT, LinearProducts, Recipe, make_products
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule

_MIN_DIRECT_ELEMENTS = 1 << 17
"""Weight size in elements above which, on a CPU, a copy of the gradient takes longer than a call of ``_Linear``."""


class _Linear(torch.autograd.Function):
    """x W^T + b for a shard of W.

    With ``comm``, W is split by rows, and the all-reduce of the input gradient overlaps with the weight gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x_sbh: Tensor, weight: Tensor, bias: Tensor | None, products: LinearProducts, comm: TensorComm | None
    ) -> Tensor:
        full = comm.gather(x_sbh, Point.TP_FWD) if comm is not None and comm.sequence_parallel else x_sbh
        out, scales = products.output(full, weight, bias)
        ctx.save_for_backward(x_sbh, weight, *scales)
        # A saved tensor may be a copy of the parameter without its main gradient.
        ctx.weight, ctx.comm, ctx.products, ctx.has_bias = weight, comm, products, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad_sbo: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x_sbh, weight, *scales = ctx.saved_tensors
        comm: TensorComm | None = ctx.comm
        products: LinearProducts = ctx.products
        pending_gather = comm.start_gather(x_sbh, Point.TP_BWD) if comm is not None and comm.sequence_parallel else None
        grad_x, grad_factor = products.grad_input(grad_sbo, weight, tuple(scales))
        full = x_sbh if pending_gather is None else pending_gather.wait()
        pending = None if comm is None else comm.start_reduce(grad_x, Point.TP_BWD, scatter=comm.sequence_parallel)
        factors = (*grad_factor, *products.input_factor(full, tuple(scales)))
        grad_weight = store_grad(ctx.weight, factors, products.grad_weight)
        grad_bias = grad_sbo.reshape(-1, grad_sbo.shape[-1]).sum(dim=0) if ctx.has_bias else None
        return grad_x if pending is None else pending.wait(), grad_weight, grad_bias, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b on a single rank, for x (..., in)."""
    writes_directly = not torch.compiler.is_compiling() and (
        (x.is_cpu and weight.numel() >= _MIN_DIRECT_ELEMENTS) or records_grad(weight)
    )
    if not writes_directly and not multiplies(x, weight):
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, EXACT, None)
    return result


class _SplitLinear(ShardedModule):
    """Base class of split linear layers.

    Args:
        comm: tensor-parallel communication.
    """

    weight: nn.Parameter
    splits_inputs: bool
    """Whether the layer is split by inputs, not by outputs."""

    def __init__(self, comm: TensorComm) -> None:
        super().__init__()
        self.comm = comm
        self.products: LinearProducts = EXACT

    def compute_in_fp8(self, recipe: Recipe | None) -> None:
        """Compute the matrix products in fp8 from now on (None: in the dtype of the parameters)."""
        self.products = make_products(recipe, self.comm, self.splits_inputs)

    def record_bytes(self, tokens: float) -> float:
        """Bytes of the factors of the weight's gradient, if ``WeightGrads`` records them for a number of tokens."""
        shape = self.weight.flatten(0, -2).shape
        is_8_bit = self.products.records_8_bits and not self.specs["weight"].of_expert and fits(round(tokens), *shape)
        return tokens * sum(shape) * (1 if is_8_bit else self.weight.itemsize)

    def _multiply(self, x_sbh: Tensor, weight: Tensor, bias: Tensor | None, comm: TensorComm | None) -> Tensor:
        """Compute x W^T + b, in fp8 if requested and possible for the sizes; ``comm`` as in ``_Linear``."""
        tokens = x_sbh.shape[0] * x_sbh.shape[1] * (comm.size if comm is not None and comm.sequence_parallel else 1)
        # Without fp8, do not use the number of tokens: it would make torch.compile recompile for some numbers.
        fitting = self.products is not EXACT and fits(tokens, *weight.shape)
        products = self.products if fitting else EXACT
        if products is EXACT and comm is None:
            return linear(x_sbh, weight, bias)
        result: Tensor = _Linear.apply(x_sbh, weight, bias, products, comm)
        return result


class ColumnParallelLinear(_SplitLinear):
    """A linear layer split by outputs: (s, b, in) -> (s, b, out / tp).

    Args:
        logical_shape: (out, in), or (parts, out, in) for stacked projections that are split separately, such as gate
            and value of SwiGLU.
        bias: whether to add a bias.
        comm: tensor-parallel communication.
        device, dtype: device and dtype of the parameters.
        entered: whether the input is a result of ``enter_parallel_region``, shared by several layers.
        blocks: sizes of interleaved projections in the outputs; see ``ParamSpec.blocks``.
    """

    splits_inputs = False

    def __init__(
        self,
        logical_shape: tuple[int, ...],
        bias: bool,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
        entered: bool = False,
        blocks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(comm.at("inputs"))
        self.enters_region = comm.size > 1 and not entered
        dim = len(logical_shape) - 2
        local_out = logical_shape[dim] // comm.size
        local_shape = (*logical_shape[:dim], local_out, logical_shape[-1])
        start = local_out * comm.rank
        self.weight = nn.Parameter(torch.empty(local_shape, device=device, dtype=dtype))
        blocks = blocks or (logical_shape[dim],) * math.prod(logical_shape[:dim])
        self.specs["weight"] = ParamSpec(logical_shape, dim, start, blocks=blocks)
        self.bias = nn.Parameter(torch.zeros(local_shape[:-1], device=device, dtype=dtype)) if bias else None
        if bias:
            self.specs["bias"] = ParamSpec(logical_shape[:-1], dim, start)

    def forward(self, x_sbh: Tensor) -> Tensor:
        weight = self.weight.flatten(0, -2)
        bias = None if self.bias is None else self.bias.flatten()
        return self._multiply(x_sbh, weight, bias, self.comm if self.enters_region else None)


class RowParallelLinear(_SplitLinear):
    """A linear layer split by inputs, with an all-reduce of the product: (s, b, in / tp) -> (s, b, out).

    Returns the product and, with several ranks, the bias, which must be added only once, after the all-reduce: the
    caller adds it together with dropout and residual.
    """

    splits_inputs = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(comm.at("outputs"))
        local_in = in_features // comm.size
        self.weight = nn.Parameter(torch.empty((out_features, local_in), device=device, dtype=dtype))
        self.specs["weight"] = ParamSpec((out_features, in_features), 1, local_in * comm.rank, blocks=(out_features,))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        if bias:
            self.specs["bias"] = ParamSpec((out_features,), partial_grad=comm.sequence_parallel)

    def forward(self, x_sbi: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.comm.size == 1:
            return self._multiply(x_sbi, self.weight, self.bias, None), None
        return leave_parallel_region(self._multiply(x_sbi, self.weight, None, None), self.comm), self.bias
