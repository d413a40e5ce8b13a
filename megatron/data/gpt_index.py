"""Sample orders of GPT datasets: map a draw to the tokens of its sample.

Both orders join the documents of all epochs, in shuffled order, into a token stream. Sample k covers the
seq_length + 1 tokens from position k * seq_length of that stream, so neighboring samples share a token. Samples are
drawn in shuffled order; k, the index before that shuffle, is the ``sample_id``.

``MegatronOrder`` builds the index arrays of megatron-core: identical sample by sample, and equally large.
``LazyOrder`` computes each sample on demand, so its startup time does not depend on the number of samples.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError
from megatron.data.cache import Arrays, cached_arrays, check_memory
from megatron.data.permute import Permutation, check_index, mix, random_state

# Approximate number of cached document-order entries, over all epochs.
_DOCUMENTS_KEPT = 1 << 22

# A contiguous piece of a sample: (sequence index in the file, first token, number of tokens).
Span = tuple[int, int, int]


class SampleOrder(Protocol):
    """Interface of a GPT sample order."""

    @property
    def epoch_samples(self) -> int:
        """Number of samples in a pass over all tokens."""

    def __len__(self) -> int:
        """Number of samples that can be drawn."""

    def sample_id(self, index: int) -> int:
        """Index before the shuffle of the sample at draw ``index``."""

    def spans(self, sample_id: int) -> Iterator[Span]:
        """Spans of a sample, in order; seq_length + 1 tokens in total."""


@dataclass(frozen=True)
class Documents:
    """The sequences [first, first + len(lengths)) of a file, which belong to a split.

    Args:
        lengths: int32 [n], tokens of each sequence.
        first: index of the first sequence in the file.
        name: name in messages.
    """

    lengths: NDArray[np.int32]
    first: int
    name: str

    def tokens_per_epoch(self) -> int:
        """Total number of tokens of all documents.

        Raises:
            UserError: when there are no tokens.
        """
        total = int(np.sum(self.lengths, dtype=np.int64))
        if total == 0:
            raise UserError(f"{self.name}: has no tokens. Give it more documents, or change --split")
        return total


class LazyOrder:
    """The default order: computed on demand, in constant time and memory per sample.

    Documents: epoch e permutes the documents with a generator seeded by (seed, e). The permutation and the cumulative
    lengths (12 bytes per document) are built on the first access to that epoch, and the last few epochs are cached. A
    binary search maps positions to documents.

    Samples: the samples that end in epoch e are shuffled among themselves by a computed bijection that needs no
    storage. Every document is therefore read e times before any is read e + 1 times, however long the run. Megatron's
    rule for the last epoch (shuffle it separately when less than 80 % of it is used) has the same purpose; here it
    applies to every epoch, without a threshold. The order does not depend on ``num_samples``: a shorter run is a prefix
    of a longer run.

    Args:
        documents: documents to draw from.
        seq_length: tokens per sample, without the extra label token.
        seed: seed of both shuffles.
        num_samples: maximum number of draws; None is an epoch.
    """

    def __init__(self, documents: Documents, seq_length: int, seed: int, num_samples: int | None) -> None:
        self._documents = documents
        self._seq_length = seq_length
        self._seed = seed
        self._epoch_tokens = documents.tokens_per_epoch()
        # Sequential reads need two epochs at a time; small files cache more, which is cheap.
        kept = min(64, max(2, _DOCUMENTS_KEPT // len(documents.lengths)))
        self._document_order = lru_cache(kept)(self._shuffle_documents)
        self._sample_order = lru_cache(kept)(self._shuffle_samples)
        self._lock = threading.Lock()  # no two threads shuffle the documents of the same epoch
        self.epoch_samples = self._epoch_start(1)
        self._num_samples = self.epoch_samples if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._num_samples

    def sample_id(self, index: int) -> int:
        epoch = (check_index(index, self._num_samples) + 1) * self._seq_length // self._epoch_tokens
        start = self._epoch_start(epoch)
        return start + self._sample_order(epoch)(index - start)

    def spans(self, sample_id: int) -> Iterator[Span]:
        position, remaining_tokens = sample_id * self._seq_length, self._seq_length + 1
        while remaining_tokens:
            epoch, offset = divmod(position, self._epoch_tokens)
            with self._lock:
                order, ends = self._document_order(epoch)
            order_index = int(np.searchsorted(ends, offset, side="right"))
            while remaining_tokens and order_index < len(order):
                end = int(ends[order_index])
                document = int(order[order_index])
                length = int(self._documents.lengths[document])
                span_tokens = min(remaining_tokens, end - offset)
                if span_tokens:
                    yield self._documents.first + document, offset - (end - length), span_tokens
                offset += span_tokens
                position += span_tokens
                remaining_tokens -= span_tokens
                order_index += 1

    def _epoch_start(self, epoch: int) -> int:
        """Number of samples that end before epoch ``epoch``, extra token included."""
        return max(0, (epoch * self._epoch_tokens - 1) // self._seq_length)

    def _shuffle_documents(self, epoch: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Documents in the order of an epoch, and their cumulative lengths in tokens."""
        lengths = self._documents.lengths
        order = np.arange(len(lengths), dtype=np.int32 if len(lengths) < 2**31 else np.int64)
        random_state(self._seed, epoch, 0).shuffle(order)
        return order, np.cumsum(lengths[order], dtype=np.int64)

    def _shuffle_samples(self, epoch: int) -> Permutation:
        """Order of the samples that end in an epoch."""
        samples = self._epoch_start(epoch + 1) - self._epoch_start(epoch)
        return Permutation(samples, mix(self._seed, epoch, 1))


