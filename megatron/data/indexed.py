"""Reader and writer of token sequences in a ``.bin`` file with an ``.idx`` index.

The mmap format is identical to Megatron's; the legacy lazy/cached format is supported as well.
See ``idx_format`` for both layouts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.base.atomic import atomic_write, fsync_directory
from megatron.base.errors import UserError
from megatron.data.cache import make_cache, write_cached
from megatron.data.idx_format import (
    DTYPES,
    IMPLEMENTATIONS,
    IndexTable,
    damage_error,
    encode_legacy_index,
    encode_mmap_index,
    read_index,
)

_SCAN_BYTES = 64 << 20


def dataset_files(prefix: str | Path) -> tuple[Path, Path]:
    """Paths of the ``.bin`` and ``.idx`` of a prefix; also accepts a path that ends in either suffix."""
    text = os.fspath(prefix)
    if text.endswith((".bin", ".idx")):
        text = text[:-4]
    return Path(text + ".bin"), Path(text + ".idx")


class IndexedDataset:
    """Read-only, thread-safe view of a ``.bin/.idx`` pair, checked when it is opened.

    Args:
        prefix: path without ``.bin``/``.idx``.
        impl: "mmap" maps the tokens; "lazy" reads each sequence from the file; "cached" loads the whole file into
            memory; "infer" is mmap for the mmap format and lazy for the legacy format.

    Raises:
        UserError: when a file is missing or damaged, or its format does not match ``impl``.
    """

    def __init__(self, prefix: str | Path, impl: str = "infer") -> None:
        self.bin_path, self.idx_path = dataset_files(prefix)
        self.prefix = os.fspath(self.bin_path)[:-4]
        table = read_index(self.idx_path)
        if impl == "infer":
            impl = "lazy" if table.legacy else "mmap"
        elif impl not in IMPLEMENTATIONS:
            raise UserError(f"--data-impl {impl} is not known: choose infer, mmap, lazy or cached")
        elif (impl == "mmap") == table.legacy:
            kind = "the legacy lazy/cached" if table.legacy else "the mmap"
            raise UserError(f"{self.idx_path}: is in {kind} format, but --data-impl is {impl}. Use --data-impl infer")
        self.impl = impl
        self.table = table
        _check_bin(self.bin_path, self.idx_path, table)
        self._file: int | None = None
        self._tokens: NDArray[Any] | None = None
        if self.impl == "lazy":
            self._file = os.open(self.bin_path, os.O_RDONLY)
        elif self.impl == "cached":
            self._tokens = np.fromfile(self.bin_path, dtype=table.dtype)
        else:
            self._tokens = _map_tokens(self.bin_path, table.dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored tokens."""
        return self.table.dtype

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, int32 [N]."""
        return self.table.lengths

    @property
    def doc_idx(self) -> NDArray[np.int64]:
        """Index of the first sequence of each document, followed by N; int64 [D]."""
        return self.table.doc_idx

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.doc_idx) - 1

    def __len__(self) -> int:
        return len(self.table.lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Tokens of a sequence, in the stored dtype."""
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Read ``length`` tokens of sequence ``index``, starting at token ``offset`` (to its end when None).

        Raises:
            IndexError: when the position is outside the dataset or the sequence.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.bin_path}")
        available = int(self.table.lengths[index])
        if length is None:
            length = available - offset
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(f"tokens [{offset}, {offset + length}) of a sequence of {available} in {self.bin_path}")
        return self._read(int(self.table.offsets[index]) + offset * self.dtype.itemsize, length)

    def read_range(self, begin: int, end: int) -> NDArray[Any]:
        """Concatenated tokens of the sequences [begin, end).

        Raises:
            IndexError: when the range exceeds the dataset.
        """
        if not 0 <= begin <= end <= len(self):
            raise IndexError(f"sequences [{begin}, {end}) of {len(self)} in {self.bin_path}")
        if begin == end:
            return np.zeros(0, dtype=self.dtype)
        length = int(np.sum(self.table.lengths[begin:end], dtype=np.int64))
        return self._read(int(self.table.offsets[begin]), length)

    def _read(self, start: int, length: int) -> NDArray[Any]:
        """Read ``length`` tokens starting at byte ``start``."""
        if self._tokens is not None:
            first = start // self.dtype.itemsize
            return self._tokens[first : first + length]
        if self._file is None:
            raise ValueError(f"{self.bin_path} is closed")
        data = os.pread(self._file, length * self.dtype.itemsize, start)
        if len(data) != length * self.dtype.itemsize:
            raise damage_error(self.bin_path, "became shorter while it was being read")
        return np.frombuffer(data, dtype=self.dtype)

    def close(self) -> None:
        """Close the file; later reads raise an error."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        self._tokens = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def check_token_range(self, vocab_size: int, cache_path: str | Path | None = None) -> None:
        """Check that all token ids are in [0, vocab_size).

        Reads the whole ``.bin`` once. With a ``cache_path``, a successful check is cached under the file's path, size
        and modification time and the vocabulary size, and later calls return immediately.

        Raises:
            UserError: when a token id is out of range (the message names the file, the first such id and its sequence),
                or the cache cannot be written.
        """
        if self.dtype.kind == "f":
            raise UserError(
                f"{self.idx_path}: holds {self.dtype.name} values, not token ids. "
                f"Write it again with tools/preprocess_data.py"
            )
        if self.dtype.kind == "u" and vocab_size > np.iinfo(self.dtype).max:
            return
        stamp: Path | None = None
        if cache_path is not None:
            info = self.bin_path.stat()
            identity = f"{self.bin_path.resolve()}|{info.st_size}|{info.st_mtime_ns}|{self.dtype.str}|{vocab_size}"
            digest = hashlib.sha256(identity.encode()).hexdigest()[:32]
            stamp = Path(cache_path) / f"tokens-checked-{digest}.json"
            if os.path.exists(stamp):
                return
            make_cache(stamp.parent)
        self._scan_tokens(vocab_size)
        if stamp is not None:
            record = json.dumps({"file": os.fspath(self.bin_path), "below": vocab_size}).encode()
            write_cached(stamp, lambda stream: stream.write(record))

    def _scan_tokens(self, vocab_size: int) -> None:
        step = _SCAN_BYTES // self.dtype.itemsize
        tokens = _map_tokens(self.bin_path, self.dtype)
        for start in range(0, len(tokens), step):
            block = tokens[start : start + step]
            if int(block.max()) < vocab_size and (self.dtype.kind == "u" or int(block.min()) >= 0):
                continue
            position = start + int(np.argmax((block >= vocab_size) | (block < 0)))
            sequence = int(np.searchsorted(self.table.offsets, position * self.dtype.itemsize, side="right")) - 1
            raise UserError(
                f"{self.bin_path}: token id {int(tokens[position])} in sequence {sequence} is outside the "
                f"vocabulary of {vocab_size}. Use the tokenizer that made the data, or preprocess it again"
            )


def _check_bin(bin_path: Path, idx_path: Path, table: IndexTable) -> None:
    try:
        size = bin_path.stat().st_size
    except OSError:
        raise UserError(f"{bin_path}: the tokens of {idx_path.name} are missing. Copy the .bin beside it") from None
    expected = 0 if len(table.lengths) == 0 else int(table.offsets[-1]) + int(table.lengths[-1]) * table.dtype.itemsize
    if size != expected:
        raise damage_error(
            bin_path,
            f"is {'truncated' if size < expected else 'too long'}: {size} bytes, but {idx_path.name} "
            f"counts {expected // table.dtype.itemsize} tokens of {table.dtype.name}, {expected} bytes",
        )


def _map_tokens(bin_path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if bin_path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(bin_path, dtype=dtype, mode="r")


class IndexedWriter:
    """Writer of a ``.bin/.idx`` pair. The files get their final names in ``finalize``.

    As a context manager, it finalizes at the end of the block and removes its temporary files if the block raises. A
    killed process may leave ``PREFIX.bin.partial`` behind, which the next writer of the prefix overwrites.

    Args:
        prefix: path without ``.bin``/``.idx``.
        dtype: dtype of the stored tokens; the legacy format is always int32, as in Megatron.
        impl: "mmap", or "lazy"/"cached" for the legacy format.

    Raises:
        UserError: when ``impl`` is unknown, a token or a length does not fit its dtype, or another process writes the
            same prefix.
    """

    def __init__(self, prefix: str | Path, *, dtype: np.dtype[Any] = DTYPES[4], impl: str = "mmap") -> None:
        if impl not in IMPLEMENTATIONS:
            raise UserError(f"--dataset-impl {impl} is not known: choose mmap, lazy or cached")
        self.bin_path, self.idx_path = dataset_files(prefix)
        self.legacy = impl != "mmap"
        self.dtype = DTYPES[4] if self.legacy else np.dtype(dtype)
        self._lengths: list[NDArray[np.int64]] = []
        self._doc_idx: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
        self.num_sequences = 0
        self.num_documents = 0
        self._partial = self.bin_path.with_name(self.bin_path.name + ".partial")
        try:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            stream = open(self._partial, "ab")  # noqa: SIM115  (the writer object closes it)
        except OSError as error:
            raise UserError(
                f"{self._partial}: cannot be written ({error.strerror}). Choose another --output-prefix"
            ) from None
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                stream.close()
                raise UserError(
                    f"{self._partial}: another process is writing it. Wait for it, or choose another prefix"
                ) from None
        stream.truncate(0)
        self._stream: BinaryIO | None = stream

    @classmethod
    def like(cls, table: IndexTable, prefix: str | Path) -> IndexedWriter:
        """Open a writer with the format and dtype of an index, including the dtype of a legacy index."""
        writer = cls(prefix, dtype=table.dtype, impl="lazy" if table.legacy else "mmap")
        writer.dtype = table.dtype
        return writer

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike, sequences: ArrayLike) -> None:
        """Append documents.

        Args:
            tokens: [T] concatenated token ids of all documents.
            lengths: tokens of each sequence; the sum is T.
            sequences: number of sequences of each document; the sum is the number of lengths. 0 is an empty document.
        """
        tokens_t = np.asarray(tokens)
        lengths_s = np.asarray(lengths, dtype=np.int64).reshape(-1)
        counts_d = np.asarray(sequences, dtype=np.int64).reshape(-1)
        if int(lengths_s.sum()) != tokens_t.size or int(counts_d.sum()) != lengths_s.size:
            raise ValueError("lengths do not add up to the tokens, or sequences to the lengths")
        if tokens_t.size and tokens_t.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            low, high = int(tokens_t.min()), int(tokens_t.max())
            if low < limits.min or high > limits.max:
                raise UserError(
                    f"{self.bin_path}: token id {low if low < limits.min else high} does not fit {self.dtype.name}"
                )
            tokens_t = tokens_t.astype(self.dtype)
        if tokens_t.size:
            self._open_stream().write(np.ascontiguousarray(tokens_t).data)
        self._lengths.append(lengths_s)
        self._doc_idx.append(self.num_sequences + np.cumsum(counts_d))
        self.num_sequences += lengths_s.size
        self.num_documents += counts_d.size

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append a document: a single sequence unless ``lengths`` splits it, or no sequence if it has no tokens."""
        size = np.asarray(tokens).size
        sequence_lengths = ([size] if size else []) if lengths is None else list(lengths)
        self.add_documents(tokens, sequence_lengths, [len(sequence_lengths)])

    def merge(self, prefix: str | Path) -> None:
        """Append all documents of a finished pair of the same dtype."""
        bin_path, idx_path = dataset_files(prefix)
        table = read_index(idx_path)
        _check_bin(bin_path, idx_path, table)
        if table.dtype != self.dtype:
            raise UserError(f"{idx_path}: holds {table.dtype.name} tokens and cannot join {self.dtype.name} ones")
        with open(bin_path, "rb") as source:
            shutil.copyfileobj(source, self._open_stream(), 16 << 20)
        self._lengths.append(table.lengths.astype(np.int64))
        self._doc_idx.append(self.num_sequences + table.doc_idx[1:].astype(np.int64))
        self.num_sequences += len(table.lengths)
        self.num_documents += len(table.doc_idx) - 1

    def finalize(self) -> None:
        """Sync both files and move them to their final names: first the ``.bin``, then the ``.idx``."""
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *self._lengths])
        if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
            raise UserError(f"{self.bin_path}: a sequence of {int(lengths.max())} tokens is too long: split the text")
        stream = self._open_stream()
        stream.flush()
        os.fsync(stream.fileno())
        encode = encode_legacy_index if self.legacy else encode_mmap_index
        # The index of an earlier run must never coexist with the new tokens.
        self.idx_path.unlink(missing_ok=True)
        os.replace(self._partial, self.bin_path)
        fsync_directory(self.bin_path.parent)
        with atomic_write(self.idx_path) as index:
            for chunk in encode(lengths.astype(np.int32), np.concatenate(self._doc_idx), self.dtype):
                index.write(chunk)
        stream.close()
        self._stream = None

    def abort(self) -> None:
        """Remove the temporary files."""
        if self._stream is not None:
            self._partial.unlink(missing_ok=True)
            self._stream.close()
            self._stream = None

    def _open_stream(self) -> BinaryIO:
        if self._stream is None:
            raise ValueError(f"{self.bin_path} is already finished")
        return self._stream

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._stream is not None:
                self.finalize()
        finally:
            self.abort()
