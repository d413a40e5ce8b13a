"""Gradients that backward functions write into the bucket; the output layer computes its gradient in forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.parallel.data.buffer import FlatBuffer, NamedParam
from megatron.parallel.tensor import cross_entropy
from megatron.parallel.tensor import linear as linears
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.cross_entropy import LogitsWorkspace, head_loss
from megatron.parallel.tensor.embedding import VocabShard, look_up_rows
from megatron.parallel.tensor.grouped import grouped_linear
from megatron.parallel.tensor.linear import linear
from megatron.parallel.tensor.shards import ParamSpec

TOKENS, WIDTH, VOCAB = 12, 8, 24
Use = Callable[[nn.Parameter, int], Tensor]


def _draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _tokens(number: int) -> Tensor:
    return torch.randint(0, VOCAB // 2, (TOKENS, 1), generator=torch.Generator().manual_seed(number))


def _head(weight: nn.Parameter, number: int, x_sbh: Tensor | None = None) -> Tensor:
    """Loss of a micro-batch."""
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    x_sbh = _draws(TOKENS, 1, WIDTH, seed=number) if x_sbh is None else x_sbh
    weights_sb = torch.full((TOKENS, 1), 0.5, dtype=torch.float64)
    shard = VocabShard(VOCAB, VOCAB, comm)
    return head_loss(x_sbh, weight, _tokens(number), weights_sb, comm, shard, workspace=LogitsWorkspace())[0]


def _rows(weight: nn.Parameter, number: int) -> Tensor:
    return (look_up_rows(weight, _tokens(number)) * _draws(TOKENS, 1, WIDTH, seed=number)).sum()


def _tied(weight: nn.Parameter, number: int) -> Tensor:
    """Embeddings of two texts and the output layer, with tied weights."""
    x_sbh = look_up_rows(weight, _tokens(number)) + look_up_rows(weight, _tokens(number + 1))
    return _head(weight, number, x_sbh.tanh())


def _plain(weight: nn.Parameter, number: int, use: Use) -> Tensor:
    """Loss of ``use`` by torch's operations."""
    tokens = _tokens(number)
    if use is _rows:
        return (F.embedding(tokens, weight) * _draws(TOKENS, 1, WIDTH, seed=number)).sum()
    x_th = _draws(TOKENS, 1, WIDTH, seed=number).flatten(0, 1)
    if use is _tied:
        x_th = (F.embedding(tokens, weight) + F.embedding(_tokens(number + 1), weight)).tanh().flatten(0, 1)
    return 0.5 * F.cross_entropy(x_th @ weight.t(), tokens.flatten(), reduction="sum")


class Step:
    """Parameters in a buffer at the begin of a step, on top of stale gradients.

    Attributes:
        stored: gradients that autograd has stored.
    """

    def __init__(self, *shape: int, count: int = 1, dtype: torch.dtype = torch.float64) -> None:
        draws = [_draws(*(shape or (VOCAB, WIDTH)), seed=99 + number) for number in range(count)]
        params = [nn.Parameter(draw.to(dtype)) for draw in draws]
        self.weight, self.params = params[0], params
        self.stored: list[Tensor] = []
        specs = [
            NamedParam(
                f"experts.{number}.w", f"experts.{number}.w", ParamSpec(tuple(param.shape), of_expert=count > 1), param
            )
            for number, param in enumerate(params)
        ]
        for param in params:
            param.register_hook(lambda grad: self.stored.append(grad) if grad is not None else None)
        self.buffer = FlatBuffer(specs, dtype, single_process("cpu").dp, None)
        self.buffer.grads_flat.fill_(torch.nan)
        self.buffer.begin_grads()

    def end(self) -> Tensor:
        """Complete the step and return the gradient."""
        self.buffer.complete_grads()
        assert self.weight.grad is not None
        assert self.weight.grad.untyped_storage().data_ptr() == self.buffer.grads_flat.untyped_storage().data_ptr()
        return self.weight.grad.clone()


def _expected(weight: nn.Parameter, use: Use, *numbers: int) -> Tensor:
    other = nn.Parameter(weight.detach().clone())
    torch.stack([_plain(other, number, use) for number in numbers]).sum().backward()
    assert other.grad is not None
    return other.grad


