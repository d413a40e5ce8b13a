"""Micro-batches and the collation of samples into them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_HOST_IDS = ("sample_ids_b", "draw_ids_b")


@dataclass(frozen=True)
class CollateOptions:
    """Collation options: the treatment of documents inside a sequence.

    Args:
        eod_token: id of the end-of-document token.
        reset_position_ids: restart positions at 0 after each end-of-document token.
        reset_attention_mask: assign segment ids to the documents of a sequence, so that attention does not cross them.
        eod_mask_loss: mask the loss where the input token is the end-of-document token.
    """

    eod_token: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


@dataclass(frozen=True)
class Batch:
    """A micro-batch. Token tensors are None on stages that do not need them; sample and draw ids are always set.

    Args:
        tokens_bs: int64 token ids; for T5, of the encoder.
        labels_bs: int64. GPT: the tokens shifted left by 1. BERT: the original token at masked positions. T5: the
            decoder tokens shifted left by 1, [b, decoder length]. Tasks: the label of each sample, [b, 1], float64
            for regression.
        loss_mask_bs: float32, 1 where the loss counts; same shape as the labels.
        position_ids_bs: int64 position ids; for T5, of the encoder.
        segment_ids_bs: int32; tokens attend only within their segment. GPT: index of the document inside the sequence,
            with causal attention inside each segment; None without reset_attention_mask. BERT and T5: 0 for text, 1
            for padding.
        types_bs: int64 token types of BERT: 0 for the first sentence, 1 for the second. None for GPT and T5.
        order_b: int64 sentence-order labels of BERT: 1 where the two sentences are swapped. None for GPT and T5.
        decoder_tokens_bs: int64 input tokens of the T5 decoder, [b, decoder length]. None for GPT and BERT.
        decoder_segment_ids_bs: int32 segment ids of the decoder tokens.
        lengths_b: int64 number of tokens of each task sequence, without padding. None for pretraining.
        sample_ids_b: int64 content id of each sample: equal ids mean equal content.
        draw_ids_b: int64 position of each sample in the run's sample stream.
    """

    sample_ids_b: torch.Tensor
    draw_ids_b: torch.Tensor
    tokens_bs: torch.Tensor | None = None
    labels_bs: torch.Tensor | None = None
    loss_mask_bs: torch.Tensor | None = None
    position_ids_bs: torch.Tensor | None = None
    segment_ids_bs: torch.Tensor | None = None
    types_bs: torch.Tensor | None = None
    order_b: torch.Tensor | None = None
    decoder_tokens_bs: torch.Tensor | None = None
    decoder_segment_ids_bs: torch.Tensor | None = None
    lengths_b: torch.Tensor | None = None

    def truncated(self, length: int) -> Batch:
        """Truncate every sample to its first ``length`` tokens."""
        if self.tokens_bs is None or self.tokens_bs.shape[1] == length:
            return self
        names = ("tokens_bs", "labels_bs", "loss_mask_bs", "position_ids_bs", "segment_ids_bs", "types_bs")
        tensors = {name: x_bs for name in names if (x_bs := getattr(self, name)) is not None}
        return replace(self, **{name: x_bs[:, :length].contiguous() for name, x_bs in tensors.items()})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Copy the token tensors to ``device``; sample and draw ids stay on the host, which reads them."""
        tensors = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name in (item.name for item in fields(self))
            if name not in _HOST_IDS and (tensor := getattr(self, name)) is not None
        }
        return replace(self, **tensors)


def collate(
    samples_bt: NDArray[Any],
    sample_ids_b: NDArray[np.int64],
    draw_ids_b: NDArray[np.int64],
    options: CollateOptions,
) -> Batch:
    """Collate samples of seq_length + 1 tokens into a batch.

    Args:
        samples_bt: token ids, integers [b, s + 1].
        sample_ids_b, draw_ids_b: int64 [b].
    """
    tokens_bs = np.ascontiguousarray(samples_bt[:, :-1], dtype=np.int64)
    labels_bs = np.ascontiguousarray(samples_bt[:, 1:], dtype=np.int64)
    is_end_bs = tokens_bs == options.eod_token
    loss_mask_bs = np.ones(tokens_bs.shape, dtype=np.float32)
    if options.eod_mask_loss:
        loss_mask_bs[is_end_bs] = 0.0
    # True at the first token after each end-of-document token.
    is_start_bs = np.zeros_like(is_end_bs)
    is_start_bs[:, 1:] = is_end_bs[:, :-1]
    positions_bs = np.tile(np.arange(tokens_bs.shape[1], dtype=np.int64), (len(tokens_bs), 1))
    if options.reset_position_ids:
        positions_bs -= np.maximum.accumulate(np.where(is_start_bs, positions_bs, 0), axis=1)
    segment_ids_bs = None
    if options.reset_attention_mask:
        segment_ids_bs = torch.from_numpy(np.cumsum(is_start_bs, axis=1, dtype=np.int32))
    return Batch(
        sample_ids_b=torch.from_numpy(sample_ids_b),
        draw_ids_b=torch.from_numpy(draw_ids_b),
        tokens_bs=torch.from_numpy(tokens_bs),
        labels_bs=torch.from_numpy(labels_bs),
        loss_mask_bs=torch.from_numpy(loss_mask_bs),
        position_ids_bs=torch.from_numpy(positions_bs),
        segment_ids_bs=segment_ids_bs,
    )
