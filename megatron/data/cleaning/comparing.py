"""Pairwise comparison of the documents in a bucket by their texts, in several processes that share the texts."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron.data.cleaning.fingerprints import Hashes, Index, shingle_set, similarity

LEAST = 0.5

_MOST_HASHES = 1 << 23
"""Shingle hashes of recent texts that each process caches (64 MB)."""

_MOST_SIMILARITIES = 1 << 17
"""Recent similarities that each process caches for the next band with the same pair (about 32 MB)."""

Pairs = list[tuple[int, list[tuple[int, float]]]]
"""Documents with their similar documents and similarities."""


class Texts:
    """Reader of document keys and texts from a file.

    Args:
        path: path of the file.
        places: offset of each document, and lengths of its key and its text (-1: no text).
    """

    def __init__(self, path: str, places: NDArray[np.int64]) -> None:
        self.stream = open(path, "rb")  # noqa: SIM115  # open for the lifetime of the process
        self.places = places
        self._kept: OrderedDict[int, Hashes] = OrderedDict()
        self._held = 0

    def key(self, number: int) -> str:
        start, length, _ = self.places[number]
        self.stream.seek(int(start))
        return self.stream.read(int(length)).decode("utf-8", "surrogatepass")

    def _text(self, number: int) -> bytes | None:
        start, key, text = (int(x) for x in self.places[number])
        if text < 0:
            return None
        self.stream.seek(start + key)
        return self.stream.read(text)

    def equal(self, a: int, b: int) -> bool:
        """Whether two documents have the same text."""
        first, second = self.places[a, 2], self.places[b, 2]
        return bool(first == second >= 0) and self._text(a) == self._text(b)

    def shingles(self, number: int) -> Hashes | None:
        """Shingles of a document's text; recent results are cached."""
        hashes = self._kept.pop(number, None)
        if hashes is None:
            text = self._text(number)
            if text is None:
                return None
            hashes = shingle_set(text.decode("utf-8", "surrogatepass"))
            self._held += len(hashes)
        self._kept[number] = hashes
        while self._held > _MOST_HASHES and len(self._kept) > 1:
            self._held -= len(self._kept.popitem(last=False)[1])
        return hashes


@dataclass(frozen=True)
class Comparison:
    """Compares the documents of buckets; files opened by a process stay open until it ends.

    Args:
        path, places: as in ``Texts``.
        prints: file of all fingerprints.
        sizes: number of shingles of each document.
        kind: similarity measure.
        rounds: number of documents per bucket that are compared with the others; -1 for all remaining documents.
        seed: seed of the fingerprints and of the comparison order.
    """

    path: str
    places: NDArray[np.int64]
    prints: str
    sizes: NDArray[np.int64]
    kind: str
    rounds: int
    seed: int

    @cached_property
    def texts(self) -> Texts:
        return Texts(self.path, self.places)

    @cached_property
    def index(self) -> Index:
        # All processes share the file. A plain array, since indexing a memmap costs microseconds more per row.
        return Index(np.asarray(np.load(self.prints, mmap_mode="r")), self.sizes, self.seed)

    @cached_property
    def compared(self) -> Callable[[int, int], float]:
        """Cached similarity of two documents; the earlier document is the first argument."""
        return lru_cache(_MOST_SIMILARITIES)(self._compare)

    def __call__(self, buckets: Sequence[NDArray[np.int64]]) -> Pairs:
        """Finds similar documents in each bucket.

        Each round compares a document with all others in the bucket and removes the similar documents, until the rounds
        or the documents run out.
        """
        pairs: Pairs = []
        for bucket in buckets:
            remaining_documents = bucket.tolist()
            generator = random.Random(f"{self.seed} {remaining_documents[0]} {len(remaining_documents)}")
            rounds = self.rounds
            while len(remaining_documents) > 1 and rounds:
                document = remaining_documents.pop(generator.randrange(len(remaining_documents)) if rounds > 0 else 0)
                similarities = [(other, self._similarity(document, other)) for other in remaining_documents]
                matches = [(other, value) for other, value in similarities if value > LEAST]
                if matches:
                    similar_documents = {other for other, _ in matches}
                    remaining_documents = [other for other in remaining_documents if other not in similar_documents]
                    pairs.append((document, matches))
                rounds -= 1
        return pairs

    def _similarity(self, a: int, b: int) -> float:
        if self.kind == "union" and self.index.hopeless(a, b, LEAST):
            return 0.0
        return self.compared(min(a, b), max(a, b))

    def _compare(self, a: int, b: int) -> float:
        if self.texts.equal(a, b):
            return 1.0
        first, second = self.texts.shingles(a), self.texts.shingles(b)
        if first is None or second is None:
            return self.index.estimate(a, b, self.kind)
        return similarity(first, second, self.kind)


def merged(pairs: Iterable[Pairs]) -> dict[int, list[tuple[int, float]]]:
    """Merges the pairs of all buckets: each pair once, under its earlier document, in document order.

    Groups built from the result therefore list each document before its later duplicates.
    """
    similarities: dict[tuple[int, int], float] = {}
    for bucket_pairs in pairs:
        for document, matches in bucket_pairs:
            similarities.update(((min(document, other), max(document, other)), value) for other, value in matches)
    pairs_by_document: dict[int, list[tuple[int, float]]] = {}
    for (first, second), value in sorted(similarities.items()):
        pairs_by_document.setdefault(first, []).append((second, value))
    return pairs_by_document
