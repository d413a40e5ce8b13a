"""The two index formats of a ``.bin`` file of raw tokens. Little endian, no padding.

mmap (magic ``MMIDIDX``): 9 bytes magic, u64 version 1, u8 dtype code, u64 N sequences, u64 D document entries,
N x int32 lengths in tokens, N x int64 offsets in bytes, D x int64 document starts.

legacy lazy/cached (magic ``TNTIDX``): 8 bytes magic, u64 version 1, u64 dtype code, u64 element size, u64 N
items, u64 S sizes, u64 D document entries, then int64 dim_offsets[N+1], data_offsets[N+1] in elements,
sizes[S], document starts[D]. Token files have a single size per item, so S = N.

The document starts are sequence indices: they start at 0, never decrease and end with N. A repeated entry is an empty
document.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import UserError

MMAP_MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
IMPLEMENTATIONS = ("mmap", "lazy", "cached")

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

_MMAP_HEADER = struct.Struct("<9sQBQQ")
_LEGACY_HEADER = struct.Struct("<8s6Q")
# Rows per block of the checks; bounds the memory needed to open an index.
_CHECK_ROWS = 1 << 20


@dataclass(frozen=True)
class IndexTable:
    """A validated index: the position of each sequence in the ``.bin``.

    Args:
        legacy: whether it is in the lazy/cached format.
        dtype: dtype of the tokens.
        lengths: int32 [N], tokens of each sequence.
        offsets: int64 [N], byte offset of each sequence.
        doc_idx: int64 [D], index of the first sequence of each document.
    """

    legacy: bool
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    doc_idx: NDArray[np.int64]


def best_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Token dtype for a vocabulary, as in Megatron: uint16 below 65,500 entries, else int32."""
    return DTYPES[8] if vocab_size is not None and vocab_size < 65500 else DTYPES[4]


def byte_offsets(lengths: NDArray[np.int32], itemsize: int) -> NDArray[np.int64]:
    """Byte offset of each sequence: the exclusive cumulative sum of the lengths."""
    offsets = np.zeros(len(lengths), dtype="<i8")
    if len(lengths):
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= itemsize
    return offsets


