"""BERT samples: masked words, and two texts in order or swapped."""

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

# [CLS] and two [SEP].
BERT_SPECIAL_TOKENS = 3


class BertDataset(MaskedDataset):
    """Masked-language-model samples with sentence order; without ``binary_head``, masked words alone.

    A sample is [CLS] A [SEP] B [SEP]: sentences of a single document, split at a random sentence, with the halves
    swapped in 50 % of the samples. Excess tokens are removed from either end of the longer half. Of the target tokens,
    80 % are replaced by [MASK], 10 % by a random token, and 10 % are left unchanged. ``seq_length`` includes padding.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        order: SentenceOrder,
        ids: WordPieceIds,
        masker: WordMasker,
        *,
        seq_length: int,
        binary_head: bool,
    ) -> None:
        super().__init__(indexed, order, ids, masker)
        self.seq_length = seq_length
        self.binary_head = binary_head
        self.row_length = 4 * seq_length + 2

    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        """See ``SampleSource``: tokens, types, labels and loss mask, then the number of tokens and the order."""
        sample_id = self.order.sample_id(index)
        begin, end, target = self.order.sentences(sample_id)
        random = self.order.random(sample_id)
        pivot, swapped = end - begin, False
        if self.binary_head:
            pivot = int(random.randint(low=1, high=end - begin)) if end - begin >= 3 else 1
            swapped = bool(random.random_sample() < 0.5)
        first_t, second_t = self.indexed.read_range(begin, begin + pivot), self.indexed.read_range(begin + pivot, end)
        if swapped:
            first_t, second_t = second_t, first_t
        # Tokens are removed singly from either end of the longer text until ``target`` tokens remain in total.
        sizes, begins = [len(first_t), len(second_t)], [0, 0]
        excess = max(0, sum(sizes) - target)
        for at_begin in (random.random_sample(excess) < 0.5).tolist():
            longer = 0 if sizes[0] > sizes[1] else 1
            sizes[longer] -= 1
            begins[longer] += at_begin
        first_t, second_t = first_t[begins[0] :][: sizes[0]], second_t[begins[1] :][: sizes[1]]

        fields_fs = out_t[:-2].reshape(4, self.seq_length)
        tokens_s, types_s, labels_s, mask_s = fields_fs
        sep = [self.ids.sep]
        text_t = np.concatenate([[self.ids.cls], first_t, sep, second_t, sep if len(second_t) else []]).astype(np.int64)
        tokens_s[:] = labels_s[:] = self.ids.pad
        tokens_s[: len(text_t)] = text_t
        types_s[:] = mask_s[:] = 0
        types_s[len(first_t) + 2 : len(text_t)] = 1
        for ngram in self.masker.ngrams(text_t, target, random):
            for position in ngram.tolist():
                labels_s[position] = text_t[position]
                mask_s[position] = 1
                if random.random_sample() < 0.8:
                    tokens_s[position] = self.ids.mask
                elif random.random_sample() >= 0.5:
                    tokens_s[position] = int(random.randint(0, len(self.ids.continues_v)))
        out_t[-2], out_t[-1] = len(text_t), swapped

    def collate(
        self, rows_bt: NDArray[np.int64], sample_ids_b: NDArray[np.int64], draw_ids_b: NDArray[np.int64]
    ) -> Batch:
        length = self.seq_length
        return Batch(
            sample_ids_b=torch.from_numpy(sample_ids_b),
            draw_ids_b=torch.from_numpy(draw_ids_b),
            tokens_bs=copy_columns(rows_bt, 0, length),
            types_bs=copy_columns(rows_bt, length, length),
            labels_bs=copy_columns(rows_bt, 2 * length, length),
            loss_mask_bs=copy_columns(rows_bt, 3 * length, length).float(),
            position_ids_bs=position_ids(len(rows_bt), length),
            segment_ids_bs=padding_segments(rows_bt[:, -2], length),
            order_b=torch.from_numpy(rows_bt[:, -1].copy()),
        )
