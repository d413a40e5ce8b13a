"""Reference implementations of the weighted sum of expert outputs per token, and of its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.reference import widened


def combine_rows(rows_rh: Tensor, places_tk: Tensor, weights_tk: Tensor | None, out_th: Tensor) -> None:
    """Weighted sum of each token's rows, in the accumulation dtype.

    Args:
        rows_rh: rows.
        places_tk: int64 row indices of each token; the number of rows, or more, for a missing row.
        weights_tk: weights of the rows; None for weights of 1.
        out_th: output sums, with the rows' dtype. The kernels may round differently.
    """
    rows_tkh = _by_token(rows_rh, places_tk)
    if weights_tk is None:
        torch.sum(rows_tkh, 1, out=out_th)
    else:
        out_th.copy_(torch.bmm(weights_tk.to(rows_tkh.dtype).unsqueeze(1), rows_tkh).squeeze(1))


def combine_rows_back(grad_th: Tensor, rows_rh: Tensor, places_tk: Tensor, weights_tk: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``combine_rows`` with respect to rows and weights.

    Args:
        grad_th: gradient of the sums.
        rows_rh: rows; each row's index occurs once in ``places_tk``.
        places_tk, weights_tk: the arguments of ``combine_rows``.

    Returns:
        Gradients of the rows, in their dtype, and of the weights, in the accumulation dtype, 0 for missing rows.
    """
    wide_th = widened(grad_th)
    grad_tk = torch.bmm(_by_token(rows_rh, places_tk), wide_th.unsqueeze(2)).squeeze(2)
    scaled_tkh = weights_tk.to(wide_th.dtype).unsqueeze(2) * wide_th.unsqueeze(1)
    # An extra row takes the writes for missing rows, so that shapes do not depend on values: the planner has no values.
    grad_rh = rows_rh.new_empty(len(rows_rh) + 1, rows_rh.shape[1])
    grad_rh[places_tk.flatten().clamp(max=len(rows_rh))] = scaled_tkh.flatten(0, 1).to(rows_rh.dtype)
    return grad_rh[:-1], grad_tk


def _by_token(rows_rh: Tensor, places_tk: Tensor) -> Tensor:
    """Rows as (t, k, h) in the accumulation dtype, with zeros for missing rows."""
    if len(rows_rh) < places_tk.numel():
        rows_rh = torch.cat([rows_rh, rows_rh.new_zeros(1, rows_rh.shape[1])])
        places_tk = places_tk.clamp(max=len(rows_rh) - 1)
    return widened(rows_rh.index_select(0, places_tk.flatten())).view(*places_tk.shape, rows_rh.shape[1])
