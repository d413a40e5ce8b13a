"""Options of compressors: frozen dataclasses whose fields describe themselves."""

from __future__ import annotations

from megatron.base.option import option

opt = option
"""A field of an options dataclass: its default, its help in a few words, and the details of ``Option``."""


class CompressorFault(RuntimeError):
    """A compressor's requirement that does not hold in a run; one line that says what, and what to do."""


SEED = (1 << 63) - 1
"""The largest seed of a compressor."""
