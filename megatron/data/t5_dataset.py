"""T5 samples: span corruption."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.data.batch import Batch
from megatron.data.indexed import IndexedDataset
from megatron.data.masked_dataset import MaskedDataset, copy_columns, padding_segments, position_ids
from megatron.data.masking import WordMasker
from megatron.data.sentence_order import SentenceOrder
from megatron.tokenizer.wordpiece import WordPieceIds

# The encoder text is cut as if it had begin and end tokens, as in megatron-core.
T5_SPECIAL_TOKENS = 2


class T5Dataset(MaskedDataset):
    """Span-corruption samples.

    The encoder reads the text with a sentinel in place of each span. The decoder reads [BOS], then each sentinel
    followed by its span; its labels are the same tokens shifted left by 1, then [EOS]. Spans stay in the text when the
    sentinels or the decoder's positions run out. The lengths of both sequences include padding.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        order: SentenceOrder,
        ids: WordPieceIds,
        masker: WordMasker,
        *,
        encoder_length: int,
        decoder_length: int,
    ) -> None:
        super().__init__(indexed, order, ids, masker)
        self.encoder_length = encoder_length
        self.decoder_length = decoder_length
        self.row_length = encoder_length + 2 * decoder_length + 2

    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        """See ``SampleSource``: encoder tokens, decoder tokens, labels, and the encoder and decoder lengths."""
        sample_id = self.order.sample_id(index)
        begin, end, target = self.order.sentences(sample_id)
        text_t = self.indexed.read_range(begin, end)[:target].astype(np.int64)
        spans: list[NDArray[np.int64]] = []
        room = self.decoder_length - 1
        for span in self.masker.ngrams(text_t, target, self.order.random(sample_id)):
            if len(spans) < len(self.ids.sentinels) and len(span) + 1 <= room:
                spans.append(span)
                room -= len(span) + 1
        spans.sort(key=lambda span: int(span[0]))
        encoder: list[int] = []
        decoder: list[int] = []
        position = 0
        for sentinel, span in zip(self.ids.sentinels, spans, strict=False):
            encoder += [*text_t[position : span[0]].tolist(), sentinel]
            decoder += [sentinel, *text_t[span].tolist()]
            position = int(span[-1]) + 1
        encoder += text_t[position:].tolist()
        sizes = len(encoder), len(decoder) + 1
        out_t[:] = self.ids.pad
        out_t[: sizes[0]] = encoder
        decoder_d, labels_d = out_t[self.encoder_length : -2].reshape(2, self.decoder_length)
        decoder_d[: sizes[1]] = [self.ids.bos, *decoder]
        labels_d[: sizes[1]] = [*decoder, self.ids.eos]
        out_t[-2:] = sizes

    def collate(
        self, rows_bt: NDArray[np.int64], sample_ids_b: NDArray[np.int64], draw_ids_b: NDArray[np.int64]
    ) -> Batch:
        length, decoder_length = self.encoder_length, self.decoder_length
        decoder_segments_bs = padding_segments(rows_bt[:, -1], decoder_length)
        return Batch(
            sample_ids_b=torch.from_numpy(sample_ids_b),
            draw_ids_b=torch.from_numpy(draw_ids_b),
            tokens_bs=copy_columns(rows_bt, 0, length),
            labels_bs=copy_columns(rows_bt, length + decoder_length, decoder_length),
            loss_mask_bs=(decoder_segments_bs == 0).float(),
            position_ids_bs=position_ids(len(rows_bt), length),
            segment_ids_bs=padding_segments(rows_bt[:, -2], length),
            decoder_tokens_bs=copy_columns(rows_bt, length, decoder_length),
            decoder_segment_ids_bs=decoder_segments_bs,
        )
