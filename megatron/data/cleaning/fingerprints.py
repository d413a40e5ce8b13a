"""MinHash fingerprints of texts (Broder 1997), and their buckets for locality-sensitive hashing.

A text is represented by its set of 5-character shingles. The probability that the minimum hashes of two texts agree is
the Jaccard similarity of their sets; the minima under many seeds are the fingerprint, which rensa computes.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.atomic import atomic_write, check_writable
from megatron.base.errors import UserError

SHINGLE = 5
Hashes = NDArray[np.uint64]

_PIECE = 1 << 19
"""Hashes computed at a time (4 MB, and temporarily four times that)."""

_UNREADABLE = (
    OSError, ValueError, TypeError, AttributeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors that NumPy raises for files that are damaged or not NumPy archives."""

_ODD = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F],
    dtype=np.uint64,
)


def _mixed(x: Hashes) -> Hashes:
    """64-bit mixing function: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shingle_hashes(text: str) -> Hashes:
    """Hashes of a text's 5-character shingles, with repetitions; a shorter text is zero-padded."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    if len(codes) < SHINGLE:
        codes = np.pad(codes, (0, SHINGLE - len(codes)))
    count = len(codes) - SHINGLE + 1
    total = codes[:count] * _ODD[0]
    for offset in range(1, SHINGLE):
        total += codes[offset : offset + count] * _ODD[offset]
    return _mixed(total)


def _size(text: str) -> int:
    return max(len(text) - SHINGLE + 1, 1)


def _pieces(text: str) -> Iterator[Hashes]:
    """Yields the hashes of ``shingle_hashes`` in pieces, to bound the temporary memory for long texts."""
    for start in range(0, _size(text), _PIECE):
        yield shingle_hashes(text[start : start + _PIECE + SHINGLE - 1])


def shingle_set(text: str) -> Hashes:
    """Sorted unique hashes of a text's 5-character shingles."""
    hashes, end = np.empty(_size(text), dtype=np.uint64), 0
    for piece in _pieces(text):
        hashes[end : end + len(piece)] = piece
        end += len(piece)
    hashes.sort()  # np.unique's hash table is four times slower
    return hashes[np.append(True, hashes[1:] != hashes[:-1])]


def similarity(a: Hashes, b: Hashes, kind: str) -> float:
    """Overlap of two sorted shingle sets, relative to their union, to the smaller (min) or to the larger set (max)."""
    small, large = (a, b) if len(a) <= len(b) else (b, a)
    places = np.searchsorted(large, small)
    places[places == len(large)] = 0
    intersection = int((large[places] == small).sum())
    denominator = {"union": len(a) + len(b) - intersection, "min": len(small), "max": len(large)}[kind]
    return intersection / denominator


