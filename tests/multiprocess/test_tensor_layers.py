"""Sharded layers against plain torch on whole tensors, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.cross_entropy import head_loss
from megatron.parallel.tensor.embedding import VocabParallelEmbedding, VocabShard
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from tests.support.spawn import run_ranks

S, B, H, OUT, VOCAB = 8, 2, 12, 20, 21
CPU, WIDE = torch.device("cpu"), torch.float64


def _rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


class _Setting:
    """A rank's points, and a list of errors."""

    def __init__(self, sequence_parallel: bool, asynchronous: bool) -> None:
        size = dist.get_world_size()
        group = Group(dist.group.WORLD, tuple(range(size)), dist.get_rank(), "tensor-parallel", "gloo")
        self.ledger = Ledger()
        self.comm = TensorComm(group, self.ledger, CompressionPlan({}), sequence_parallel, asynchronous)
        self.wrong: list[str] = []

    def own_rows(self, x: Tensor) -> Tensor:
        """This rank's part of an activation outside parallel regions."""
        return self.comm.local_slice(x) if self.comm.sequence_parallel else x

    def check(self, name: str, got: Tensor | None, expected: Tensor | None) -> None:
        assert got is not None
        assert expected is not None
        if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-12, atol=1e-12):
            self.wrong.append(name)

    def summed(self, grad: Tensor | None) -> Tensor:
        """A replicated parameter's gradient: under sequence parallelism the ranks hold parts of a sum."""
        assert grad is not None
        total = grad.clone()
        if self.comm.sequence_parallel:
            self.comm.group.all_reduce(total).wait()
        return total


