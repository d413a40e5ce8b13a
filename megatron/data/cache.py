"""On-disk cache of named arrays: entries are complete or absent, and damaged entries are rebuilt."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.base.atomic import atomic_write, check_writable
from megatron.base.errors import UserError
from megatron.config.memory import format_bytes, memory_of_this_machine

Arrays = dict[str, NDArray[Any]]

_FLAG = "--data-cache-path"
_SCAN_BYTES = 64 << 20


def cached_arrays(
    cache_path: str | Path | None, kind: str, identity: dict[str, Any], build: Callable[[], Arrays]
) -> Arrays:
    """Load the arrays of ``build()`` from the cache, or build and store them.

    Args:
        cache_path: cache folder; None builds without a cache.
        kind: prefix of the file names.
        identity: JSON-serializable values that determine the arrays; the file names contain their hash.
        build: returns the arrays by name.

    Raises:
        UserError: when the arrays cannot be written; raised before building them if that is already known.
    """
    if cache_path is None:
        return build()
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    folder = Path(cache_path)
    manifest = folder / f"{kind}-{digest}.json"
    cached_entry = _load(folder, manifest, digest, kind)
    if cached_entry is not None:
        return cached_entry
    make_cache(folder)
    arrays = build()
    array_entries = {}
    for name, array in arrays.items():
        write_cached(folder / f"{kind}-{digest}-{name}.npy", partial(np.save, arr=array, allow_pickle=False))
        array_entries[name] = [array.dtype.str, list(array.shape), _checksum(array)]
    # The manifest is written last, so that it exists only with complete arrays.
    content = json.dumps({"identity": identity, "arrays": array_entries}, indent=1).encode()
    write_cached(manifest, lambda stream: stream.write(content))
    return arrays


def check_memory(nbytes: int, name: str, samples: int) -> None:
    """Check that the index arrays of a sample order fit into memory, by a lower bound on their size.

    Raises:
        UserError: when they do not fit; the message states their size.
    """
    total_memory = memory_of_this_machine()
    if nbytes > total_memory:
        raise UserError(
            f"{name}: --sample-order megatron holds the order of all {samples:_} samples in memory, at least "
            f"{format_bytes(nbytes)} of {format_bytes(total_memory)}; use --sample-order lazy, or a shorter run"
        )


def make_cache(folder: Path) -> None:
    """Create the cache folder and check that it is writable.

    Raises:
        UserError: when the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(folder, error) from error
    check_writable(folder / "files", _FLAG)


def write_cached(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a cache file atomically.

    Raises:
        UserError: when the file cannot be written, such as on a full disk.
    """
    try:
        with atomic_write(path) as stream:
            write(stream)
    except OSError as error:
        raise _write_error(path.parent, error) from error


def _write_error(folder: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"{_FLAG} {folder}: cannot be written ({reason}); make room, name another folder, or leave it out")


def _checksum(array: NDArray[Any]) -> int:
    """CRC-32 of the elements in C order."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    checksum = 0
    for start in range(0, len(flat), _SCAN_BYTES):
        checksum = zlib.crc32(flat[start : start + _SCAN_BYTES].data, checksum)
    return checksum


def _load(folder: Path, manifest: Path, digest: str, kind: str) -> Arrays | None:
    """Load the arrays of a manifest; None if any file is missing or fails its checksum."""
    try:
        if not manifest.is_file():  # reading from a pipe could block forever
            return None
        arrays: Arrays = {}
        for name, (dtype, shape, checksum) in json.loads(manifest.read_text())["arrays"].items():
            path = folder / f"{kind}-{digest}-{name}.npy"
            if not path.is_file():
                return None
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.dtype.str != dtype or list(array.shape) != shape or _checksum(array) != checksum:
                return None
            arrays[name] = array
        return arrays
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, SyntaxError):
        return None
