"""MinHash fingerprints of texts (Broder 1997), and the buckets of locality-sensitive hashing that they fall into.

A text is the set of its runs of five characters. The chance that two texts' minima under a random hash agree is the
Jaccard similarity of their sets; the minima under many seeds are the fingerprint. rensa computes them.
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
"""Hashes that are made at a time (4 MB, and four times as much meanwhile)."""

_UNREADABLE = (
    OSError, ValueError, TypeError, AttributeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What NumPy raises for files that are none of its archives, or damaged."""

_ODD = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F],
    dtype=np.uint64,
)


def _mixed(x: Hashes) -> Hashes:
    """A bijection of 64 bits that leaves no pattern (Steele et al. 2014, the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shingle_hashes(text: str) -> Hashes:
    """Hashes of a text's runs of five characters, with repetitions; of a shorter text, of the whole."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    if len(codes) < SHINGLE:
        codes = np.pad(codes, (0, SHINGLE - len(codes)))
    count = len(codes) - SHINGLE + 1
    total = codes[:count] * _ODD[0]
    for place in range(1, SHINGLE):
        total += codes[place : place + count] * _ODD[place]
    return _mixed(total)


def _size(text: str) -> int:
    return max(len(text) - SHINGLE + 1, 1)


def _pieces(text: str) -> Iterator[Hashes]:
    """The hashes of ``shingle_hashes``, so many at a time that a long text needs little memory besides them."""
    for start in range(0, _size(text), _PIECE):
        yield shingle_hashes(text[start : start + _PIECE + SHINGLE - 1])


def shingle_set(text: str) -> Hashes:
    """Hashes of a text's runs of five characters, sorted, each once."""
    hashes, end = np.empty(_size(text), dtype=np.uint64), 0
    for piece in _pieces(text):
        hashes[end : end + len(piece)] = piece
        end += len(piece)
    hashes.sort()  # np.unique's hash table takes four times as long
    return hashes[np.append(True, hashes[1:] != hashes[:-1])]


def similarity(a: Hashes, b: Hashes, kind: str) -> float:
    """Of two sorted sets of shingles: what they share of their union, of the smaller (min) or of the larger (max)."""
    small, large = (a, b) if len(a) <= len(b) else (b, a)
    places = np.searchsorted(large, small)
    places[places == len(large)] = 0
    shared = int((large[places] == small).sum())
    whole = {"union": len(a) + len(b) - shared, "min": len(small), "max": len(large)}[kind]
    return shared / whole


