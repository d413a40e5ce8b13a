"""Pure-torch twins of the fused model kernels. Equal up to rounding of the type (a few units in the last place)."""

from __future__ import annotations

import torch
from torch import Tensor

GELU_SCALE, GELU_CUBE = 0.7978845608028654, 0.044715


def causal_softmax(x_mrc: Tensor, scale: float, y_mrc: Tensor) -> None:
    """Softmax of scale x over the columns that a row may see: column <= row + (columns - rows)."""
    rows, columns = x_mrc.shape[1:]
    future = torch.ones(rows, columns, dtype=torch.bool, device=x_mrc.device).triu(1 + max(columns - rows, 0))
    y_mrc.copy_((_wide(x_mrc) * scale).masked_fill(future, -torch.inf).softmax(dim=-1))


def causal_softmax_grad(y_mrc: Tensor, dy_mrc: Tensor, scale: float, dx_mrc: Tensor) -> None:
    """Gradient of ``causal_softmax`` from its result."""
    y, dy = _wide(y_mrc), _wide(dy_mrc)
    dx_mrc.copy_(scale * (y * (dy - (y * dy).sum(dim=-1, keepdim=True))))


def bias_gelu(x_rc: Tensor, bias_c: Tensor, y_rc: Tensor) -> None:
    """GELU in its tanh form, of x + bias."""
    y_rc.copy_(torch.nn.functional.gelu(_wide(x_rc) + _wide(bias_c), approximate="tanh"))


def bias_gelu_grad(x_rc: Tensor, bias_c: Tensor, dy_rc: Tensor, dx_rc: Tensor) -> None:
    """Gradient of ``bias_gelu`` for x; its sum over the rows is the bias's."""
    z = _wide(x_rc) + _wide(bias_c)
    t = torch.tanh(GELU_SCALE * (z + GELU_CUBE * z**3))
    slope = GELU_SCALE * (1 + 3 * GELU_CUBE * z * z)
    dx_rc.copy_(_wide(dy_rc) * (0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope))


def add_norm(
    x_rc: Tensor,
    residual_rc: Tensor,
    weight_c: Tensor,
    bias_c: Tensor | None,
    eps: float,
    sum_rc: Tensor,
    y_rc: Tensor,
    mean_r: Tensor,
    rstd_r: Tensor,
) -> None:
    """x + residual, and its LayerNorm, or RMSNorm where there is no bias. Writes row statistics for the gradient."""
    sum_rc.copy_(_wide(x_rc) + _wide(residual_rc))
    total = _wide(sum_rc)
    mean = total.mean(dim=1) if bias_c is not None else torch.zeros_like(total[:, 0])
    centered = total - mean.unsqueeze(1)
    rstd = (centered.square().mean(dim=1) + eps).rsqrt()
    y = centered * rstd.unsqueeze(1) * _wide(weight_c)
    y_rc.copy_(y if bias_c is None else y + _wide(bias_c))
    mean_r.copy_(mean)
    rstd_r.copy_(rstd)


def add_norm_grad(
    sum_rc: Tensor,
    weight_c: Tensor,
    mean_r: Tensor,
    rstd_r: Tensor,
    dy_rc: Tensor,
    dsum_rc: Tensor,
    dx_rc: Tensor,
    dweight_c: Tensor,
    dbias_c: Tensor | None,
) -> None:
    """Gradients of ``add_norm`` for both summands (equal), weight and bias.

    Args:
        dsum_rc: what arrives at the sum from elsewhere.
    """
    hat = (_wide(sum_rc) - mean_r.unsqueeze(1)) * rstd_r.unsqueeze(1)
    dy = _wide(dy_rc)
    own = dy * _wide(weight_c)
    through = own - hat * (own * hat).mean(dim=1, keepdim=True)
    if dbias_c is not None:
        through = through - own.mean(dim=1, keepdim=True)
        dbias_c.copy_(dy.sum(dim=0))
    dweight_c.copy_((dy * hat).sum(dim=0))
    dx_rc.copy_(_wide(dsum_rc) + rstd_r.unsqueeze(1) * through)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
