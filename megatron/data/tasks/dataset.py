"""Sample source of fine-tuning tasks: tokenized texts, labels and loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.config.model import ModelConfig
from megatron.data.batch import Batch
from megatron.data.masked_dataset import copy_columns, padding_segments, position_ids
from megatron.data.permute import check_index
from megatron.data.source import RowIndexing
from megatron.data.tasks.epochs import Epochs
from megatron.data.tasks.examples import Example
from megatron.tokenizer.api import PieceLookup, Tokenizer
from megatron.tokenizer.wordpiece import word_piece_ids

_CACHED_TEXTS = 1024
# First token, a separator after each of two texts, and a token of each text.
_MIN_LENGTH = 5
# Length, label, and whether the label counts.
_EXTRA_COLUMNS = 3
_NAMES = ("[CLS]", "[SEP]", "[PAD]")


@dataclass(frozen=True)
class Separators:
    """Ids of the tokens around texts.

    Args:
        first: token at the start of every sequence; None for no token.
        end: token after every text.
        pad: padding token.
    """

    first: int | None
    end: int
    pad: int


def join_texts(
    first: Sequence[int], second: Sequence[int] | None, length: int, separators: Separators
) -> tuple[list[int], int]:
    """Join one or two tokenized texts into at most ``length`` tokens; return them and the length of the first part.

    Excess tokens are removed from the end, as in Megatron.
    """
    tokens = [*([] if separators.first is None else [separators.first]), *first, separators.end]
    first_length = len(tokens)
    tokens += second or ()
    if len(tokens) >= length:
        tokens = [*tokens[: length - 1], separators.end]
    elif second is not None:
        tokens.append(separators.end)
    return tokens, min(first_length, length if second is None else length - 1)


class TaskDataset(RowIndexing):
    """Samples of a fine-tuning task, with padding draws that do not count.

    A draw is a single sequence; a sample with several sequences takes consecutive draws. The tokens of a first text are
    limited to ``max_first_tokens``, if given.

    Raises:
        UserError: when the model needs another tokenizer, or the sequence length is too small.
    """

    resets_positions = False

    def __init__(
        self,
        examples: Sequence[Example],
        epochs: Epochs,
        num_epochs: int,
        tokenizer: Tokenizer,
        model: ModelConfig,
        *,
        max_first_tokens: int | None,
    ) -> None:
        self.examples = examples
        self.epochs = epochs
        self._num_epochs = num_epochs
        # The classifier of a GPT model reads the hidden state of the last end-of-document token.
        if model.causal:
            self._separators = Separators(None, tokenizer.eod, tokenizer.eod)
        elif model.model_type == "deberta":
            token_ids = [tokenizer.id_of(name) for name in _NAMES] if isinstance(tokenizer, PieceLookup) else [None]
            if None in token_ids:
                raise UserError(
                    f"--tokenizer-type {tokenizer.name} has no {', '.join(_NAMES)}, which DeBERTa needs around "
                    "texts: give --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model of its folder"
                )
            cls, sep, pad = token_ids
            self._separators = Separators(cls, sep or 0, pad or 0)
        else:
            ids = word_piece_ids(tokenizer)
            self._separators = Separators(ids.cls, ids.sep, ids.pad)
        self._max_first_tokens = max_first_tokens
        self._length = model.seq_length
        if self._length < _MIN_LENGTH:
            raise UserError(f"--seq-length {self._length} leaves no room for texts; give at least {_MIN_LENGTH}")
        self._causal = model.causal
        self._has_types = model.num_tokentypes > 0
        self._is_regression = model.task_head == "regression"
        self._sequences_per_sample = model.sequences_per_sample
        self._tokenize = lru_cache(_CACHED_TEXTS)(tokenizer.tokenize)
        self.row_length = 2 * self._length + _EXTRA_COLUMNS
        self.epoch_samples = epochs.draws * self._sequences_per_sample
        self.real_samples = num_epochs * epochs.real_samples
        self.lanes = None if epochs.lanes is None else epochs.lanes * self._sequences_per_sample

    def __len__(self) -> int:
        return self._num_epochs * self.epoch_samples

    def sample_id(self, index: int) -> int:
        draw, number = divmod(check_index(index, len(self)), self._sequences_per_sample)
        return self.epochs.sample_at(draw).sample * self._sequences_per_sample + number

    def read(self, index: int, out_t: NDArray[np.int64]) -> None:
        """See ``SampleSource``: tokens, types, number of tokens, bits of the label, and whether the label counts."""
        sample, number = divmod(self.sample_id(index), self._sequences_per_sample)
        example, length = self.examples[sample], self._length
        first, second = example.sequences[number]
        second_tokens = None if second is None else self._tokenize(second)
        first_tokens = self._tokenize(first)[: self._max_first_tokens]
        tokens, first_length = join_texts(first_tokens, second_tokens, length, self._separators)
        out_t[:length] = self._separators.pad
        out_t[: len(tokens)] = tokens
        types_s = out_t[length : 2 * length]
        types_s[:] = 0
        types_s[first_length : len(tokens)] = 1
        out_t[-3] = len(tokens)
        out_t[-2] = np.float64(example.label).view(np.int64) if self._is_regression else example.label
        out_t[-1] = number == 0 and self.epochs.sample_at(index // self._sequences_per_sample).counts

    def collate(
        self, rows_bt: NDArray[np.int64], sample_ids_b: NDArray[np.int64], draw_ids_b: NDArray[np.int64]
    ) -> Batch:
        length = self._length
        labels_b1 = np.ascontiguousarray(rows_bt[:, -2:-1])
        return Batch(
            sample_ids_b=torch.from_numpy(sample_ids_b),
            draw_ids_b=torch.from_numpy(draw_ids_b),
            tokens_bs=copy_columns(rows_bt, 0, length),
            types_bs=copy_columns(rows_bt, length, length) if self._has_types else None,
            labels_bs=torch.from_numpy(labels_b1.view(np.float64) if self._is_regression else labels_b1),
            loss_mask_bs=torch.from_numpy(rows_bt[:, -1:].astype(np.float32)),
            position_ids_bs=position_ids(len(rows_bt), length),
            segment_ids_bs=None if self._causal else padding_segments(rows_bt[:, -3], length),
            lengths_b=torch.from_numpy(rows_bt[:, -3].copy()),
        )
