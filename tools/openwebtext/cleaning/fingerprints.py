"""MinHash fingerprints of texts (Broder 1997), computed by rensa, and their buckets for locality-sensitive hashing.

A text is represented by its set of 5-character shingles. The probability that the minimum hashes of two texts agree is
the Jaccard similarity of their sets; the minima under many seeds are the fingerprint.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.atomic import atomic_write, check_writable
from megatron.base.errors import UserError
from megatron.data.permute import finalize

SHINGLE = 5

_UNREADABLE = (
    OSError, ValueError, TypeError, AttributeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors that NumPy raises for files that are damaged or not NumPy archives."""

_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F],
    dtype=np.uint64,
)


def shingle_hashes(text: str) -> NDArray[np.uint64]:
    """Hashes of a text's 5-character shingles, with repetitions; a shorter text is zero-padded."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    codes = np.pad(codes, (0, max(SHINGLE - len(codes), 0)))
    count = len(codes) - SHINGLE + 1
    x = codes[:count] * _FACTORS[0]
    for offset in range(1, SHINGLE):
        x += codes[offset : offset + count] * _FACTORS[offset]
    return finalize(x)


def signatures(texts: Sequence[str], seeds: int, seed: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Fingerprints of texts, [texts, seeds], and their numbers of shingles, [texts]."""
    import rensa

    hashes = [shingle_hashes(text) for text in texts]
    offsets = np.cumsum([0, *map(len, hashes)]).astype(np.uint64)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate([np.empty(0, np.uint64), *hashes]), offsets, seeds, seed
    )
    rows = np.array(matrix.to_rows(), dtype=np.uint32).reshape(len(texts), seeds)
    return rows, np.diff(offsets).astype(np.int64)


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of many documents.

    Args:
        rows: fingerprints, [documents, seeds].
        sizes: shingles of each document, with repetitions (so min and max are underestimated for repetitive texts).
    """

    rows: NDArray[np.uint32]
    sizes: NDArray[np.int64]

    def estimate(self, a: int, b: int, measure: str) -> float:
        """Estimate the similarity of two documents, for missing texts."""
        union = float((self.rows[a] == self.rows[b]).mean())
        intersection = union / (1 + union) * float(self.sizes[a] + self.sizes[b])
        small, large = sorted((float(self.sizes[a]), float(self.sizes[b])))
        return {"union": union, "min": min(intersection / small, 1.0), "max": min(intersection / large, 1.0)}[measure]

    def rules_out(self, a: int, b: int, minimum: float) -> bool:
        """Return whether two fingerprints agree so rarely that the similarity is below ``minimum``, at four sigmas."""
        seeds = self.rows.shape[1]
        num_equal = int(np.count_nonzero(self.rows[a] == self.rows[b]))
        return num_equal < seeds * minimum - 4 * (seeds * minimum * (1 - minimum)) ** 0.5

    def buckets(self, bands: int, documents: NDArray[np.int64]) -> Iterator[list[int]]:
        """Yield groups of two or more documents whose fingerprints agree in all rows of a band, band after band."""
        for band in np.split(self.rows, bands, axis=1):
            groups: dict[bytes, list[int]] = defaultdict(list)
            for document in documents.tolist():
                groups[band[document].tobytes()].append(document)
            yield from (group for group in groups.values() if len(group) > 1)

    def save(self, path: Path, keys: Sequence[str], seed: int) -> None:
        """Write the fingerprints and the document keys as plain arrays.

        Raises:
            UserError: when the file cannot be written.
        """
        header = json.dumps(_header(seed)).encode()
        key_lines = "\n".join(map(json.dumps, keys)).encode()
        about, key_bytes = np.frombuffer(header, np.uint8), np.frombuffer(key_lines, np.uint8)
        try:
            with atomic_write(check_writable(path, "--save-fingerprints")) as stream:
                np.savez(stream, about=about, keys=key_bytes, rows=self.rows, sizes=self.sizes)
        except OSError as error:
            raise UserError(f"--save-fingerprints {path}: {error.strerror or error}") from error


def load_fingerprints(path: Path, seeds: int, seed: int) -> tuple[Fingerprints, list[str]]:
    """Read a file written by ``save``; return the fingerprints and the document keys.

    Raises:
        UserError: when the file is invalid, or uses other hash functions.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(archive["about"].tobytes())
            keys = [json.loads(line) for line in archive["keys"].tobytes().decode().splitlines()]
            rows, sizes = archive["rows"], archive["sizes"]
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or f"cannot be read ({error})"
        raise UserError(f"--load-fingerprints {path}: {reason}") from error
    dtypes = (rows.dtype, rows.ndim, sizes.dtype) == (np.dtype(np.uint32), 2, np.dtype(np.int64))
    shapes = sizes.shape == rows.shape[:1] == (len(keys),)
    if not (dtypes and shapes and (sizes > 0).all() and all(isinstance(key, str) for key in keys)):
        raise UserError(f"--load-fingerprints {path}: was not written by --save-fingerprints; create it again")
    if header != _header(seed) or rows.shape[1] != seeds:
        raise UserError(
            f"--load-fingerprints {path}: has {rows.shape[1]} seeds of {header}, not {seeds} of {_header(seed)}; "
            "give the same --num-seeds and --seed"
        )
    return Fingerprints(rows, sizes), keys


def _header(seed: int) -> dict[str, Any]:
    """Return the seed and the version of the algorithm; only fingerprints with equal headers are comparable."""
    import rensa

    return {"seed": seed, "algorithm": f"rensa RMinHash {rensa.RMinHash.ALGORITHM_VERSION}, {SHINGLE} characters"}
