"""The program that trains T5."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training import pretrain


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``pretrain_t5.py`` on this rank; returns the exit status."""
    return pretrain.main(argv, "t5")
