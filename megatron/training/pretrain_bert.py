"""The program that trains BERT."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training import pretrain


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``pretrain_bert.py`` on this rank; return the exit status."""
    return pretrain.main(argv, "bert")
