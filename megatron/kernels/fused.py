"""Fused model operations with their gradients, for use where neither a fused attention nor a compiler does their work.

Compiled where they are built, else pure torch (``reference_fused``, which defines them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.kernels import native, reference_fused


class _CausalSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_mrc: Tensor, scale: float) -> Tensor:
        y_mrc = torch.empty_like(x_mrc)
        if native.serves(x_mrc):
            native.operators().causal_softmax(x_mrc, scale, y_mrc)
        else:
            reference_fused.causal_softmax(x_mrc, scale, y_mrc)
        ctx.save_for_backward(y_mrc)
        ctx.scale = scale
        return y_mrc

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (y_mrc,) = ctx.saved_tensors
        dy_mrc = grads[0].contiguous()
        dx_mrc = torch.empty_like(y_mrc)
        if native.serves(y_mrc, dy_mrc):
            native.operators().causal_softmax_grad(y_mrc, dy_mrc, ctx.scale, dx_mrc)
        else:
            reference_fused.causal_softmax_grad(y_mrc, dy_mrc, ctx.scale, dx_mrc)
        return dx_mrc, None


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """Softmax of scale x scores (..., rows, columns) where column <= row + (columns - rows); zeros elsewhere."""
    x_mrc = scores.contiguous().view(-1, *scores.shape[-2:])
    result: Tensor = _CausalSoftmax.apply(x_mrc, scale)
    return result.view(scores.shape)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_rc: Tensor, bias_c: Tensor) -> Tensor:
        y_rc = torch.empty_like(x_rc)
        if native.serves(x_rc, bias_c):
            native.operators().bias_gelu(x_rc, bias_c, y_rc)
        else:
            reference_fused.bias_gelu(x_rc, bias_c, y_rc)
        ctx.save_for_backward(x_rc, bias_c)
        return y_rc

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_rc, bias_c = ctx.saved_tensors
        dy_rc = grads[0].contiguous()
        dx_rc = torch.empty_like(x_rc)
        if native.serves(x_rc, bias_c, dy_rc):
            native.operators().bias_gelu_grad(x_rc, bias_c, dy_rc, dx_rc)
        else:
            reference_fused.bias_gelu_grad(x_rc, bias_c, dy_rc, dx_rc)
        return dx_rc, dx_rc.sum(dim=0)


def bias_gelu(x: Tensor, bias_c: Tensor) -> Tensor:
    """GELU in its tanh form of x (..., c) + bias."""
    x_rc = x.contiguous().view(-1, x.shape[-1])
    result: Tensor = _BiasGelu.apply(x_rc, bias_c)
    return result.view(x.shape)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_rc: Tensor, residual_rc: Tensor, weight_c: Tensor, bias_c: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_rc, y_rc = torch.empty_like(x_rc), torch.empty_like(x_rc)
        wide = torch.float64 if x_rc.dtype == torch.float64 else torch.float32
        mean_r, rstd_r = (torch.empty(x_rc.shape[0], dtype=wide, device=x_rc.device) for _ in range(2))
        if native.serves(x_rc, residual_rc, weight_c, bias_c):
            native.operators().add_norm(x_rc, residual_rc, weight_c, bias_c, eps, sum_rc, y_rc, mean_r, rstd_r)
        else:
            reference_fused.add_norm(x_rc, residual_rc, weight_c, bias_c, eps, sum_rc, y_rc, mean_r, rstd_r)
        ctx.save_for_backward(sum_rc, weight_c, mean_r, rstd_r)
        ctx.has_bias = bias_c is not None
        return sum_rc, y_rc

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        sum_rc, weight_c, mean_r, rstd_r = ctx.saved_tensors
        dsum_rc, dy_rc = (grad.contiguous() for grad in grads)
        dx_rc = torch.empty_like(sum_rc)
        dweight_c = torch.empty(weight_c.shape, dtype=mean_r.dtype, device=weight_c.device)
        dbias_c = torch.empty_like(dweight_c) if ctx.has_bias else None
        given = (sum_rc, weight_c, mean_r, rstd_r, dy_rc, dsum_rc, dx_rc, dweight_c, dbias_c)
        if native.serves(*given):
            native.operators().add_norm_grad(*given)
        else:
            reference_fused.add_norm_grad(*given)
        dbias = None if dbias_c is None else dbias_c.to(weight_c.dtype)
        return dx_rc, dx_rc, dweight_c.to(weight_c.dtype), dbias, None


def add_norm(x: Tensor, residual: Tensor, weight_c: Tensor, bias_c: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and its LayerNorm, or RMSNorm where there is no bias, over the last dimension.

    Returns:
        The sum and its norm, both shaped like x.
    """
    x_rc, residual_rc = (t.contiguous().view(-1, x.shape[-1]) for t in (x, residual))
    sum_rc, y_rc = _AddNorm.apply(x_rc, residual_rc, weight_c, bias_c, eps)
    return sum_rc.view(x.shape), y_rc.view(x.shape)
