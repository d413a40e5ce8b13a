"""Helpers for options classes of compressors, frozen dataclasses with self-describing fields."""

from __future__ import annotations

from megatron.base.option import option

opt = option
"""Field of an options dataclass: default, short help, and details as in ``Option``."""


class CompressorFault(RuntimeError):
    """A violated requirement of a compressor in a run; the message is a line with the fault and its remedy."""


MAX_SEED = (1 << 63) - 1
"""Largest seed of a compressor."""
