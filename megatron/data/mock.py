"""Synthetic tokens for runs without data files: ``--mock-data``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.idx_format import DTYPES, IndexTable, byte_offsets
from megatron.data.indexed import IndexedDataset
from megatron.data.permute import hash_array, mix

SEQUENCES = 1 << 18
SEQUENCE_TOKENS = 128
DOCUMENT_SEQUENCES = 16
_STEPS = 3


class MockDataset(IndexedDataset):
    """In-memory documents: token p depends only on the seed and p, so all ranks read the same data.

    A sequence counts up from a random token in random steps of 1 to 5, so that a model has something to learn.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.prefix = f"mock data of seed {seed}"
        self.bin_path = self.idx_path = Path(self.prefix)
        self.impl = "mmap"
        dtype = DTYPES[4]
        lengths = np.full(SEQUENCES, SEQUENCE_TOKENS, dtype=np.int32)
        documents = np.arange(0, SEQUENCES + 1, DOCUMENT_SEQUENCES, dtype=np.int64)
        self.table = IndexTable(False, dtype, lengths, byte_offsets(lengths, dtype.itemsize), documents)
        self.identity: dict[str, object] = {"mock": seed, "vocabulary": vocab_size}
        self._seed = seed
        self._vocab_size = vocab_size
        self._file = None
        self._tokens = None

    def check_token_range(self, vocab_size: int, cache_path: str | Path | None = None) -> None:
        """Do nothing: tokens are drawn from the vocabulary."""

    def _read(self, start: int, length: int) -> NDArray[Any]:
        first = start // self.dtype.itemsize
        positions_t = np.arange(first, first + length, dtype=np.uint64)
        sequences_t = positions_t // np.uint64(SEQUENCE_TOKENS)
        counted_t = positions_t % np.uint64(SEQUENCE_TOKENS) * np.uint64(_STEPS)
        tokens_t = hash_array(sequences_t, mix(self._seed, 0)) % np.uint64(self._vocab_size) + counted_t
        tokens_t += hash_array(positions_t, mix(self._seed, 1)) % np.uint64(_STEPS)
        return (tokens_t % np.uint64(self._vocab_size)).astype(self.dtype)
