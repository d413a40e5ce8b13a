"""Pairwise comparison of the documents in a bucket by their texts, in several processes that share the texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from tools.openwebtext.cleaning.fingerprints import Fingerprints, shingle_hashes

MIN_SIMILARITY = 0.5

_CACHED_TEXTS = 1000
"""Shingle sets that each process caches."""

_CACHED_PAIRS = 1 << 17
"""Similarities that each process caches for the next band with the same pair (about 32 MB)."""

Matches = list[tuple[int, int, float]]
"""Pairs of similar documents, the earlier document first, and their similarities."""


def similarity(a: NDArray[np.uint64], b: NDArray[np.uint64], measure: str) -> float:
    """Overlap of two shingle sets, relative to their union, to the smaller (min) or to the larger set (max)."""
    intersection = len(np.intersect1d(a, b, assume_unique=True))
    sizes = {"union": len(a) + len(b) - intersection, "min": min(len(a), len(b)), "max": max(len(a), len(b))}
    return intersection / sizes[measure]


@dataclass(frozen=True)
class Comparison:
    """Compares the documents of buckets; files opened by a process stay open until it ends.

    Args:
        texts: path of the file of all texts, document after document.
        bounds: offsets of each text and of its end, [documents + 1].
        num_without_text: number of documents without a text, which are the first.
        rows: path of the file of all fingerprints.
        sizes: number of shingles of each document.
        measure: similarity measure.
        rounds: number of documents per bucket that are compared with the others; -1 for all remaining documents.
        seed: seed of the comparison order.
    """

    texts: str
    bounds: NDArray[np.int64]
    num_without_text: int
    rows: str
    sizes: NDArray[np.int64]
    measure: str
    rounds: int
    seed: int

    @cached_property
    def _stream(self) -> BinaryIO:
        return open(self.texts, "rb")

    @cached_property
    def _fingerprints(self) -> Fingerprints:
        # All processes share the file. A plain array, since indexing a memmap costs microseconds more per row.
        return Fingerprints(np.asarray(np.load(self.rows, mmap_mode="r")), self.sizes)

    @cached_property
    def _shingles(self) -> Callable[[int], NDArray[np.uint64]]:
        """Cached shingle set of a document."""
        return lru_cache(_CACHED_TEXTS)(
            lambda document: np.unique(shingle_hashes(self._text(document).decode("utf-8", "surrogatepass")))
        )

    @cached_property
    def _similarity(self) -> Callable[[int, int], float]:
        """Cached similarity of two documents; the earlier document is the first argument."""
        return lru_cache(_CACHED_PAIRS)(self._compare)

    def _text(self, document: int) -> bytes:
        start, end = self.bounds[document : document + 2].tolist()
        self._stream.seek(start)
        return self._stream.read(end - start)

    def _compare(self, a: int, b: int) -> float:
        if self.measure == "union" and self._fingerprints.rules_out(a, b, MIN_SIMILARITY):
            return 0.0
        if a < self.num_without_text:
            return self._fingerprints.estimate(a, b, self.measure)
        if self._text(a) == self._text(b):
            return 1.0
        return similarity(self._shingles(a), self._shingles(b), self.measure)

    def __call__(self, buckets: Sequence[list[int]]) -> Matches:
        """Find similar documents in each bucket.

        Each round compares a document with all others in the bucket and removes the similar documents, until the rounds
        or the documents run out.
        """
        matches: Matches = []
        for bucket in buckets:
            documents = list(bucket)
            generator = random.Random(f"{self.seed} {documents[0]} {len(documents)}")
            rounds = self.rounds
            while len(documents) > 1 and rounds:
                document = documents.pop(generator.randrange(len(documents)) if rounds > 0 else 0)
                dissimilar = []
                for other in documents:
                    first, second = min(document, other), max(document, other)
                    value = self._similarity(first, second)
                    if value > MIN_SIMILARITY:
                        matches.append((first, second, value))
                    else:
                        dissimilar.append(other)
                documents = dissimilar
                rounds -= 1
        return matches


def merge_matches(matches: Iterable[Matches]) -> dict[int, dict[int, float]]:
    """Merge the matches of all buckets: each pair once, under its earlier document, in document order.

    Groups built from the result therefore list each document before its later duplicates.
    """
    similarities = {(first, second): value for bucket in matches for first, second, value in bucket}
    merged: dict[int, dict[int, float]] = {}
    for (first, second), value in sorted(similarities.items()):
        merged.setdefault(first, {})[second] = value
    return merged
