"""Micro-batches, and how samples are collated into them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_HOST_IDS = ("sample_ids_b", "draw_ids_b")


@dataclass(frozen=True)
class CollateOptions:
    """Options of collation: how documents inside a sequence are treated.

    Args:
        eod_token: id of the end-of-document token.
        reset_position_ids: positions start again at 0 after each end of document.
        reset_attention_mask: number the documents inside a sequence, so that attention stays inside each.
        eod_mask_loss: no loss where the input token is the end of a document.
    """

    eod_token: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


@dataclass(frozen=True)
class Batch:
    """One micro-batch. The token tensors are None for a stage that asked for none; the ids are always there.

    Args:
        tokens_bs: int64; for T5 the encoder's.
        labels_bs: int64. GPT: the tokens one place on. BERT: where the loss counts, the token before it was masked.
            T5: the decoder's tokens one place on, [b, decoder length]. Tasks: the label of each sample, [b, 1],
            float64 where it is a number.
        loss_mask_bs: float32, 1 where the loss counts, of the shape of the labels.
        position_ids_bs: int64; for T5 the encoder's.
        segment_ids_bs: int32; tokens attend within equal numbers. GPT: number of the document inside the sequence,
            from 0, and a token attends to earlier ones alone; None without reset_attention_mask. BERT and T5: 0 for
            text, 1 for padding.
        types_bs: int64 token types of BERT: 0 for the first sentence, 1 for the second. None for GPT and T5.
        order_b: int64 labels of BERT's sentence order: 1 where the two sentences are swapped. None for GPT and T5.
        decoder_tokens_bs: int64 tokens that T5's decoder reads, [b, decoder length]. None for GPT and BERT.
        decoder_segment_ids_bs: int32 segment ids of the decoder's tokens.
        lengths_b: int64 tokens of each sequence of a task, without padding. None for pretraining.
        sample_ids_b: int64 identity of each sample's content in its dataset: the same content, the same id.
        draw_ids_b: int64 position of each sample in the run's stream of samples.
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
        """The first ``length`` tokens of every sample."""
        if self.tokens_bs is None or self.tokens_bs.shape[1] == length:
            return self
        return replace(self, **{name: x_bs[:, :length].contiguous() for name, x_bs in self._of_tokens()})

    def _of_tokens(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors with an entry for each token, by name."""
        for name in ("tokens_bs", "labels_bs", "loss_mask_bs", "position_ids_bs", "segment_ids_bs", "types_bs"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Copies the token tensors to ``device``; the ids stay on the host, where they are read."""
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name in (item.name for item in fields(self))
            if name not in _HOST_IDS and (tensor := getattr(self, name)) is not None
        }
        return replace(self, **moved)


def collate(
    samples_bt: NDArray[Any],
    sample_ids_b: NDArray[np.int64],
    draw_ids_b: NDArray[np.int64],
    options: CollateOptions,
) -> Batch:
    """Collates samples of seq_length + 1 tokens into a batch.

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
    # True at the first token of each later document: the token after an end of document.
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