def signatures(texts: Sequence[str], seeds: int, seed: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Fingerprints of some texts, (texts, seeds), and the numbers of their shingles."""
    rows = np.full((len(texts), seeds), np.iinfo(np.uint32).max, dtype=np.uint32)
    pieces: list[Hashes] = []
    owners: list[int] = []
    held = 0
    for number, text in enumerate(texts):
        for piece in _pieces(text):
            pieces.append(piece)
            owners.append(number)
            held += len(piece)
            if held >= _PIECE:
                _lower(rows, owners, pieces, seed)
                pieces, owners, held = [], [], 0
    if pieces:
        _lower(rows, owners, pieces, seed)
    return rows, np.array([_size(text) for text in texts], dtype=np.int64)


def _lower(rows: NDArray[np.uint32], owners: Sequence[int], pieces: Sequence[Hashes], seed: int) -> None:
    """Puts the minima of some pieces into the fingerprints of the texts that they are of."""
    import rensa

    offsets = np.cumsum([0, *map(len, pieces)]).astype(np.uint64)
    hashes = np.concatenate(pieces)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, rows.shape[1], seed)
    np.minimum.at(rows, np.array(owners), np.array(matrix.to_rows(), dtype=np.uint32))


class Index:
    """Fingerprints of many documents.

    Args:
        rows: (documents, seeds).
        sizes: shingles of each, with repetitions (so that estimates of min and max are low for repetitive texts).
        seed: of the hash functions.
    """

    def __init__(self, rows: NDArray[np.uint32], sizes: NDArray[np.int64], seed: int) -> None:
        self.rows = rows
        self.sizes = sizes
        self.seed = seed

    @property
    def bytes_per_document(self) -> int:
        """Memory that each document takes."""
        return self.rows.shape[1] * 4 + 8

    def estimate(self, a: int, b: int, kind: str) -> float:
        """Similarity of two documents whose texts are not at hand, from their fingerprints."""
        union = float((self.rows[a] == self.rows[b]).mean())
        shared = union / (1 + union) * float(self.sizes[a] + self.sizes[b])
        small, large = sorted((float(self.sizes[a]), float(self.sizes[b])))
        return {"union": union, "min": min(shared / small, 1.0), "max": min(shared / large, 1.0)}[kind]

    def hopeless(self, a: int, b: int, least: float) -> bool:
        """Whether two documents' fingerprints agree in too few places, by four standard deviations, to be alike."""
        seeds = self.rows.shape[1]
        agreeing = int(np.count_nonzero(self.rows[a] == self.rows[b]))
        return agreeing < seeds * least - 4 * (seeds * least * (1 - least)) ** 0.5

    def buckets(self, bands: int, left_out: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
        """Documents that agree in all rows of a band, two or more at a time; band after band.

        Args:
            bands: into which the fingerprints are cut.
            left_out: documents that do not count.
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
        """Writes the fingerprints and the documents' keys; plain arrays.

        Raises:
            UserError: when they cannot be written.
        """
        about = json.dumps({"seed": self.seed, "algorithm": algorithm()})
        joined = "\n".join(json.dumps(key) for key in keys).encode()
        try:
            with atomic_write(check_writable(path, "--save-fingerprints")) as stream:
                np.savez(
                    stream,
                    about=np.frombuffer(about.encode(), np.uint8),
                    keys=np.frombuffer(joined, np.uint8),
                    rows=self.rows,
                    sizes=self.sizes,
                )
        except OSError as error:
            raise UserError(f"--save-fingerprints {path}: {error.strerror or error}") from error

    @staticmethod
    def load(path: Path, seeds: int, seed: int) -> tuple[Index, list[str]]:
        """Reads what ``save`` wrote.

        Raises:
            UserError: when it is none, or of other hash functions.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                about: dict[str, Any] = json.loads(found["about"].tobytes())
                keys = [json.loads(line) for line in found["keys"].tobytes().decode().splitlines()]
                rows, sizes = found["rows"], found["sizes"]
        except _UNREADABLE as error:
            reason = getattr(error, "strerror", None) or f"cannot be read ({error})"
            raise UserError(f"--load-fingerprints {path}: {reason}") from error
        if not _as_saved(rows, sizes, keys):
            raise UserError(f"--load-fingerprints {path}: is no output of --save-fingerprints; make it again")
        known = {"seed": seed, "algorithm": algorithm()}
        if about != known or rows.shape[1] != seeds:
            raise UserError(
                f"--load-fingerprints {path}: has {rows.shape[1]} seeds of {about}, not {seeds} of {known}; "
                "give the same --num-seeds and --seed"
            )
        return Index(rows, sizes, seed), keys


def _as_saved(rows: NDArray[Any], sizes: NDArray[Any], keys: Sequence[Any]) -> bool:
    """Whether these can be the fingerprints, the sizes and the keys of some documents."""
    kinds = (rows.dtype, rows.ndim, sizes.dtype) == (np.dtype(np.uint32), 2, np.dtype(np.int64))
    shapes = sizes.shape == rows.shape[:1] == (len(keys),)
    return kinds and shapes and bool((sizes > 0).all()) and all(isinstance(key, str) for key in keys)


def algorithm() -> str:
    """What makes fingerprints comparable."""
    import rensa

    return f"rensa RMinHash {rensa.RMinHash.ALGORITHM_VERSION}, {SHINGLE} characters"
