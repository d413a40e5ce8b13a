"""Permutation of tokens into rows sorted by destination, and reduction of rows back to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.kernels import ops


@dataclass(frozen=True)
class Order:
    """Rows of tokens, sorted by destination and then by token.

    Args:
        token: token of each row.
        row_tk: row of each of a token's choices; the number of rows if the choice has no row.
        counts: number of rows of each destination, int64.
    """

    token: Tensor
    row_tk: Tensor
    counts: Tensor


def make_order(chosen_tk: Tensor, holes: bool, counts: Tensor) -> Order:
    """Make the order with a row for each choice.

    Args:
        chosen_tk: int64 destination of each choice.
        holes: whether some choices have no row; such a choice holds the number of destinations.
        counts: number of rows of each destination.
    """
    chosen, k = chosen_tk.flatten(), chosen_tk.shape[1]
    order = chosen.argsort(stable=True)
    row_of_choice = torch.empty_like(order)
    row_of_choice[order] = torch.arange(len(order), device=order.device)
    if holes:
        rows = int(counts.sum())
        order, row_of_choice = order[:rows], row_of_choice.clamp_(max=rows)
    return Order(order // k, row_of_choice.view_as(chosen_tk), counts)


class _Permute(torch.autograd.Function):
    """See ``permute``."""

    @staticmethod
    def forward(ctx: Any, x_th: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return x_th.index_select(0, order.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        order: Order = ctx.order
        grad_th = grad.new_empty(len(order.row_tk), grad.shape[1])
        ops.combine_rows(grad, order.row_tk, None, grad_th)
        return grad_th, None


def permute(x_th: Tensor, order: Order) -> Tensor:
    """Copy tokens (t, h) to rows (r, h); a token's gradient is the sum over its rows, in a fixed order."""
    rows: Tensor = _Permute.apply(x_th, order)
    return rows


class _Unpermute(torch.autograd.Function):
    """See ``unpermute``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Order, shape: Sequence[int], weights_tk: Tensor | None) -> Tensor:
        ctx.order, ctx.is_weighted = order, weights_tk is not None
        if ctx.is_weighted:
            ctx.save_for_backward(rows, weights_tk)
        # Autograd must not see a view: the sum over tensor-parallel ranks works in place.
        out = rows.new_empty(shape)
        ops.combine_rows(rows, order.row_tk, weights_tk, out.view(-1, rows.shape[1]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        order: Order = ctx.order
        grad_th = grad.reshape(-1, grad.shape[-1])
        if not ctx.is_weighted:
            return grad_th.index_select(0, order.token), None, None, None
        rows, weights_tk = ctx.saved_tensors
        grad_rows, grad_tk = ops.combine_rows_back(grad_th, rows, order.row_tk, weights_tk)
        return grad_rows, None, None, grad_tk.to(weights_tk.dtype)


def unpermute(rows: Tensor, order: Order, shape: Sequence[int], weights_tk: Tensor | None = None) -> Tensor:
    """Sum each token's rows (r, h), weighted if ``weights_tk`` is given, to a result of shape (..., h)."""
    out: Tensor = _Unpermute.apply(rows, order, shape, weights_tk)
    return out


@dataclass(frozen=True)
class Choices:
    """Experts of tokens.

    Args:
        chosen_tk: int64 numbers of a token's experts.
        weights_tk: weights of the experts' outputs.
        holes: whether some choices are empty; an empty choice holds the number of experts.
        capacity: maximum number of tokens of an expert, if known.
        total: number of non-empty choices, if known.
    """

    chosen_tk: Tensor
    weights_tk: Tensor
    holes: bool
    capacity: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class NodeChoices:
    """Choices of tokens, grouped by the node of their experts.

    Args:
        order: order with a row for each pair of a token and a node that holds any of its experts.
        numbers_p: encoded choices in the order of the rows: twice the expert's index on its node, plus 1 for the first
            choice of a row.
        weights_p: weights of the choices.
        counts_n: number of choices of each node, int64.
    """

    order: Order
    numbers_p: Tensor
    weights_p: Tensor
    counts_n: Tensor


def group_choices_by_node(
    choices: Choices,
    nodes: int,
    node_e: Tensor,
    number_e: Tensor,
    count: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> NodeChoices:
    """Sort choices by node.

    Args:
        choices: choices among all experts.
        nodes: number of nodes.
        node_e: int64 node of each expert, and an extra entry: the number of nodes.
        number_e: int64 index of each expert on its node, and an extra entry.
        count: function that returns the number of rows and of choices of each node, from the nodes of the tokens'
            choices without and with duplicates.
    """
    node_tk = node_e[choices.chosen_tk]
    repeats_tk = (node_tk.unsqueeze(2) == node_tk.unsqueeze(1)).tril(-1).any(2)
    once_tk = node_tk.masked_fill(repeats_tk, nodes)
    rows_n, counts_n = count(once_tk, node_tk)
    order = make_order(once_tk, holes=True, counts=rows_n)
    by_node = node_tk.flatten().argsort(stable=True)
    if choices.holes:
        by_node = by_node[: int(counts_n.sum())]
    numbers_tk = 2 * number_e[choices.chosen_tk] + ~repeats_tk
    return NodeChoices(
        order,
        numbers_p=numbers_tk.flatten()[by_node],
        weights_p=choices.weights_tk.flatten().index_select(0, by_node),
        counts_n=counts_n,
    )


def decode_choices(
    numbers_p: Tensor, weights_p: Tensor, rows: int, k: int, experts: int, capacity: int | None = None
) -> Choices:
    """Decode the choices of received rows, in the order of the rows.

    Args:
        numbers_p, weights_p: as in ``NodeChoices``.
        rows: number of rows.
        k: maximum number of choices of a row.
        experts: number of experts on the node.
        capacity: maximum number of tokens of an expert, if known.
    """
    first_p, position_p = numbers_p % 2, torch.arange(len(numbers_p), device=numbers_p.device)
    row_p = first_p.cumsum(0) - 1
    start_p = (first_p * position_p).cummax(0).values if len(position_p) else position_p
    slot_p = row_p * k + position_p - start_p
    chosen = torch.full((rows * k,), experts, dtype=torch.int64, device=numbers_p.device)
    chosen[slot_p] = numbers_p // 2
    weights = weights_p.new_zeros(rows * k).index_copy(0, slot_p, weights_p)
    return Choices(chosen.view(rows, k), weights.view(rows, k), holes=True, capacity=capacity, total=len(numbers_p))
