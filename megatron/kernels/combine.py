"""Rows of tokens added up, and the gradients of that: the twins of the operators."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.reference import widened


def combine_rows(rows_rh: Tensor, places_tk: Tensor, weights_tk: Tensor | None, out_th: Tensor) -> None:
    """The weighted sum of each token's rows, in the type of accumulation.

    Args:
        rows_rh: rows.
        places_tk: int64 places of a token's rows; the number of rows, or more, where it has none.
        weights_tk: weights of the rows; None for ones.
        out_th: the sums, of the rows' type. The kernels may round them otherwise.
    """
    rows_tkh = _by_token(rows_rh, places_tk)
    if weights_tk is None:
        torch.sum(rows_tkh, 1, out=out_th)
    else:
        out_th.copy_(torch.bmm(weights_tk.to(rows_tkh.dtype).unsqueeze(1), rows_tkh).squeeze(1))


def combine_rows_back(grad_th: Tensor, rows_rh: Tensor, places_tk: Tensor, weights_tk: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``combine_rows`` with respect to the rows and to the weights.

    Args:
        grad_th: gradient of the sums.
        rows_rh: rows, each of which has one place.
        places_tk, weights_tk: as given.

    Returns:
        Those of the rows, of their type; and of the weights, in the type of accumulation, 0 where there is no row.
    """
    wide_th = widened(grad_th)
    grad_tk = torch.bmm(_by_token(rows_rh, places_tk), wide_th.unsqueeze(2)).squeeze(2)
    scaled_tkh = weights_tk.to(wide_th.dtype).unsqueeze(2) * wide_th.unsqueeze(1)
    # One row more takes what has no row: shapes do not depend on numbers, which the planner has none of.
    grad_rh = rows_rh.new_empty(len(rows_rh) + 1, rows_rh.shape[1])
    grad_rh[places_tk.flatten().clamp(max=len(rows_rh))] = scaled_tkh.flatten(0, 1).to(rows_rh.dtype)
    return grad_rh[:-1], grad_tk


def _by_token(rows_rh: Tensor, places_tk: Tensor) -> Tensor:
    """Rows as (t, k, h) in the type of accumulation, with zeros where there is none."""
    if len(rows_rh) < places_tk.numel():
        rows_rh = torch.cat([rows_rh, rows_rh.new_zeros(1, rows_rh.shape[1])])
        places_tk = places_tk.clamp(max=len(rows_rh) - 1)
    return widened(rows_rh.index_select(0, places_tk.flatten())).view(*places_tk.shape, rows_rh.shape[1])