@pytest.mark.parametrize("use", [_head, _rows, _tied])
def test_micro_batches_in_sequence_and_several_in_flight(use: Use) -> None:
    step = Step()
    for number in (1, 2):
        use(step.weight, number).backward()
    losses = [use(step.weight, number) for number in (3, 4)]
    for loss in losses:
        loss.backward()
    assert not step.stored
    torch.testing.assert_close(step.end(), _expected(step.weight, use, 1, 2, 3, 4), rtol=1e-12, atol=1e-14)
    step.buffer.begin_grads()
    losses = [use(step.weight, number) for number in (5, 6)]
    for loss in losses:
        loss.backward()
    assert not step.stored
    torch.testing.assert_close(step.end(), _expected(step.weight, use, 5, 6), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("use", [_head, _tied])
def test_a_forward_without_backward_has_no_gradient(use: Use) -> None:
    step = Step()
    use(step.weight, 1)
    use(step.weight, 2).backward()
    torch.testing.assert_close(step.end(), _expected(step.weight, use, 2), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("use", [_head, _tied])
def test_backwards_in_another_order_than_forwards(use: Use) -> None:
    """The first forward has claimed the bucket, so the gradient of the second is kept elsewhere."""
    step = Step()
    first, second, third = (use(step.weight, number) for number in (1, 2, 3))
    for loss in (second, third, first):
        loss.backward()
    assert not step.stored
    torch.testing.assert_close(step.end(), _expected(step.weight, use, 1, 2, 3), rtol=1e-12, atol=1e-14)


def test_a_forward_without_backward_loses_no_other_gradient() -> None:
    step = Step()
    _head(step.weight, 1)
    _rows(step.weight, 2).backward()
    (3.0 * step.weight).sum().backward()
    expected = _expected(step.weight, _rows, 2) + 3.0
    torch.testing.assert_close(step.end(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("use", [_head, _tied])
def test_a_backward_after_its_step_is_refused(use: Use) -> None:
    step = Step()
    early = use(step.weight, 3)
    step.buffer.begin_grads()
    with pytest.raises(RuntimeError, match="overwritten: call backward once, between"):
        early.backward()


@pytest.mark.parametrize("use", [_head, _tied])
def test_a_second_backward_is_refused(use: Use) -> None:
    """The bucket then holds the gradient of this step or of the next."""
    step = Step()
    loss = use(step.weight, 1)
    loss.backward(retain_graph=True)
    for begins in (False, True):
        if begins:
            step.buffer.begin_grads()
        with pytest.raises(RuntimeError, match="overwritten: call backward once"):
            loss.backward(retain_graph=True)


@pytest.mark.parametrize("use", [_head, _rows, _tied])
def test_several_losses_in_a_single_backward(use: Use) -> None:
    step = Step()
    (8.0 * (use(step.weight, 1) + use(step.weight, 2))).backward()
    torch.testing.assert_close(step.end(), 8.0 * _expected(step.weight, use, 1, 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("use", [_head, _rows, _tied])
def test_gradients_outside_a_step_go_to_their_caller(use: Use) -> None:
    step = Step()
    use(step.weight, 2).backward()
    total = step.end()
    (grad,) = torch.autograd.grad(use(step.weight, 1), step.weight)
    torch.testing.assert_close(grad, _expected(step.weight, use, 1), rtol=1e-12, atol=1e-14)
    assert step.weight.grad is not None
    assert torch.equal(step.weight.grad, total)


@pytest.mark.parametrize("use", [_head, _tied])
def test_frozen_weights_have_no_gradient(use: Use) -> None:
    step = Step()
    step.weight.requires_grad_(False)
    x_sbh = _draws(TOKENS, 1, WIDTH, seed=1).requires_grad_()
    _head(step.weight, 1, x_sbh if use is _head else x_sbh + look_up_rows(step.weight, _tokens(2))).backward()
    assert x_sbh.grad is not None
    assert not step.end().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_groups_of_tokens(dtype: torch.dtype, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit the gradient of a parameter outside of a buffer; bf16 is summed in fp32."""
    monkeypatch.setattr(cross_entropy, "_token_groups", partial(_in_groups, groups))
    step = Step(dtype=dtype)
    other = nn.Parameter(step.weight.detach().clone())
    for weight in (step.weight, other):
        _head(weight, 1, _draws(TOKENS, 1, WIDTH, seed=1).to(dtype)).backward()
    assert not step.stored
    assert other.grad is not None
    assert torch.equal(step.end(), other.grad)


def _in_groups(groups: int, tokens: int, *_: Any) -> list[slice]:
    return [slice(first, first + tokens // groups) for first in range(0, tokens, tokens // groups)]


def test_a_loss_without_tokens() -> None:
    step = Step()
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    none = torch.zeros(0, 1, dtype=torch.float64)
    x_sbh = torch.zeros(0, 1, WIDTH, dtype=torch.float64)
    head_loss(x_sbh, step.weight, none.long(), none, comm, VocabShard(VOCAB, VOCAB, comm))[0].backward()
    assert not step.stored
    assert not step.end().any()


def test_a_single_row() -> None:
    step = Step()
    look_up_rows(step.weight, torch.tensor(3)).sum().backward()
    assert torch.equal(step.end().sum(1), torch.eye(VOCAB, dtype=torch.float64)[3] * WIDTH)


@pytest.mark.parametrize("use", [_head, _rows, _tied])
@pytest.mark.parametrize("first", [False, True])
def test_gradients_stored_by_autograd_are_added(use: Use, first: bool) -> None:
    """In the same backward, in either order, and in later backwards."""
    step = Step()
    plain = 3.0 * step.weight.sum()
    (plain + use(step.weight, 1) if first else use(step.weight, 1) + plain).backward()
    assert step.stored
    use(step.weight, 2).backward()
    (2.0 * step.weight.sum()).backward()
    torch.testing.assert_close(step.end(), _expected(step.weight, use, 1, 2) + 5.0, rtol=1e-12, atol=1e-13)


def test_a_differentiable_backward_adds_once() -> None:
    step = Step()
    for recorded in (False, True, False):
        (3.0 * step.weight.square().sum()).backward(create_graph=recorded)
    torch.testing.assert_close(step.end(), 18.0 * step.weight.detach(), rtol=1e-12, atol=1e-14)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_a_bucket_with_an_undefined_range_is_not_full() -> None:
    """A parameter without a gradient, and a weight with a forward that waits for its backward."""
    step = Step()
    full: list[int] = []
    step.buffer.notify_when_full(full.append)
    _WithoutGradient.apply(step.weight).backward()
    assert not full
    _head(step.weight, 1)
    _rows(step.weight, 2).backward()
    assert not full
    torch.testing.assert_close(step.end(), _expected(step.weight, _rows, 2), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gated", [False, True])
def test_compiled_grouped_products_write_to_the_bucket(gated: bool) -> None:
    """With sizes that the compiled operator supports."""
    width, rows = 64, 256
    step = Step(*((2, 32, width) if gated else (64, width)), count=2, dtype=torch.float32)
    x = _draws(rows, width, seed=1).float()
    counts = torch.tensor([100, 156])
    grouped_linear(x, [param.flatten(0, -2) for param in step.params], counts).square().sum().backward()
    assert not step.stored
    step.end()
    for param, group_rows in zip(step.params, x.split(counts.tolist()), strict=True):
        other = nn.Parameter(param.detach().clone())
        (group_rows @ other.flatten(0, -2).t()).square().sum().backward()
        assert param.grad is not None
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("use", [_head, _rows, _tied])
def test_a_bucket_is_full_once_all_functions_have_written(use: Use) -> None:
    step = Step()
    use(step.weight, 1).backward()
    full: list[Tensor] = []
    step.buffer.notify_when_full(lambda _: full.append(step.buffer.grads_flat.clone()))
    (use(step.weight, 2) + use(step.weight, 3)).backward()
    expected = _expected(step.weight, use, 1, 2, 3).flatten()
    torch.testing.assert_close(full, [expected], rtol=1e-12, atol=1e-13)


def test_gradients_of_rows_are_differentiable() -> None:
    step = Step()
    step.end()
    (grad,) = torch.autograd.grad(_rows(step.weight, 1).square(), step.weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), step.weight)
    other = nn.Parameter(step.weight.detach().clone())
    (plain,) = torch.autograd.grad(_plain(other, 1, _rows).square(), other, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(plain.square().sum(), other)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(6, WIDTH), (2, 3, WIDTH)])
@pytest.mark.parametrize("grouped", [False, True])
def test_torchs_products_write_to_the_bucket(
    grouped: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "_MIN_DIRECT_ELEMENTS", 1)
    step = Step(*shape, count=3 if grouped else 1)
    counts = torch.tensor([5, 0, 7])
    for number in (1, 2):
        x = _draws(TOKENS, WIDTH, seed=number)
        weights = [param.flatten(0, -2) for param in step.params]  # a gated layer holds two projections
        out = grouped_linear(x, weights, counts) if grouped else linear(x, weights[0], None)
        out.square().sum().backward()
    assert not step.stored
    step.end()
    ends = [0, *counts.cumsum(0).tolist()] if grouped else [0, TOKENS]
    for param, begin, end in zip(step.params, ends[:-1], ends[1:], strict=True):
        other = nn.Parameter(param.detach().clone())
        inputs = [_draws(TOKENS, WIDTH, seed=number)[begin:end] for number in (1, 2)]
        torch.stack([(x @ other.flatten(0, -2).t()).square().sum() for x in inputs]).sum().backward()
        assert param.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-12, atol=1e-13)
