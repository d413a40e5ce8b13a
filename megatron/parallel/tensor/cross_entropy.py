"""Output projection and cross-entropy over a split vocabulary, fused.

Tokens are processed in groups whose logits fill a large matrix product. A single kernel turns a group's logits into
losses and into the logits' gradients (``kernels.ops.cross_entropy``), so neither the logits of all tokens nor fp32
copies of them make the round trip through memory that separate operations would. On a single rank the gradients are
computed along with the loss and no logits are stored. With several ranks each stores its logits until the log-sum-exp
over the whole vocabulary is known; a small all-gather exchanges it.

Logits may be soft-capped (``kernels.soft_cap``); their gradients are then multiplied by the derivative of the cap.

All products are over the padded rows, whose number suits matrix kernels (rows of logits start at multiples of 16
bytes). Padding columns do not contribute to the loss, and their gradients are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.kernels.ops import cross_entropy
from megatron.kernels.products import add_product_, product
from megatron.kernels.soft_cap import slope_of_capped, soft_cap_
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.main_grad import main_grad_of, store_grad

_GROUP_ELEMENTS = {"cpu": 1 << 26}
"""Number of logits per matrix product: 256 MiB in fp32 on a CPU, four times as many elsewhere."""


def _token_groups(num_tokens: int, vocab: int, device: torch.device) -> list[slice]:
    """Consecutive ranges of tokens, each with about the number of logits of a matrix product."""
    size = max(16, _GROUP_ELEMENTS.get(device.type, 1 << 28) // max(vocab, 1))
    return [slice(first, min(first + size, num_tokens)) for first in range(0, num_tokens, size)]


class LogitsWorkspace:
    """Memory for the logits of a group of tokens, reused from call to call on CPUs.

    A C library returns blocks of this size to the system, which then clears the next block page by page on one core: 6%
    of a step's time (L6 h512, 1,024 tokens, vocabulary 50,304). Other allocations of a step cannot use this memory, so
    its peak rises by up to its size (7% there). On other devices torch caches freed memory itself.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def scratch(self, x_th: Tensor, tokens: int, vocab: int) -> Tensor:
        """Uninitialized (tokens, vocab) with the dtype and device of ``x_th``; invalidates the previous result."""
        if not x_th.is_cpu:
            return x_th.new_empty((tokens, vocab))
        memory = self._held
        if (
            memory is None
            or memory.dtype != x_th.dtype
            or memory.numel() < tokens * vocab
            or memory.is_inference() != torch.is_inference_mode_enabled()
        ):
            self._held = memory = None  # frees the old block before the new allocation
            self._held = memory = x_th.new_empty(tokens * vocab)
        return memory[: tokens * vocab].view(tokens, vocab)


