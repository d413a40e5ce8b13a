"""Settings of the C library's allocator for freed memory."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of glibc's ``mallopt``."""
_MAX_KEPT = (1 << 31) - 1
_MAX_HEAP_BLOCK = 32 << 20
"""Size in bytes of the largest block on glibc's heap; larger blocks are mapped from the system and returned to it."""
_USER_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks of up to 32 MiB, with at most 2 GiB unreturned at the end of its heap.

    The next step needs them again, and memory returned to the system is zeroed page by page before it is reused.
    Returns whether the settings were applied: not without glibc, nor if the environment has its own.
    """
    if any(name in os.environ for name in _USER_SETTINGS):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_MMAP_THRESHOLD, _MAX_HEAP_BLOCK)) and bool(set_option(_TRIM_THRESHOLD, _MAX_KEPT))


def return_freed_memory() -> None:
    """Return the C library's freed memory to the system; do nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
