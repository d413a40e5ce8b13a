"""Permutations of rows against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.parallel.expert.dispatcher import ExpertComm
from megatron.parallel.expert.permutation import Choices, decode_choices, group_choices_by_node, permute, unpermute

TOKENS, K, NODES, LOCAL = 40, 4, 3, 2
EXPERTS = NODES * LOCAL
NODE_E = torch.tensor([1, 0, 2, 1, 0, 2, NODES])
NUMBER_E = torch.tensor([0, 1, 1, 1, 0, 0, 0])


def _count(once_tk: Tensor, node_tk: Tensor) -> tuple[Tensor, Tensor]:
    rows_n, choices_n = (torch.tensor([int((x == node).sum()) for node in range(NODES)]) for x in (once_tk, node_tk))
    return rows_n, choices_n


def _choices(dropping: bool) -> Choices:
    generator = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:K] for _ in range(TOKENS)])
    if dropping:
        chosen = chosen.masked_fill(torch.rand(TOKENS, K, generator=generator) < 0.5, EXPERTS)
    return Choices(chosen, torch.rand(TOKENS, K, generator=generator, dtype=torch.float64), dropping)


@pytest.mark.parametrize("dropping", [False, True])
def test_choices_by_node_and_back(dropping: bool) -> None:
    """A row for each token and node, with its experts on the node and their weights."""
    choices = _choices(dropping)
    weights_tk = choices.weights_tk.requires_grad_()
    rows = group_choices_by_node(choices, NODES, NODE_E, NUMBER_E, _count)
    expected: list[tuple[int, int, dict[int, float]]] = []
    for node in range(NODES):
        for token, (chosen, weights) in enumerate(zip(choices.chosen_tk.tolist(), weights_tk.tolist(), strict=True)):
            weight_of_expert = {
                int(NUMBER_E[e]): w for e, w in zip(chosen, weights, strict=True) if int(NODE_E[e]) == node
            }
            if weight_of_expert:
                expected.append((node, token, weight_of_expert))
    assert rows.order.token.tolist() == [token for _, token, _ in expected]
    assert rows.order.counts.tolist() == [sum(n == node for n, _, _ in expected) for node in range(NODES)]
    assert rows.counts_n.tolist() == [
        sum(len(weight_of_expert) for n, _, weight_of_expert in expected if n == node) for node in range(NODES)
    ]
    back = decode_choices(rows.numbers_p, rows.weights_p, len(expected), min(K, LOCAL), LOCAL)
    for row, (_, _, weight_of_expert) in enumerate(expected):
        pairs = zip(back.chosen_tk[row].tolist(), back.weights_tk[row].tolist(), strict=True)
        assert {number: weight for number, weight in pairs if number < LOCAL} == weight_of_expert
    back.weights_tk.sum().backward()
    assert weights_tk.grad is not None
    assert torch.equal(weights_tk.grad, (choices.chosen_tk < EXPERTS).double())


def test_counting_does_not_read_values() -> None:
    """On a device, the host would wait in each layer."""
    comm = ExpertComm(single_process().ep, Ledger(), CompressionPlan({}))
    chosen_tk = torch.tensor([[0, 2], [2, 4], [4, 2]])
    assert comm.count_rows(chosen_tk, 4).tolist() == [1, 0, 3, 0]
    assert comm.count_rows(chosen_tk.to("meta"), 4).shape == (4,)


def test_empty_choices() -> None:
    nothing = torch.zeros(0)
    back = decode_choices(nothing.long(), nothing, 0, 2, LOCAL)
    assert back.chosen_tk.shape == back.weights_tk.shape == (0, 2)


def test_rows_of_a_token_are_summed_and_so_are_their_gradients() -> None:
    order = group_choices_by_node(_choices(True), NODES, NODE_E, NUMBER_E, _count).order

    def there_and_back(x_th: Tensor) -> Tensor:
        rows = permute(x_th, order)
        scales = torch.arange(1, len(rows) + 1, dtype=rows.dtype)
        return unpermute(rows * scales.unsqueeze(1), order, (TOKENS // 2, 2, 3))

    x_th = torch.randn(TOKENS, 3, dtype=torch.float64, requires_grad=True)
    scale_t = torch.zeros(TOKENS, dtype=torch.float64)
    for row, token in enumerate(order.token.tolist()):
        scale_t[token] += row + 1
    torch.testing.assert_close(there_and_back(x_th).view(TOKENS, 3), x_th * scale_t.unsqueeze(1))
    assert torch.autograd.gradcheck(there_and_back, (x_th,))