class _HeadLoss(torch.autograd.Function):
    """Weighted sum of the per-token losses, which is differentiable, and the losses, which are not."""

    @staticmethod
    def forward(
        ctx: Any,
        x_sbh: Tensor,
        weight: Tensor,
        bias_v: Tensor | None,
        labels_sb: Tensor,
        weights_sb: Tensor,
        comm: TensorComm,
        shard: VocabShard,
        workspace: LogitsWorkspace,
        cap: float | None,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        full = comm.gather(x_sbh, Point.TP_FWD) if comm.sequence_parallel else x_sbh
        x_th = full.reshape(-1, full.shape[-1])
        labels_t = labels_sb.reshape(-1)
        weights_t = weights_sb.reshape(-1)
        ctx.comm, ctx.shape, ctx.valid_rows, ctx.biased = comm, full.shape, shard.valid_rows, bias_v is not None
        ctx.cap = cap
        if comm.size == 1:
            ctx.main_grad = main_grad_of(weight) if with_grad else None
            ctx.claim = None if ctx.main_grad is None else ctx.main_grad.claim()
            into = None if ctx.claim is None else ctx.main_grad.memory.view(weight.shape)
            inputs = (x_th, weight, bias_v, labels_t, weights_t, shard, workspace, cap)
            losses_t, grads = _fused_forward(*inputs, with_grad, into)
            if with_grad:
                ctx.save_for_backward(*grads)
        else:
            accumulate = torch.promote_types(x_th.dtype, torch.float32)
            local_t = labels_t - shard.start
            here_t = (local_t >= 0) & (local_t < shard.valid_rows)
            local_t = torch.where(here_t, local_t, -1)
            stats = torch.empty((2, x_th.shape[0]), dtype=accumulate, device=x_th.device)
            logits = product(x_th, weight.t())
            if bias_v is not None:
                logits.add_(bias_v)
            soft_cap_(logits, cap)
            cross_entropy(logits, local_t, shard.valid_rows, stats[0], stats[1])
            stats_of_ranks = comm.gather_exact(stats)
            lse_t = torch.logsumexp(stats_of_ranks[:, 0], dim=0)
            losses_t = lse_t - stats_of_ranks[:, 1].sum(dim=0)
            if with_grad:
                # Under sequence parallelism, backward gathers the input again, so that only the local part is saved.
                ctx.save_for_backward(x_sbh, weight, weights_t, logits, lse_t, local_t)
                ctx.weight = weight
        total = torch.dot(losses_t, weights_t.to(losses_t.dtype))
        losses_sb = losses_t.view(labels_sb.shape)
        ctx.mark_non_differentiable(losses_sb)
        return total, losses_sb

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        comm: TensorComm = ctx.comm
        if comm.size == 1:
            unit, grad_x, grad_weight, grad_bias = ctx.saved_tensors
            factor = grad * unit
            _scale_((grad_x, grad_weight, grad_bias), factor)
            if ctx.claim is not None:
                ctx.main_grad.add_claimed(ctx.claim, lambda memory: _scale_((memory,), factor))
            elif ctx.main_grad is not None and ctx.main_grad.open and not torch.is_grad_enabled():
                ctx.main_grad.add(grad_weight.view(ctx.main_grad.memory.shape))
                grad_weight = None
            return grad_x.view(ctx.shape), grad_weight, grad_bias, *(None,) * 7
        x_sbh, weight, weights_t, logits, lse_t, labels_t = ctx.saved_tensors
        full = comm.gather(x_sbh, Point.TP_BWD) if comm.sequence_parallel else x_sbh
        x_th = full.reshape(-1, full.shape[-1])
        scale_t = weights_t.to(lse_t.dtype) * grad
        slope = None if ctx.cap is None else slope_of_capped(logits, ctx.cap)
        cross_entropy(logits, labels_t, ctx.valid_rows, lse_t, weights_t=scale_t)
        if slope is not None:
            logits.mul_(slope)
        grad_x = product(logits, weight)
        grad_weight = store_grad(ctx.weight, (logits, x_th), lambda out, inputs: product(inputs[0].t(), inputs[1], out))
        grad_bias = logits.sum(dim=0, dtype=lse_t.dtype).to(logits.dtype) if ctx.biased else None
        grad_x = grad_x.view(ctx.shape)
        pending = comm.start_reduce(grad_x, Point.TP_BWD, scatter=comm.sequence_parallel)
        return pending.wait(), grad_weight, grad_bias, *(None,) * 7


def _scale_(grads: tuple[Tensor | None, ...], factor: Tensor) -> None:
    """Multiply gradients in place; skip a factor of 1 where reading it costs no synchronization."""
    if factor.is_cpu and factor == 1:
        return
    for grad in grads:
        if grad is not None:
            grad.mul_(factor)


def _fused_forward(
    x_th: Tensor,
    weight_vh: Tensor,
    bias_v: Tensor | None,
    labels_t: Tensor,
    weights_t: Tensor,
    shard: VocabShard,
    workspace: LogitsWorkspace,
    cap: float | None,
    with_grad: bool,
    out_vh: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Losses of all tokens and, if requested, a unit and the gradients of their weighted sum over it, on one rank.

    The weight's gradient is written to ``out_vh``, if given, and is then None in the result: tensors that autograd
    saves must not change, and other gradients lie beside it.
    """
    accumulate = torch.promote_types(x_th.dtype, torch.float32)
    num_tokens, vocab = x_th.shape[0], weight_vh.shape[0]
    groups = _token_groups(num_tokens, vocab, x_th.device)
    lse_t, target_t = (torch.empty(num_tokens, dtype=accumulate, device=x_th.device) for _ in range(2))
    scale_t = weights_t.to(accumulate)
    unit = scale_t.new_ones(())
    if x_th.dtype == torch.float16:
        # The probability of an unlikely token, times its weight (one in many thousands), would underflow to zero before
        # the loss scale is applied.
        largest = scale_t.abs().amax()
        unit = torch.where(largest > 0, largest, 1.0)
    scale_t = scale_t / unit
    grad_x, grad_w = x_th, weight_vh
    if with_grad:
        grad_x = x_th.new_empty(x_th.shape)
        # Several groups are added in fp32.
        dtype = weight_vh.dtype if len(groups) == 1 else torch.promote_types(weight_vh.dtype, torch.float32)
        if out_vh is not None and out_vh.dtype == dtype:
            grad_w = out_vh
        else:
            grad_w = torch.empty(weight_vh.shape, dtype=dtype, device=weight_vh.device)
        if not groups:
            grad_w.zero_()
    grad_bias = None if bias_v is None else torch.zeros_like(bias_v, dtype=accumulate)
    memory = workspace.scratch(x_th, groups[0].stop if groups else 0, vocab)
    for group in groups:
        logits = product(x_th[group], weight_vh.t(), memory[: group.stop - group.start])
        if bias_v is not None:
            logits.add_(bias_v)
        soft_cap_(logits, cap)
        slope = None if cap is None or not with_grad else slope_of_capped(logits, cap)
        scales = scale_t[group] if with_grad else None
        cross_entropy(logits, labels_t[group], shard.valid_rows, lse_t[group], target_t[group], scales)
        if slope is not None:
            logits.mul_(slope)
        if with_grad:
            product(logits, weight_vh, grad_x[group])
            add_product_(grad_w, logits, x_th[group], fresh=group.start == 0)
            if grad_bias is not None:
                grad_bias.add_(logits.sum(dim=0, dtype=accumulate))
    if out_vh is not None:
        out_vh.copy_(grad_w)
    returned_w = grad_w.to(weight_vh.dtype) if out_vh is None else None
    return lse_t - target_t, (unit, grad_x, returned_w, None if grad_bias is None else grad_bias.to(weight_vh.dtype))


def head_loss(
    x_sbh: Tensor,
    weight: Tensor,
    labels_sb: Tensor,
    weights_sb: Tensor,
    comm: TensorComm,
    shard: VocabShard,
    bias_v: Tensor | None = None,
    workspace: LogitsWorkspace | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of tokens.

    Args:
        x_sbh: final hidden states, (s, b, h), or this rank's part of s under sequence parallelism.
        weight: local rows of the output projection, (rows, h). Rows beyond the vocabulary must be finite; they change
            nothing and get zero gradients.
        labels_sb: int64 targets, (s, b).
        weights_sb: weight of each token in the sum, (s, b).
        bias_v: local part of the output projection's bias, if it has one; finite beyond the vocabulary, too.
        workspace: memory for logits, to share between calls.
        cap: soft cap of the logits; None for no cap.

    Returns:
        The weighted sum (scalar, fp32 or fp64, equal on all tensor-parallel ranks), and the losses of the tokens in
        nats, (s, b), detached.
    """
    arguments = (labels_sb, weights_sb, comm, shard, workspace or LogitsWorkspace(), cap, torch.is_grad_enabled())
    total, losses_sb = _HeadLoss.apply(x_sbh, weight, bias_v, *arguments)
    return total, losses_sb