def signatures(texts: Sequence[str], seeds: int, seed: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Fingerprints of texts, [texts, seeds], and their numbers of shingles, [texts]."""
    rows = np.full((len(texts), seeds), np.iinfo(np.uint32).max, dtype=np.uint32)
    pieces: list[Hashes] = []
    owners: list[int] = []
    num_pending = 0
    for number, text in enumerate(texts):
        for piece in _pieces(text):
            pieces.append(piece)
            owners.append(number)
            num_pending += len(piece)
            if num_pending >= _PIECE:
                _lower(rows, owners, pieces, seed)
                pieces, owners, num_pending = [], [], 0
    if pieces:
        _lower(rows, owners, pieces, seed)
    return rows, np.array([_size(text) for text in texts], dtype=np.int64)


def _lower(rows: NDArray[np.uint32], owners: Sequence[int], pieces: Sequence[Hashes], seed: int) -> None:
    """Updates fingerprints with the minimum hashes of pieces of their texts."""
    import rensa

    offsets = np.cumsum([0, *map(len, pieces)]).astype(np.uint64)
    hashes = np.concatenate(pieces)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, rows.shape[1], seed)
    np.minimum.at(rows, np.array(owners), np.array(matrix.to_rows(), dtype=np.uint32))


class Index:
    """Fingerprints of many documents.

    Args:
        rows: fingerprints, [documents, seeds].
        sizes: shingles of each document, with repetitions (so min and max are underestimated for repetitive texts).
        seed: seed of the hash functions.
    """

    def __init__(self, rows: NDArray[np.uint32], sizes: NDArray[np.int64], seed: int) -> None:
        self.rows = rows
        self.sizes = sizes
        self.seed = seed

    @property
    def bytes_per_document(self) -> int:
        """Memory per document, in bytes."""
        return self.rows.shape[1] * 4 + 8

    def estimate(self, a: int, b: int, kind: str) -> float:
        """Estimates the similarity of two documents from their fingerprints, for missing texts."""
        union = float((self.rows[a] == self.rows[b]).mean())
        intersection = union / (1 + union) * float(self.sizes[a] + self.sizes[b])
        small, large = sorted((float(self.sizes[a]), float(self.sizes[b])))
        return {"union": union, "min": min(intersection / small, 1.0), "max": min(intersection / large, 1.0)}[kind]

    def hopeless(self, a: int, b: int, least: float) -> bool:
        """Whether fingerprints agree in too few positions for similarity ``least``, by four standard deviations."""
        seeds = self.rows.shape[1]
        num_equal = int(np.count_nonzero(self.rows[a] == self.rows[b]))
        return num_equal < seeds * least - 4 * (seeds * least * (1 - least)) ** 0.5

    def buckets(self, bands: int, left_out: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
        """Yields groups of two or more documents that agree in all rows of a band, band after band.

        Args:
            bands: number of bands per fingerprint.
            left_out: mask of excluded documents.
        """
        height = self.rows.shape[1] // bands
        numbers = np.flatnonzero(~left_out)
        for band in range(bands):
            key = np.full(len(numbers), band, dtype=np.uint64)
            for column in range(band * height, (band + 1) * height):
                key = _mixed(key * _ODD[1] + self.rows[numbers, column].astype(np.uint64))
            order = np.argsort(key, kind="stable")
            bounds = np.append(np.flatnonzero(np.diff(key[order], prepend=~key[order[:1]])), len(order))
            for run in np.flatnonzero(np.diff(bounds) > 1):
                yield numbers[order[bounds[run] : bounds[run + 1]]]

    def save(self, path: Path, keys: Sequence[str]) -> None:
        """Writes the fingerprints and the document keys as plain arrays.

        Raises:
            UserError: when the file cannot be written.
        """
        header = json.dumps({"seed": self.seed, "algorithm": algorithm()})
        key_lines = "\n".join(json.dumps(key) for key in keys).encode()
        try:
            with atomic_write(check_writable(path, "--save-fingerprints")) as stream:
                np.savez(
                    stream,
                    about=np.frombuffer(header.encode(), np.uint8),
                    keys=np.frombuffer(key_lines, np.uint8),
                    rows=self.rows,
                    sizes=self.sizes,
                )
        except OSError as error:
            raise UserError(f"--save-fingerprints {path}: {error.strerror or error}") from error

    @staticmethod
    def load(path: Path, seeds: int, seed: int) -> tuple[Index, list[str]]:
        """Reads a file written by ``save``.

        Raises:
            UserError: when the file is invalid, or uses other hash functions.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                header: dict[str, Any] = json.loads(archive["about"].tobytes())
                keys = [json.loads(line) for line in archive["keys"].tobytes().decode().splitlines()]
                rows, sizes = archive["rows"], archive["sizes"]
        except _UNREADABLE as error:
            reason = getattr(error, "strerror", None) or f"cannot be read ({error})"
            raise UserError(f"--load-fingerprints {path}: {reason}") from error
        if not _as_saved(rows, sizes, keys):
            raise UserError(f"--load-fingerprints {path}: is no output of --save-fingerprints; make it again")
        expected_header = {"seed": seed, "algorithm": algorithm()}
        if header != expected_header or rows.shape[1] != seeds:
            raise UserError(
                f"--load-fingerprints {path}: has {rows.shape[1]} seeds of {header}, not {seeds} of {expected_header}; "
                "give the same --num-seeds and --seed"
            )
        return Index(rows, sizes, seed), keys


def _as_saved(rows: NDArray[Any], sizes: NDArray[Any], keys: Sequence[Any]) -> bool:
    """Whether arrays and keys have the dtypes and shapes of saved fingerprints."""
    kinds = (rows.dtype, rows.ndim, sizes.dtype) == (np.dtype(np.uint32), 2, np.dtype(np.int64))
    shapes = sizes.shape == rows.shape[:1] == (len(keys),)
    return kinds and shapes and bool((sizes > 0).all()) and all(isinstance(key, str) for key in keys)


def algorithm() -> str:
    """Version string of the fingerprint algorithm; only equal versions are comparable."""
    import rensa

    return f"rensa RMinHash {rensa.RMinHash.ALGORITHM_VERSION}, {SHINGLE} characters"
