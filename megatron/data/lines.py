"""Line-based files: compression is chosen by file name suffix, and writes are atomic."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megatron.base.atomic import check_writable, fsync_directory, hold_lock, remove_leftovers, temporary_path
from megatron.base.errors import UserError

_MAX_WINDOW = 1 << 31
"""Maximum window size of zstd files; large dumps exceed the library's default limit."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, which some programs write at the start of a file; JSON does not allow it."""

READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors raised when a missing or damaged file is read."""

_UNSUPPORTED_SUFFIXES = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip", ".7z")


class _ZstdReader(io.RawIOBase):
    """Reader of zstd files with any number of frames that detects truncation (zstandard's reader does not)."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._library = zstandard
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            unused = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            packed = unused or self._file.read(1 << 18)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._library.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise EOFError(error) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]  # a view: copying the remainder on every read would take quadratic time
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: io.BufferedReader(_ZstdReader(path), 1 << 20),
}


def is_compressed(path: str | Path) -> bool:
    """Whether a file is compressed, by its name."""
    return Path(path).suffix in _OPENERS


def open_decompressed(path: str | Path) -> BinaryIO:
    """Open a file for reading, decompressed according to its suffix.

    Raises:
        OSError, EOFError, zlib.error, lzma.LZMAError: here or during reads.
        ModuleNotFoundError: when the decompression library is missing.
    """
    path = Path(path)
    stream: BinaryIO = _OPENERS[path.suffix](path) if is_compressed(path) else path.open("rb")
    return stream


def _check_suffix(path: Path) -> None:
    if path.suffix in _UNSUPPORTED_SUFFIXES:
        raise UserError(f"{path}: its compression is not supported; name a .gz or .zst file, or an uncompressed one")


def numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines of a file, stripped, each with its line number (from 1); decompressed according to the suffix.

    Raises:
        UserError: when the file cannot be read, or is damaged.
    """
    path = Path(path)
    _check_suffix(path)
    try:
        with open_decompressed(path) as stream:
            for number, line in enumerate(stream, 1):
                stripped = line.removeprefix(BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
                if stripped:
                    yield number, stripped
    except READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or f"is damaged ({error})"
        raise UserError(f"{path}: {reason}") from error


def lines(path: str | Path) -> Iterator[bytes]:
    """Non-empty lines of a file, stripped; decompressed according to the suffix.

    Raises:
        UserError: when the file cannot be read, or is damaged.
    """
    return (line for _, line in numbered_lines(path))


def check_output(path: str | Path) -> Path:
    """Check that an output file can be written; return its path with links resolved.

    Raises:
        UserError: when it cannot be written.
    """
    output_path = check_writable(path)
    _check_suffix(output_path)
    return output_path


@contextmanager
def writing(path: str | Path) -> Iterator[Callable[[bytes], None]]:
    """Atomically writes lines to a file, compressed according to its suffix.

    Raises:
        UserError: when the file cannot be written.
    """
    output_path = check_output(path)
    try:
        remove_leftovers(output_path, "partial", Path.unlink)
        partial = temporary_path(output_path, "partial")
        raw = partial.open("xb")
    except FileExistsError as error:
        raise UserError(
            f"{path}: another run is writing it ({partial.name}); wait for it, or remove that file"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    packed: Any = raw
    try:
        with hold_lock(partial, if_supported=True):
            if output_path.suffix == ".gz":
                packed = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
            elif output_path.suffix == ".zst":
                import zstandard

                packed = zstandard.ZstdCompressor().stream_writer(raw, closefd=False)

            def write(line: bytes) -> None:
                packed.write(line + b"\n")

            yield write
            if packed is not raw:
                packed.close()
            raw.flush()
            os.fsync(raw.fileno())
            partial.replace(output_path)
        fsync_directory(output_path.parent)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
        for stream in (packed, raw):
            with suppress(OSError):  # close flushes again, which fails on a full disk
                stream.close()
