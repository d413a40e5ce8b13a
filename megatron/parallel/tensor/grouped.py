"""Products of groups of rows, each with a separate matrix, in a single call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.products import grouped_product
from megatron.parallel.tensor.main_grad import store_grads

_ROW_STEP = 32
"""Least step between padded row counts, which keeps the number of different counts small."""
_ON_CUDA = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of torch's grouped products on CUDA: bf16 in a single launch, on Hopper and later; otherwise group by group,
for which the host reads the group ends, and so waits for the device at each product."""
_ALIGNED = 16
"""Alignment in bytes of the rows of all factors."""


def are_adjacent(weights: Sequence[Tensor]) -> bool:
    """Whether equally shaped tensors are adjacent in memory, as gradient buffers lay out parameters of one shape."""
    first = weights[0]
    memory, start = first.untyped_storage()._cdata, first.storage_offset()
    return all(
        w.is_contiguous() and w.untyped_storage()._cdata == memory and w.storage_offset() == start + n * first.numel()
        for n, w in enumerate(weights)
    )


def stack_weights(weights: Sequence[Tensor]) -> Tensor:
    """Stack equally shaped tensors to (n, *shape): a view of their memory where they are adjacent.

    If autograd is recording, as in a gradient that will be differentiated, the result is a copy tracked by autograd.
    """
    if torch.is_grad_enabled() or not are_adjacent(weights):
        return torch.stack(list(weights))
    first = weights[0]
    return torch.as_strided(first, (len(weights), *first.shape), (first.numel(), *first.stride()))


def supports_grouped_products(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether ``grouped_linear`` supports rows of this device and dtype, and weights (out, in) of these widths.

    On CUDA it supports all dtypes of torch's grouped products, which exclude fp64. On the meta device, where an
    accelerator's costs are counted, torch supports only bf16. On CPUs it supports adjacent weights outside compiled
    code, in fp32 and fp64: a bias is added to rounded products.
    """
    weight = weights[0]
    if rows.is_cpu:
        wide = rows.dtype in (torch.float32, torch.float64)
        return wide and not torch.compiler.is_compiling() and are_adjacent(weights)
    aligned = not any(width * rows.element_size() % _ALIGNED for width in weight.shape)
    return aligned and rows.dtype in (_ON_CUDA if rows.is_cuda else (torch.bfloat16,))


def round_up_rows(rows: Tensor) -> int:
    """Round up the number of a group's rows (r, in) to the number of rows to compute.

    A group's row count changes in every step. Where torch compiles code for each new shape of a product, which takes
    about ten times as long as the product, the count is rounded up to a multiple of 32, and from 256 on to one of eight
    values between a power of two and the next.
    """
    count = len(rows)
    if not rows.is_cpu or torch.compiler.is_compiling() or not _compiles_products(rows.dtype):
        return count
    step = max(_ROW_STEP, (1 << count.bit_length()) // 16)
    return -(-count // step) * step


def _compiles_products(dtype: torch.dtype) -> bool:
    """Whether torch computes products of this dtype on CPUs by oneDNN, which compiles code for each shape."""
    if not torch.backends.mkldnn.is_available():  # a torch without oneDNN lacks the queries below, too
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class _GroupedLinear(torch.autograd.Function):
    """Product of the rows of group g and the transpose of weight g."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends_g: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends_g, *weights)
        ctx.weights = weights
        return grouped_product(rows, stack_weights(weights).transpose(1, 2), ends_g)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends_g, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = grouped_product(grad, stack_weights(weights), ends_g)

        def compute(memory: Sequence[Tensor] | None, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            grad, rows, ends_g = inputs
            memory_goi = stack_weights(memory) if memory is not None and are_adjacent(memory) else None
            return grouped_product(grad.t(), rows, ends_g, memory_goi).unbind()

        return grad_rows, None, *store_grads(ctx.weights, (grad, rows, ends_g), compute)


def grouped_linear(rows: Tensor, weights: Sequence[Tensor], counts_g: Tensor) -> Tensor:
    """Map rows (r, in), stored group by group, to (r, out): rows of group g times the transpose of weight g.

    A group without rows has a gradient of zero.

    Args:
        rows: contiguous.
        weights: a weight (out, in) for each group.
        counts_g: int64 rows of each group.
    """
    ends_g = counts_g.to(rows.device).cumsum(0).to(torch.int32)
    result: Tensor = _GroupedLinear.apply(rows, ends_g, *weights)
    return result


def batched_linear(rows: Tensor, weights: Sequence[Tensor], counts_g: Tensor) -> Tensor:
    """``grouped_linear`` for all dtypes and widths, by a batched product that pads groups to the longest group."""
    counts_g = counts_g.to(rows.device)
    group_r = torch.arange(len(weights), device=rows.device).repeat_interleave(counts_g, output_size=len(rows))
    place_r = torch.arange(len(rows), device=rows.device) - (counts_g.cumsum(0) - counts_g)[group_r]
    padded_rows = rows.new_zeros(len(weights), int(counts_g.max()), rows.shape[1]).index_put((group_r, place_r), rows)
    return torch.bmm(padded_rows, torch.stack(list(weights)).transpose(1, 2))[group_r, place_r]
