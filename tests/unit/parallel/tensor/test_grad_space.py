"""The first gradient of a step in its place: of an output layer, whose forward pass computes it, and of embeddings."""

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
from megatron.parallel.data import buffer as buffers
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.tensor import cross_entropy
from megatron.parallel.tensor import linear as linears
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.cross_entropy import LogitsSpace, head_loss
from megatron.parallel.tensor.embedding import VocabShard, rows_of
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
    """The loss of a micro-batch."""
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    x_sbh = _draws(TOKENS, 1, WIDTH, seed=number) if x_sbh is None else x_sbh
    weights_sb = torch.full((TOKENS, 1), 0.5, dtype=torch.float64)
    shard = VocabShard(VOCAB, VOCAB, comm)
    return head_loss(x_sbh, weight, _tokens(number), weights_sb, comm, shard, space=LogitsSpace())[0]


def _rows(weight: nn.Parameter, number: int) -> Tensor:
    return (rows_of(weight, _tokens(number)) * _draws(TOKENS, 1, WIDTH, seed=number)).sum()


def _tied(weight: nn.Parameter, number: int) -> Tensor:
    """Two texts' embeddings, and the output layer with the same weights."""
    x_sbh = rows_of(weight, _tokens(number)) + rows_of(weight, _tokens(number + 1))
    return _head(weight, number, x_sbh.tanh())


def _plain(weight: nn.Parameter, number: int, use: Use) -> Tensor:
    """The loss of ``use`` from torch's own operations."""
    found = _tokens(number)
    if use is _rows:
        return (F.embedding(found, weight) * _draws(TOKENS, 1, WIDTH, seed=number)).sum()
    x_th = _draws(TOKENS, 1, WIDTH, seed=number).flatten(0, 1)
    if use is _tied:
        x_th = (F.embedding(found, weight) + F.embedding(_tokens(number + 1), weight)).tanh().flatten(0, 1)
    return 0.5 * F.cross_entropy(x_th @ weight.t(), found.flatten(), reduction="sum")


class Step:
    """A parameter in a buffer whose gradients have begun, on top of what another step has left.

    Attributes:
        kept: whether each gradient of the step that came first lay in its place, as autograd had it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *shape: int, count: int = 1, dtype: torch.dtype = torch.float64
    ) -> None:
        draws = [_draws(*(shape or (VOCAB, WIDTH)), seed=99 + number) for number in range(count)]
        params = [nn.Parameter(draw.to(dtype)) for draw in draws]
        self.weight, self.params = params[0], params
        self.kept: list[bool] = []
        withdraw = buffers.withdraw

        def watched(param: nn.Parameter, kept: bool) -> None:
            self.kept.append(kept)
            withdraw(param, kept)

        monkeypatch.setattr(buffers, "withdraw", watched)
        specs = [
            (f"experts.{number}.w", f"experts.{number}.w", ParamSpec(tuple(param.shape), of_expert=count > 1), param)
            for number, param in enumerate(params)
        ]
        self.buffer = FlatBuffer(specs, dtype, single_process("cpu").dp, None)
        self.buffer.grads_flat.fill_(torch.nan)
        self.buffer.begin_grads()

    def end(self) -> Tensor:
        """The gradient of the step."""
        self.buffer.complete_grads()
        assert self.weight.grad is not None
        assert self.weight.grad.untyped_storage().data_ptr() == self.buffer.grads_flat.untyped_storage().data_ptr()
        return self.weight.grad.clone()


def _wanted(weight: nn.Parameter, use: Use, *numbers: int) -> Tensor:
    other = nn.Parameter(weight.detach().clone())
    torch.stack([_plain(other, number, use) for number in numbers]).sum().backward()
    assert other.grad is not None
    return other.grad


@pytest.mark.parametrize("use", [_head, _rows, _tied])
def test_micro_batches_one_by_one_and_several_on_the_way(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    for number in (1, 2):
        use(step.weight, number).backward()
    losses = [use(step.weight, number) for number in (3, 4)]
    for loss in losses:
        loss.backward()
    assert step.kept == [True]
    torch.testing.assert_close(step.end(), _wanted(step.weight, use, 1, 2, 3, 4), rtol=1e-12, atol=1e-14)
    step.buffer.begin_grads()
    losses = [use(step.weight, number) for number in (5, 6)]
    for loss in losses:
        loss.backward()
    # Of two output layers on the way autograd may add up the gradients, so rows go to memory of their own.
    assert step.kept == [True, use is not _tied]
    torch.testing.assert_close(step.end(), _wanted(step.weight, use, 5, 6), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("use", [_head, _tied])
def test_a_forward_pass_without_backward_changes_nothing(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    use(step.weight, 1)
    use(step.weight, 2).backward()
    torch.testing.assert_close(step.end(), _wanted(step.weight, use, 2), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("use", [_head, _tied])
def test_a_gradient_that_was_overwritten_is_refused(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    first, second = (use(step.weight, number) for number in (1, 2))
    second.backward()
    with pytest.raises(RuntimeError, match="overwritten: call backward once, in the order"):
        first.backward()
    step.buffer.begin_grads()
    early = use(step.weight, 3)
    step.buffer.begin_grads()
    with pytest.raises(RuntimeError, match="overwritten: call backward once, in the order"):
        early.backward()


@pytest.mark.parametrize("use", [_head, _tied])
def test_a_second_backward_is_refused(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the place by then is the gradient of the step, or of the next one."""
    step = Step(monkeypatch)
    loss = use(step.weight, 1)
    loss.backward(retain_graph=True)
    for begins in (False, True):
        if begins:
            step.buffer.begin_grads()
        with pytest.raises(RuntimeError, match="overwritten: call backward once"):
            loss.backward(retain_graph=True)