class MegatronOrder:
    """megatron-core's eager order: three index arrays, built at startup or loaded from the cache.

    The document index contains the documents of all epochs, shuffled together. The sample index gives the entry of the
    document index and the token at which each sample starts. The shuffle index is the order of the samples. If less
    than 80 % of the last epoch is used, both shuffles treat that epoch separately. Built with NumPy only; checked
    against megatron-core 0.16.1.

    Args:
        documents, seq_length, seed: the arguments of ``LazyOrder``; the seed is used unchanged.
        num_samples: minimum number of samples; None is an epoch. All samples of the last epoch can be drawn.
        cache_path: cache folder for the arrays.
        cache_identity: path, size and modification time of the documents' file, for the cache.
    """

    def __init__(
        self,
        documents: Documents,
        seq_length: int,
        seed: int,
        num_samples: int | None,
        cache_path: str | Path | None = None,
        cache_identity: dict[str, Any] | None = None,
    ) -> None:
        self._documents = documents
        self._seq_length = seq_length
        self.epoch_samples = (documents.tokens_per_epoch() - 1) // seq_length
        identity = {
            **(cache_identity or {}),
            "documents": [documents.first, len(documents.lengths)],
            "seq_length": seq_length,
            "seed": seed,
            "num_samples": num_samples,
        }
        arrays = cached_arrays(
            cache_path,
            "gpt-order",
            identity,
            lambda: build_megatron_arrays(documents, seq_length, seed, num_samples),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def sample_id(self, index: int) -> int:
        return int(self.shuffle_index[check_index(index, len(self))])

    def spans(self, sample_id: int) -> Iterator[Span]:
        entry, offset = (int(value) for value in self.sample_index[sample_id])
        remaining_tokens = self._seq_length + 1
        while remaining_tokens:
            document = int(self.document_index[entry])
            span_tokens = min(remaining_tokens, int(self._documents.lengths[document - self._documents.first]) - offset)
            if span_tokens:
                yield document, offset, span_tokens
            remaining_tokens -= span_tokens
            entry, offset = entry + 1, 0


def build_megatron_arrays(documents: Documents, seq_length: int, seed: int, num_samples: int | None) -> Arrays:
    """Build Megatron's index arrays.

    Returns:
        document_index: int32 [epochs * documents], sequence indices in the file.
        sample_index: int32 or int64 [samples + 1, 2], entry of the document index and token offset in it.
        shuffle_index: uint32 or int64 [samples].
    """
    epoch_tokens = documents.tokens_per_epoch()
    wanted_tokens = 1 if num_samples is None else num_samples * seq_length + 1
    epochs = max(1, -(-wanted_tokens // epoch_tokens))
    total = (epochs * epoch_tokens - 1) // seq_length
    shuffle_split = total
    if epochs > 1 and num_samples is not None:
        earlier_samples = ((epochs - 1) * epoch_tokens - 1) // seq_length
        if num_samples - earlier_samples < int(0.80 * ((epoch_tokens - 1) // seq_length)):
            shuffle_split = earlier_samples
    count = len(documents.lengths)
    check_memory(12 * epochs * count + 24 * total, documents.name, total)
    random = np.random.RandomState(seed)
    document_index = np.tile(np.arange(documents.first, documents.first + count, dtype=np.int32), epochs)
    split = (epochs - 1) * count if shuffle_split != total else epochs * count
    random.shuffle(document_index[:split])
    if split != epochs * count:
        random.shuffle(document_index[split:])
    # Starts of samples 0..total, by binary search of their positions in the cumulative lengths.
    ends = np.cumsum(documents.lengths[document_index - documents.first], dtype=np.int64)
    largest = max(len(document_index), int(documents.lengths.max()))
    sample_index = np.zeros((total + 1, 2), dtype=np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    positions = np.arange(1, total + 1, dtype=np.int64) * seq_length
    entries = np.searchsorted(ends, positions, side="right")
    sample_index[1:, 0] = entries
    # The position of an entry's first token is the sum of all earlier lengths.
    sample_index[1:, 1] = positions - np.concatenate([np.zeros(1, dtype=np.int64), ends])[entries]
    shuffle_index = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(shuffle_index[:shuffle_split])
    if shuffle_split != total:
        random.shuffle(shuffle_index[shuffle_split:])
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}