def _feed_forward(sequence_parallel: bool, asynchronous: bool) -> list[str]:
    """Column-parallel, a nonlinearity, row-parallel: outputs, input, weight and bias gradients, bytes."""
    setting = _Setting(sequence_parallel, asynchronous)
    comm, n = setting.comm, setting.comm.size
    first = ColumnParallelLinear((OUT, H), True, comm, CPU, WIDE)
    second = RowParallelLinear(OUT, H, True, comm, CPU, WIDE)
    w1, b1, w2, b2 = _rand(1, OUT, H), _rand(2, OUT), _rand(3, H, OUT), _rand(4, H)
    rows = slice(comm.rank * OUT // n, (comm.rank + 1) * OUT // n)
    with torch.no_grad():
        first.weight.copy_(w1[rows])
        second.weight.copy_(w2[:, rows])
        assert first.bias is not None
        assert second.bias is not None
        first.bias.copy_(b1[rows])
        second.bias.copy_(b2)
    x, grad = _rand(5, S, B, H), _rand(6, S, B, H)
    x_rows = setting.own_rows(x).clone().requires_grad_()
    product, bias = second(F.gelu(first(x_rows)))
    out = product if bias is None else product + bias
    out.backward(setting.own_rows(grad))

    full = [t.clone().requires_grad_() for t in (x, w1, b1, w2, b2)]
    expected = F.linear(F.gelu(F.linear(full[0], full[1], full[2])), full[3], full[4])
    expected.backward(grad)
    grads = [t.grad for t in full]
    assert all(g is not None for g in grads)
    setting.check("output", out, setting.own_rows(expected))
    setting.check("input gradient", x_rows.grad, setting.own_rows(grads[0]))  # type: ignore[arg-type]
    setting.check("column weight", first.weight.grad, grads[1][rows])  # type: ignore[index]
    setting.check("column bias", first.bias.grad, grads[2][rows])  # type: ignore[index]
    setting.check("row weight", second.weight.grad, grads[3][:, rows])  # type: ignore[index]
    setting.check("row bias", setting.summed(second.bias.grad), grads[4])
    if n > 1:
        activation = S * B * H * 8
        ring = (n - 1) * activation // n
        # f and g: an all-reduce is two rings; a gather or a reduce-scatter is a single ring.
        forward, backward = (2 * ring, 3 * ring) if sequence_parallel else (2 * ring, 2 * ring)
        sent = {point: account["wire_bytes"] for point, account in setting.ledger.take_totals().items()}
        if sent != {"tp-forward": forward, "tp-backward": backward}:
            setting.wrong.append(f"{sent} instead of {forward} and {backward}")
    return setting.wrong


class _Products(TorchDispatchMode):
    """Records the shapes of the factors of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            self.sizes.update(size for arg in args if isinstance(arg, Tensor) for size in arg.shape)
        return func(*args, **(kwargs or {}))


def _embedding_and_loss(sequence_parallel: bool, asynchronous: bool, multiple: int = 1) -> list[str]:
    """A vocabulary that does not divide by the ranks, a loss mask, tied weights on both ends.

    Args:
        sequence_parallel, asynchronous: the tensor-parallel points.
        multiple: each rank has a multiple of it in rows; padding may leave a rank no entry.
    """
    setting = _Setting(sequence_parallel, asynchronous)
    comm, n = setting.comm, setting.comm.size
    padded = -(-VOCAB // (multiple * n)) * multiple * n
    shard = VocabShard(VOCAB, padded, comm)
    embedding = VocabParallelEmbedding(shard, H, True, comm, CPU, WIDE)
    table = torch.cat([_rand(7, VOCAB, H), torch.full((padded - VOCAB, H), 99.0, dtype=WIDE)])
    with torch.no_grad():
        embedding.weight.copy_(table[shard.start : shard.start + shard.rows])
    generator = torch.Generator().manual_seed(8)
    tokens_bs, labels_bs = (torch.randint(0, VOCAB, (B, S), generator=generator) for _ in range(2))
    weights_bs = torch.rand((B, S), generator=generator, dtype=WIDE) * (torch.arange(S) % 3 > 0)
    x_sbh = embedding(tokens_bs)
    with _Products() as products:
        total, losses_sb = head_loss(torch.tanh(x_sbh), embedding.weight, labels_bs.t(), weights_bs.t(), comm, shard)
        total.backward()
    if not products.sizes <= {S * B, H, shard.rows}:
        setting.wrong.append(f"products of {products.sizes} instead of {shard.rows} padded rows")
    with torch.no_grad():
        scored, _ = head_loss(torch.tanh(x_sbh), embedding.weight, labels_bs.t(), weights_bs.t(), comm, shard)

    full = table[:VOCAB].clone().requires_grad_()
    hidden = torch.tanh(F.embedding(tokens_bs.t(), full))
    wanted_sb = F.cross_entropy((hidden @ full.t()).flatten(0, 1), labels_bs.t().flatten(), reduction="none")
    expected = (wanted_sb * weights_bs.t().flatten()).sum()
    expected.backward()
    assert full.grad is not None
    setting.check("losses", losses_sb.flatten(), wanted_sb)
    setting.check("weighted sum", total, expected)
    setting.check("weighted sum without gradients", scored, expected)
    setting.check("hidden", torch.tanh(x_sbh), setting.own_rows(hidden))
    valid = shard.valid_rows
    assert embedding.weight.grad is not None
    setting.check("table", embedding.weight.grad[:valid], full.grad[shard.start : shard.start + valid])
    setting.check("padding", embedding.weight.grad[valid:], torch.zeros(shard.rows - valid, H, dtype=WIDE))
    return setting.wrong


def _padded_embedding_and_loss(sequence_parallel: bool, asynchronous: bool) -> list[str]:
    return _embedding_and_loss(sequence_parallel, asynchronous, multiple=8)


def _compare_all(*modes: bool) -> list[str]:
    return [
        wrong for test in (_feed_forward, _embedding_and_loss, _padded_embedding_and_loss) for wrong in test(*modes)
    ]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sharded_layers_equal_whole_ones(ranks: int, sequence_parallel: bool, asynchronous: bool) -> None:
    assert run_ranks(ranks, _compare_all, sequence_parallel, asynchronous) == [[]] * ranks