@pytest.mark.parametrize("use", [_head, _rows, _tied])
def test_several_losses_in_one_backward(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    (8.0 * (use(step.weight, 1) + use(step.weight, 2))).backward()
    torch.testing.assert_close(step.end(), 8.0 * _wanted(step.weight, use, 1, 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("use", [_head, _rows, _tied])
@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_that_their_caller_keeps(use: Use, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    (own,) = torch.autograd.grad(use(step.weight, 1), step.weight, create_graph=recorded)
    use(step.weight, 2).backward()
    torch.testing.assert_close(own.detach(), _wanted(step.weight, use, 1), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(step.end(), _wanted(step.weight, use, 2), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("use", [_head, _tied])
def test_frozen_weights(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    step.weight.requires_grad_(False)
    x_sbh = _draws(TOKENS, 1, WIDTH, seed=1).requires_grad_()
    _head(step.weight, 1, x_sbh if use is _head else x_sbh + rows_of(step.weight, _tokens(2))).backward()
    assert x_sbh.grad is not None
    assert not step.end().any()


@pytest.mark.parametrize("use", [_rows, _tied])
def test_a_backward_that_fails_leaves_nothing_behind(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError

    failing = Fails.apply(step.weight).sum()  # made first, and so reached last
    with pytest.raises(ZeroDivisionError):
        (use(step.weight, 1) + failing).backward()
    use(step.weight, 2).backward()
    torch.testing.assert_close(step.end(), _wanted(step.weight, use, 2), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_groups_of_tokens(dtype: torch.dtype, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradient as in memory of its own, to the bit: in bf16 summed in fp32."""
    monkeypatch.setattr(cross_entropy, "_groups", partial(_in_groups, groups))
    step = Step(monkeypatch, dtype=dtype)
    other = nn.Parameter(step.weight.detach().clone())
    for weight in (step.weight, other):
        _head(weight, 1, _draws(TOKENS, 1, WIDTH, seed=1).to(dtype)).backward()
    assert step.kept == [True]
    assert other.grad is not None
    assert torch.equal(step.end(), other.grad)


def _in_groups(groups: int, tokens: int, *_: Any) -> list[slice]:
    return [slice(first, first + tokens // groups) for first in range(0, tokens, tokens // groups)]


def test_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    none = torch.zeros(0, 1, dtype=torch.float64)
    x_sbh = torch.zeros(0, 1, WIDTH, dtype=torch.float64)
    head_loss(x_sbh, step.weight, none.long(), none, comm, VocabShard(VOCAB, VOCAB, comm))[0].backward()
    assert step.kept == [True]
    assert not step.end().any()


def test_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    rows_of(step.weight, torch.tensor(3)).sum().backward()
    assert torch.equal(step.end().sum(1), torch.eye(VOCAB, dtype=torch.float64)[3] * WIDTH)


def test_another_use_of_tied_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd adds its gradient up in memory of its own, where what is added to the place would be missing."""
    step = Step(monkeypatch)
    loss = _tied(step.weight, 1) + 3.0 * step.weight.sum()
    with pytest.raises(RuntimeError, match="rows were added to a tied weight's gradient, and autograd"):
        loss.backward()


@pytest.mark.parametrize("use", [_head, _rows, _tied])
def test_hooks_see_and_change_whole_gradients(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = Step(monkeypatch), list[Tensor]()

    def doubled(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return 2.0 * grad

    step.weight.register_hook(doubled)
    use(step.weight, 1).backward()
    wanted = _wanted(step.weight, use, 1)
    torch.testing.assert_close(seen, [wanted], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(step.end(), 2.0 * wanted, rtol=1e-12, atol=1e-14)


def test_gradients_of_rows_that_are_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch)
    (grad,) = torch.autograd.grad(_rows(step.weight, 1).square(), step.weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), step.weight)
    other = nn.Parameter(step.weight.detach().clone())
    (plain,) = torch.autograd.grad(_plain(other, 1, _rows).square(), other, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(plain.square().sum(), other)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("grouped", [False, True])
def test_torchs_products_write_to_the_place(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_PLACED", 1)
    step = Step(monkeypatch, 6, WIDTH, count=3 if grouped else 1)
    counts = torch.tensor([5, 0, 7])
    kept: list[Tensor] = []
    for number in (0, 1, 2):
        x = _draws(TOKENS, WIDTH, seed=number)
        out = grouped_linear(x, step.params, counts) if grouped else linear(x, step.weight, None)
        if number == 0:  # their caller keeps them
            kept.extend(torch.autograd.grad(out.square().sum(), step.params))
            unchanged = [grad.clone() for grad in kept]
        else:
            out.square().sum().backward()
    assert all(map(torch.equal, kept, unchanged))
    assert step.kept == [True] * len(step.params)
    step.end()
    ends = [0, *counts.cumsum(0).tolist()] if grouped else [0, TOKENS]
    for param, begin, end in zip(step.params, ends[:-1], ends[1:], strict=True):
        other = nn.Parameter(param.detach().clone())
        parts = [_draws(TOKENS, WIDTH, seed=number)[begin:end] for number in (1, 2)]
        torch.stack([(x @ other.t()).square().sum() for x in parts]).sum().backward()
        assert param.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-12, atol=1e-13)