def encode_mmap_index(lengths: NDArray[np.int32], doc_idx: NDArray[np.int64], dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Encode an mmap index in chunks of bytes."""
    yield _MMAP_HEADER.pack(MMAP_MAGIC, VERSION, CODES[dtype], len(lengths), len(doc_idx))
    yield lengths.astype("<i4").tobytes()
    yield byte_offsets(lengths, dtype.itemsize).tobytes()
    yield doc_idx.astype("<i8").tobytes()


def encode_legacy_index(
    lengths: NDArray[np.int32], doc_idx: NDArray[np.int64], dtype: np.dtype[Any]
) -> Iterator[bytes]:
    """Encode a lazy/cached index in chunks of bytes."""
    count = len(lengths)
    yield _LEGACY_HEADER.pack(LEGACY_MAGIC, VERSION, CODES[dtype], dtype.itemsize, count, count, len(doc_idx))
    yield np.arange(count + 1, dtype="<i8").tobytes()
    yield np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8").tobytes()
    yield lengths.astype("<i8").tobytes()
    yield doc_idx.astype("<i8").tobytes()


def read_index(path: Path) -> IndexTable:
    """Memory-maps and validates an index of either format.

    Raises:
        UserError: when the magic number, version, dtype, size, lengths, offsets or document starts are wrong; the
            message names the file and the first problem.
    """
    try:
        size = path.stat().st_size
        raw = np.memmap(path, dtype=np.uint8, mode="r") if size else np.zeros(0, dtype=np.uint8)
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such index. Give the path without .bin/.idx, or write it with tools/preprocess_data.py"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Check the path and its permissions") from None
    head = raw[:64].tobytes()
    if head.startswith(MMAP_MAGIC):
        return _read_mmap(path, raw, head)
    if head.startswith(LEGACY_MAGIC):
        return _read_legacy(path, raw, head)
    if len(head) < len(MMAP_MAGIC) and (MMAP_MAGIC.startswith(head) or LEGACY_MAGIC.startswith(head)):
        raise damage_error(path, f"is truncated: {size} bytes do not hold a header")
    raise damage_error(path, "does not start with the magic bytes of an index (MMIDIDX or TNTIDX)")


def damage_error(path: Path, problem: str) -> UserError:
    """Error for a damaged file."""
    return UserError(f"{path}: {problem}. Restore the file or write it again with tools/preprocess_data.py")


def _read_mmap(path: Path, raw: NDArray[np.uint8], head: bytes) -> IndexTable:
    if len(head) < _MMAP_HEADER.size:
        raise damage_error(path, f"is truncated: {len(raw)} bytes do not hold a header")
    _, version, code, count, documents = _MMAP_HEADER.unpack_from(head)
    dtype = _check_version_and_dtype(path, version, code)
    _check_size(path, len(raw), _MMAP_HEADER.size + 12 * count + 8 * documents, count, documents)
    start = _MMAP_HEADER.size
    lengths = raw[start : start + 4 * count].view("<i4")
    start += 4 * count
    offsets = raw[start : start + 8 * count].view("<i8")
    doc_idx = raw[start + 8 * count :].view("<i8")
    expected = 0
    for first in range(0, count, _CHECK_ROWS):
        block = lengths[first : first + _CHECK_ROWS].astype(np.int64)
        if int(block.min()) < 0:
            raise damage_error(path, f"has a negative length at sequence {first + int(np.argmax(block < 0))}")
        ends = np.cumsum(block * dtype.itemsize) + expected
        mismatches = np.flatnonzero(offsets[first : first + _CHECK_ROWS] != ends - block * dtype.itemsize)
        if len(mismatches):
            raise damage_error(
                path, f"has an offset at sequence {first + int(mismatches[0])} that does not match its lengths"
            )
        expected = int(ends[-1])
    _check_documents(path, doc_idx, count)
    return IndexTable(False, dtype, lengths, offsets, doc_idx)


def _read_legacy(path: Path, raw: NDArray[np.uint8], head: bytes) -> IndexTable:
    if len(head) < _LEGACY_HEADER.size:
        raise damage_error(path, f"is truncated: {len(raw)} bytes do not hold a header")
    _, version, code, element_size, count, sizes_count, documents = _LEGACY_HEADER.unpack_from(head)
    dtype = _check_version_and_dtype(path, version, code)
    if element_size != dtype.itemsize:
        raise damage_error(path, f"has {element_size} bytes per {dtype.name} instead of {dtype.itemsize}")
    expected = _LEGACY_HEADER.size + 8 * (2 * (count + 1) + sizes_count + documents)
    _check_size(path, len(raw), expected, count, documents)
    if sizes_count != count:
        raise damage_error(
            path, f"holds {sizes_count} sizes for {count} items, so it is not a file of 1-D token sequences"
        )
    table = raw[_LEGACY_HEADER.size :].view("<i8")
    dim_offsets, data_offsets = table[: count + 1], table[count + 1 : 2 * count + 2]
    sizes = table[2 * count + 2 : 3 * count + 2]
    if not np.array_equal(dim_offsets, np.arange(count + 1)):
        raise damage_error(path, "holds items that are not 1-D token sequences")
    if count and (int(sizes.min()) < 0 or int(sizes.max()) > np.iinfo(np.int32).max):
        raise damage_error(path, "holds a sequence length outside 0..2^31-1")
    lengths = sizes.astype("<i4")
    if int(data_offsets[0]) != 0 or not np.array_equal(np.diff(data_offsets), sizes):
        raise damage_error(path, "has offsets that are not the running sum of its lengths")
    doc_idx = table[3 * count + 2 :]
    _check_documents(path, doc_idx, count)
    return IndexTable(True, dtype, lengths, byte_offsets(lengths, dtype.itemsize), doc_idx)


def _check_version_and_dtype(path: Path, version: int, code: int) -> np.dtype[Any]:
    if version != VERSION:
        raise damage_error(path, f"has format version {version}; this reader supports version {VERSION}")
    if code not in DTYPES:
        raise damage_error(path, f"has the unknown dtype code {code} (known: 1 to 8)")
    return DTYPES[code]


def _check_size(path: Path, actual: int, expected: int, count: int, documents: int) -> None:
    if actual != expected:
        raise damage_error(
            path,
            f"is {'truncated' if actual < expected else 'too long'}: {actual} bytes, but its header "
            f"({count} sequences, {documents} document entries) needs {expected}",
        )


def _check_documents(path: Path, doc_idx: NDArray[np.int64], count: int) -> None:
    if len(doc_idx) == 0 or int(doc_idx[0]) != 0 or int(doc_idx[-1]) != count:
        raise damage_error(path, f"has document starts that do not run from 0 to its {count} sequences")
    for start in range(0, len(doc_idx), _CHECK_ROWS):
        block = doc_idx[start : start + _CHECK_ROWS + 1]
        if bool(np.any(block[1:] < block[:-1])):
            raise damage_error(path, "has document starts that decrease")
