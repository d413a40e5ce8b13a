"""What the options of compressors are made of: frozen dataclasses whose fields describe themselves."""

from __future__ import annotations

from megatron.base.option import option

opt = option
"""A field of an options dataclass: its default, its help in a few words, and the details of ``Option``."""


class CompressorFault(RuntimeError):
    """What a compressor relies on in a run does not hold; one line that says what, and what to do."""


SEED = (1 << 63) - 1
"""The largest seed of a compressor."""
