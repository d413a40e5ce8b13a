"""Word embedding split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.distributed.layout import Tie
from megatron.parallel.tensor.collectives import TensorComm, leave_parallel_region
from megatron.parallel.tensor.main_grad import main_grad_of
from megatron.parallel.tensor.shards import ParamSpec, ShardedModule


def _sum_rows(grad: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Gradient of a table of this shape from the gradients of its rows at an index, each sum rounded once.

    torch adds rows one by one and rounds each sum: half precision would lose most of the gradient of a frequent row.
    """
    rows_nh = grad.reshape(-1, shape[1]).to(torch.promote_types(grad.dtype, torch.float32))
    total = torch.zeros(shape, dtype=rows_nh.dtype, device=rows_nh.device)
    return total.index_add_(0, index.flatten(), rows_nh).to(grad.dtype)


class _Rows(torch.autograd.Function):
    """Rows of a table on a CPU; their gradients are added to the table's main gradient, if it has an open one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight = weight
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        weight, (index,) = ctx.weight, ctx.saved_tensors
        main_grad = main_grad_of(weight)
        if main_grad is not None:
            main_grad.add_rows(index.flatten(), grad.reshape(-1, grad.shape[-1]))
            return None, None
        if grad.dtype in (torch.bfloat16, torch.float16):
            return _sum_rows(grad, index, weight.shape), None
        return torch.ops.aten.embedding_dense_backward(grad, index, weight.shape[0], -1, False), None


class _SortedRows(torch.autograd.Function):
    """Rows of a table; in deterministic mode torch sorts their gradients before it adds them."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = weight.shape
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _sum_rows(grad, index, ctx.shape), None


def look_up_rows(weight: Tensor, index: Tensor) -> Tensor:
    """Look up rows of a table at an index of any shape.

    On CUDA, the gradient of torch's embedding adds in the arbitrary order of its threads, which
    ``--deterministic-mode`` forbids.
    """
    if weight.is_cpu and weight.requires_grad and not torch.compiler.is_compiling():
        result: Tensor = _Rows.apply(weight, index)
        return result
    if torch.are_deterministic_algorithms_enabled():
        sorted_rows: Tensor = _SortedRows.apply(weight, index)
        return sorted_rows
    return F.embedding(index, weight)


class VocabShard:
    """A rank's rows of the padded vocabulary.

    Args:
        vocab_size: number of entries without padding.
        padded_size: number of entries with padding; a multiple of the number of ranks.
        comm: tensor-parallel communication.
    """

    def __init__(self, vocab_size: int, padded_size: int, comm: TensorComm) -> None:
        self.vocab_size = vocab_size
        self.rows = padded_size // comm.size
        self.start = self.rows * comm.rank

    @property
    def valid_rows(self) -> int:
        """Number of rows that are not padding."""
        return max(0, min(self.rows, self.vocab_size - self.start))

    def weight(self, hidden: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
        """An uninitialized local slice, (rows, hidden)."""
        return nn.Parameter(torch.empty((self.rows, hidden), device=device, dtype=dtype))

    def bias(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Parameter, ParamSpec]:
        """A bias of zeros for the local rows, and its place in the logical (vocab_size,) parameter."""
        zeros = torch.zeros(self.rows, device=device, dtype=dtype)
        return nn.Parameter(zeros), ParamSpec((self.vocab_size,), 0, self.start)

    def spec(self, hidden: int, *, tied: bool, tied_copy: bool) -> ParamSpec:
        """The slice's place in the logical (vocab_size, hidden) parameter."""
        tie = Tie.WORDS if tied else None
        shape = (self.vocab_size, hidden)
        return ParamSpec(shape, 0, self.start, tied=tie, tied_copy=tied_copy, of_vocabulary=True)


class VocabParallelEmbedding(ShardedModule):
    """Word embedding with an all-reduce of the local rows: (b, s) -> (s, b, h), or this rank's part of s."""

    def __init__(
        self,
        shard: VocabShard,
        hidden: int,
        tied: bool,
        comm: TensorComm,
        device: torch.device,
        dtype: torch.dtype,
        copy: bool = False,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.comm = comm
        self.weight = shard.weight(hidden, device, dtype)
        self.specs["weight"] = shard.spec(hidden, tied=tied, tied_copy=copy)

    def forward(self, tokens_bs: Tensor, site: str = "embedding") -> Tensor:
        """Vectors (s, b, h) of tokens (b, s); ``site`` identifies the lookup, if a model looks up several texts."""
        tokens_sb = tokens_bs.t()
        if self.comm.size == 1:
            return look_up_rows(self.weight, tokens_sb)
        local_sb = tokens_sb - self.shard.start
        elsewhere_sb = (local_sb < 0) | (local_sb >= self.shard.rows)
        # Any row will do for other ranks' tokens, but not a single row for all: sorted gradients are added one by one.
        x_sbh = look_up_rows(self.weight, local_sb.remainder(self.shard.rows))
        return leave_parallel_region(x_sbh.masked_fill(elsewhere_sb.unsqueeze(-1), 0.0), self.comm.at(site))
