"""Running means of activations for each token of the vocabulary, equal at both ends of a boundary."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.compression.state import CompressorState

MEANS, COUNTS = "token-means", "token-counts"


def predict(state: CompressorState, tokens_n: Tensor, vocab_size: int, channels: int) -> Tensor:
    """Mean of each token's past activations, (n, h), fp32, in new memory; zeros for new tokens."""
    means_vh = state.get(MEANS)
    if means_vh is None:
        means_vh = torch.zeros((vocab_size, channels), device=tokens_n.device)
    return means_vh[tokens_n]


def learn(state: CompressorState, tokens_n: Tensor, x_nh: Tensor, vocab_size: int, horizon: int) -> None:
    """Update the means of a message's tokens with its activations; nonfinite activations are ignored.

    With m a token's mean over n activations and a the mean of c new activations, m becomes
    m + c / (min(n, horizon) + c) (a - m): first the plain mean, later a mean that forgets. Shapes do not depend on the
    tokens, and sums are in the order of the tokens, so both ends get equal bits without waiting for the GPU.

    Args:
        state: the state of an end; the step's first call copies the table.
        tokens_n: int64.
        x_nh: activations decoded by the receiver, fp32.
        vocab_size: size of the vocabulary.
        horizon: number of a token's activations after which older activations are forgotten.
    """
    means_vh = _writable_table(state, MEANS, x_nh.new_zeros((vocab_size, x_nh.shape[1])))
    counts_v = _writable_table(state, COUNTS, x_nh.new_zeros(vocab_size))
    sorted_n, order_n = tokens_n.sort(stable=True)
    x_nh = x_nh[order_n]
    finite_n = x_nh.isfinite().all(dim=1)
    # A slot for each distinct token of the message; there are as many slots as tokens, and the last ones stay empty.
    slot_n = torch.cat([sorted_n.new_zeros(1), (sorted_n[1:] != sorted_n[:-1]).long()]).cumsum(0)
    token_n = torch.zeros_like(sorted_n).index_put_((slot_n,), sorted_n)
    new_n = torch.zeros_like(x_nh[:, 0]).index_put_((slot_n,), finite_n.float(), accumulate=True)
    x_nh = x_nh.masked_fill(~finite_n.unsqueeze(1), 0.0)
    sum_nh = torch.zeros_like(x_nh).index_put_((slot_n,), x_nh, accumulate=True)
    share_n = new_n / (counts_v[token_n].clamp(max=horizon) + new_n).clamp(min=1.0)
    step_nh = share_n.unsqueeze(1) * (sum_nh / new_n.clamp(min=1.0).unsqueeze(1) - means_vh[token_n])
    # An empty slot adds zero to the mean of token 0.
    means_vh.index_add_(0, token_n, step_nh)
    counts_v.index_add_(0, token_n, new_n)


def _writable_table(state: CompressorState, name: str, empty: Tensor) -> Tensor:
    """The step's copy of a table, for in-place updates; initially ``empty``."""
    newest = state.get(name)
    if newest is not None and newest is not state.tensors.get(name):
        return newest
    table = empty if newest is None else newest.clone()
    state.stage(name, table)
    return table
