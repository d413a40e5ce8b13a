"""Rows of tokens: one for each place that a token goes to, and back to one for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.kernels import ops


@dataclass(frozen=True)
class Order:
    """The order of rows by where they go, and there by token.

    Args:
        token: token of each row.
        place_tk: the row of each of a token's choices; the number of rows where there is none.
        counts: rows of each destination, int64.
    """

    token: Tensor
    place_tk: Tensor
    counts: Tensor

    def sums(self, rows: Tensor, weights_tk: Tensor | None, out_th: Tensor) -> None:
        """Writes the sum of each token's rows, weighted where there are weights."""
        ops.combine_rows(rows, self.place_tk, weights_tk, out_th)


def order_of(chosen_tk: Tensor, holes: bool, counts: Tensor) -> Order:
    """The order of a row for each choice.

    Args:
        chosen_tk: int64 numbers of the destinations.
        holes: whether some choices are the number beyond the last one, and have no row.
        counts: rows of each destination.
    """
    chosen, k = chosen_tk.flatten(), chosen_tk.shape[1]
    order = chosen.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    if holes:
        rows = int(counts.sum())
        order, place = order[:rows], place.clamp_(max=rows)
    return Order(order // k, place.view_as(chosen_tk), counts)


class _Dispatch(torch.autograd.Function):
    """See ``dispatched``."""

    @staticmethod
    def forward(ctx: Any, x_th: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return x_th.index_select(0, order.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        order: Order = ctx.order
        grad_th = grad.new_empty(len(order.place_tk), grad.shape[1])
        order.sums(grad, None, grad_th)
        return grad_th, None


def dispatched(x_th: Tensor, order: Order) -> Tensor:
    """Tokens (t, h) to rows (r, h); a token's gradient is the sum of its rows', in a fixed order."""
    rows: Tensor = _Dispatch.apply(x_th, order)
    return rows


class _Collect(torch.autograd.Function):
    """See ``collected``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Order, shape: Sequence[int]) -> Tensor:
        ctx.order = order
        out = rows.new_empty(shape)
        order.sums(rows, None, out.view(-1, rows.shape[1]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.reshape(-1, grad.shape[-1]).index_select(0, ctx.order.token), None, None


def collected(rows: Tensor, order: Order, shape: Sequence[int]) -> Tensor:
    """Rows (r, h) to tokens of a shape (..., h): the sum of each token's rows."""
    out: Tensor = _Collect.apply(rows, order, shape)
    return out


class _Combine(torch.autograd.Function):
    """See ``combined``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights_tk: Tensor, order: Order, shape: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows, weights_tk)
        ctx.order = order
        # No view in autograd's eyes: the sum over tensor-parallel ranks works in place.
        out = rows.new_empty(shape)
        order.sums(rows, weights_tk, out.view(-1, rows.shape[1]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights_tk = ctx.saved_tensors
        order: Order = ctx.order
        grad_th = grad.reshape(-1, grad.shape[-1])
        grad_rows, grad_tk = ops.combine_rows_back(grad_th, rows, order.place_tk, weights_tk)
        return grad_rows, grad_tk.to(weights_tk.dtype), None, None


def combined(rows: Tensor, weights_tk: Tensor, order: Order, shape: Sequence[int]) -> Tensor:
    """Rows (r, h) to tokens of a shape (..., h): the weighted sum of each token's rows."""
    out: Tensor = _Combine.apply(rows, weights_tk, order, shape)
    return out


@dataclass(frozen=True)
class Choices:
    """The experts of some tokens.

    Args:
        chosen_tk: int64 numbers of a token's experts.
        weights_tk: weights of their outputs.
        holes: whether some numbers are the one beyond the last expert's, for none.
        most: tokens that an expert takes at most, where that is known.
        total: number of choices that are an expert's, where that is known.
    """

    chosen_tk: Tensor
    weights_tk: Tensor
    holes: bool
    most: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class NodeChoices:
    """The choices of some tokens by the node of their experts.

    Args:
        order: of a row for each node that a token goes to, whatever its experts there.
        numbers_p: of each choice, by node and there by token, as rows are: twice the expert's number on its node, and 1
            more for the first one of a row.
        weights_p: weights of the choices.
        counts_n: choices of each node, int64.
    """

    order: Order
    numbers_p: Tensor
    weights_p: Tensor
    counts_n: Tensor


def choices_by_node(
    choices: Choices,
    nodes: int,
    node_e: Tensor,
    number_e: Tensor,
    count: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> NodeChoices:
    """Sorts choices by node.

    Args:
        choices: of all experts.
        nodes: how many there are.
        node_e: int64 node of each expert, and beyond the last one the number of nodes.
        number_e: int64 number of each expert on its node, and one more entry.
        count: the rows of each node, and its choices, from the nodes of tokens' choices: each once, and all.
    """
    node_tk = node_e[choices.chosen_tk]
    again_tk = (node_tk.unsqueeze(2) == node_tk.unsqueeze(1)).tril(-1).any(2)
    once_tk = node_tk.masked_fill(again_tk, nodes)
    rows_n, counts_n = count(once_tk, node_tk)
    order = order_of(once_tk, holes=True, counts=rows_n)
    by_node = node_tk.flatten().argsort(stable=True)
    if choices.holes:
        by_node = by_node[: int(counts_n.sum())]
    numbers_tk = 2 * number_e[choices.chosen_tk] + ~again_tk
    return NodeChoices(
        order,
        numbers_p=numbers_tk.flatten()[by_node],
        weights_p=choices.weights_tk.flatten().index_select(0, by_node),
        counts_n=counts_n,
    )


def choices_of_rows(
    numbers_p: Tensor, weights_p: Tensor, rows: int, k: int, experts: int, most: int | None = None
) -> Choices:
    """The choices of rows that came from other ranks, in the order of the rows.

    Args:
        numbers_p, weights_p: as in ``NodeChoices``.
        rows: how many there are.
        k: the most choices of a row.
        experts: how many the node has.
        most: tokens that an expert takes at most, where that is known.
    """
    first_p, at_p = numbers_p % 2, torch.arange(len(numbers_p), device=numbers_p.device)
    row_p = first_p.cumsum(0) - 1
    start_p = (first_p * at_p).cummax(0).values if len(at_p) else at_p
    slot_p = row_p * k + at_p - start_p
    chosen = torch.full((rows * k,), experts, dtype=torch.int64, device=numbers_p.device)
    chosen[slot_p] = numbers_p // 2
    weights = weights_p.new_zeros(rows * k).index_copy(0, slot_p, weights_p)
    return Choices(chosen.view(rows, k), weights.view(rows, k), holes=True, most=most, total=len(numbers_p))
