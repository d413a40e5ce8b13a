"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers of two settings."""
_MOST_KEPT = (1 << 31) - 1
_LARGEST_OF_HEAP = 32 << 20
"""Bytes of the largest block that glibc takes from its heap; larger ones always come from the system and go back."""
_OWN_CHOICE = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Lets the C library keep freed blocks of up to 32 MiB: no more than 2 GiB at the end of its heap go unreturned.

    The next step needs them again, and what is given back to the system is cleared page by page before it comes back.
    Returns whether the settings were made: not without glibc, nor where the environment has its own.
    """
    if any(name in os.environ for name in _OWN_CHOICE):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST_OF_HEAP)) and bool(set_option(_TRIM_THRESHOLD, _MOST_KEPT))
