"""Output projection and cross-entropy over a split vocabulary, in one function.

Works through the tokens in groups whose logits are worth one large matrix product each, and through a group in
chunks that stay in the cache between the softmax's passes, where logits turn into their own gradients. So neither
the logits of all tokens nor fp32 copies of them make the round trip through memory that separate operations would.
On one rank the gradients are computed along with the loss and no logits are kept. On several ranks each keeps its
own logits until the log-sum-exp over the whole vocabulary is known; one small gather exchanges it.

All products are over the padded rows, whose number suits matrix kernels (rows of logits that begin at multiples of 16
bytes); the padding's logits are minus infinity, so that it has no part in the loss and its gradients are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.comm.tensor import TensorComm
from megatron.compression.points import Point
from megatron.parallel.tensor.embedding import VocabShard

_GROUP_ELEMENTS = {"cpu": 1 << 26}
"""Logits of one matrix product: 256 MiB in fp32 on a CPU, four times as many elsewhere."""

_CHUNK_ELEMENTS = {"cpu": 1 << 20}
"""Logits that the softmax takes at a time: on a CPU, as many as a core's cache holds in fp32, elsewhere a group."""


def _runs(num_tokens: int, vocab: int, elements: int) -> list[slice]:
    """Consecutive runs of tokens with about as many logits as asked for."""
    size = max(16, elements // max(vocab, 1))
    return [slice(first, min(first + size, num_tokens)) for first in range(0, num_tokens, size)]


def _groups(num_tokens: int, vocab: int, device: torch.device) -> list[slice]:
    return _runs(num_tokens, vocab, _GROUP_ELEMENTS.get(device.type, 1 << 28))


def _chunks(logits_tv: Tensor) -> list[slice]:
    tokens, vocab = logits_tv.shape
    return _runs(tokens, vocab, _CHUNK_ELEMENTS.get(logits_tv.device.type, 1 << 28))


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _HeadLoss(torch.autograd.Function):
    """Returns per-token losses and their weighted sum; only the sum is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x_sbh: Tensor,
        weight: Tensor,
        labels_sb: Tensor,
        weights_sb: Tensor,
        comm: TensorComm,
        shard: VocabShard,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        full = comm.gather(x_sbh, Point.TP_FWD) if comm.sequence_parallel else x_sbh
        x_th = full.reshape(-1, full.shape[-1])
        labels_t = labels_sb.reshape(-1)
        weights_t = weights_sb.reshape(-1)
        ctx.comm, ctx.shape = comm, full.shape
        if comm.size == 1:
            losses_t, grads = _fused_forward(x_th, weight, labels_t, weights_t, shard, with_grad)
            if with_grad:
                ctx.save_for_backward(*grads)
        else:
            losses_t, saved = _split_forward(x_th, weight, labels_t, comm, shard)
            if with_grad:
                # The input is gathered again in backward under sequence parallelism, to keep only the own part.
                ctx.save_for_backward(x_sbh, weight, weights_t, *saved)
        total = torch.dot(losses_t, weights_t.to(losses_t.dtype))
        losses_sb = losses_t.view(labels_sb.shape)
        ctx.mark_non_differentiable(losses_sb)
        return total, losses_sb

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        comm: TensorComm = ctx.comm
        if comm.size == 1:
            grad_x, grad_weight = ctx.saved_tensors
            return grad_x.mul_(grad).view(ctx.shape), grad_weight.mul_(grad), None, None, None, None, None
        x_sbh, weight, weights_t, logits, lse_t, labels_t = ctx.saved_tensors
        full = comm.gather(x_sbh, Point.TP_BWD) if comm.sequence_parallel else x_sbh
        x_th = full.reshape(-1, full.shape[-1])
        grad_x, grad_weight = _split_backward(x_th, weight, logits, lse_t, labels_t, weights_t * grad)
        grad_x = grad_x.view(ctx.shape)
        summing = comm.start_sum(grad_x, Point.TP_BWD, scatter=comm.sequence_parallel)
        return summing.wait(), grad_weight, None, None, None, None, None


def _mask_padding_(logits_tv: Tensor, shard: VocabShard) -> None:
    """Takes the padding's columns out of every softmax."""
    logits_tv[:, shard.valid_rows :] = -torch.inf


def _to_gradient_(logits_tv: Tensor, wide_tv: Tensor, lse_t: Tensor, label_t: Tensor, scale_t: Tensor) -> None:
    """Overwrites logits by the gradient of ``sum(scale * (lse - logit of the label))``.

    Args:
        logits_tv: logits of a chunk, overwritten.
        wide_tv: the same in the accumulation dtype (the same tensor, or work space), overwritten.
        lse_t: log-sum-exp over the whole vocabulary.
        label_t: column of the label; negative where another rank holds it.
        scale_t: weight of each token.
    """
    grad = wide_tv.sub_(lse_t.unsqueeze(1)).exp_()
    here = (label_t >= 0).to(grad.dtype).unsqueeze(1)
    grad.scatter_add_(1, label_t.clamp(min=0).unsqueeze(1), -here)
    grad.mul_(scale_t.unsqueeze(1))
    if grad.dtype != logits_tv.dtype:
        logits_tv.copy_(grad)


def _fused_forward(
    x_th: Tensor, weight_vh: Tensor, labels_t: Tensor, weights_t: Tensor, shard: VocabShard, with_grad: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Losses of all tokens and, if wanted, the gradients of their weighted sum, on one rank."""
    accumulate = _accumulation_dtype(x_th.dtype)
    groups = _groups(x_th.shape[0], weight_vh.shape[0], x_th.device)
    losses_t = torch.empty(x_th.shape[0], dtype=accumulate, device=x_th.device)
    grad_x = torch.empty_like(x_th) if with_grad else x_th
    grad_w = torch.zeros(weight_vh.shape, dtype=accumulate, device=x_th.device) if with_grad else weight_vh
    space = x_th.new_empty((groups[0].stop if groups else 0, weight_vh.shape[0]))
    for group in groups:
        logits = torch.mm(x_th[group], weight_vh.t(), out=space[: group.stop - group.start])
        _mask_padding_(logits, shard)
        losses, labels, weights = losses_t[group], labels_t[group], weights_t[group]
        for part in _chunks(logits):
            wide = logits[part].to(accumulate)
            lse = torch.logsumexp(wide, dim=-1)
            torch.sub(lse, wide.gather(1, labels[part].unsqueeze(1)).squeeze(1), out=losses[part])
            if with_grad:
                _to_gradient_(logits[part], wide, lse, labels[part], weights[part])
        if with_grad:
            torch.mm(logits, weight_vh, out=grad_x[group])
            _add_product_(grad_w, logits, x_th[group])
    return losses_t, (grad_x, grad_w.to(weight_vh.dtype))


def _add_product_(total_vh: Tensor, grad_tv: Tensor, x_th: Tensor) -> None:
    """``total += grad^T x``; half-precision factors are accumulated in the total's precision."""
    if total_vh.dtype == x_th.dtype:
        total_vh.addmm_(grad_tv.t(), x_th)
    else:
        total_vh.add_(grad_tv.t() @ x_th)


def _split_forward(
    x_th: Tensor, weight_vh: Tensor, labels_t: Tensor, comm: TensorComm, shard: VocabShard
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Losses of all tokens from this rank's logits, and what backward needs: logits, lse, local labels."""
    accumulate = _accumulation_dtype(x_th.dtype)
    local_t = labels_t - shard.start
    here_t = (local_t >= 0) & (local_t < shard.valid_rows)
    local_t = torch.where(here_t, local_t, -1)
    stats = torch.empty((2, x_th.shape[0]), dtype=accumulate, device=x_th.device)
    logits = x_th @ weight_vh.t()
    _mask_padding_(logits, shard)
    for part in _chunks(logits):
        wide = logits[part].to(accumulate)
        stats[0, part] = torch.logsumexp(wide, dim=-1)
        target = wide.gather(1, local_t[part].clamp(min=0).unsqueeze(1)).squeeze(1)
        stats[1, part] = target.masked_fill(~here_t[part], 0.0)
    everyones = comm.gather_exact(stats)
    lse_t = torch.logsumexp(everyones[:, 0], dim=0)
    return lse_t - everyones[:, 1].sum(dim=0), (logits, lse_t, local_t)


def _split_backward(
    x_th: Tensor, weight_vh: Tensor, logits: Tensor, lse_t: Tensor, local_t: Tensor, scale_t: Tensor
) -> tuple[Tensor, Tensor]:
    """This rank's contributions to the input's gradient, and the gradient of its rows; overwrites the logits."""
    for part in _chunks(logits):
        wide = logits[part].to(lse_t.dtype)
        _to_gradient_(logits[part], wide, lse_t[part], local_t[part], scale_t[part])
    return logits @ weight_vh, logits.t() @ x_th


def head_loss(
    x_sbh: Tensor,
    weight: Tensor,
    labels_sb: Tensor,
    weights_sb: Tensor,
    comm: TensorComm,
    shard: VocabShard,
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of the next token.

    Args:
        x_sbh: final hidden states, (s, b, h), or this rank's part of s under sequence parallelism.
        weight: local rows of the output projection, (rows, h). Rows beyond the vocabulary must be finite; they change
            nothing and get zero gradients.
        labels_sb: int64 targets, (s, b).
        weights_sb: weight of each token in the sum, (s, b).

    Returns:
        The weighted sum (scalar, fp32 or fp64, equal on all tensor-parallel ranks) and the losses of the tokens in
        nats, (s, b), detached.
    """
    total, losses_sb = _HeadLoss.apply(x_sbh, weight, labels_sb, weights_sb, comm, shard, torch.is_grad_enabled())
    return total, losses_sb
