"""Print the unigram entropy of tokenized text: the best loss of a model that knows only how frequent each token is.

    python tools/quickstart/unigram.py PREFIX [PREFIX ...]

The frequencies are those of the text itself, so no model without context has a lower loss.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.base.errors import UserError
from megatron.data.indexed import IndexedDataset


@dataclass(frozen=True)
class Unigram:
    """Length of a token stream, and its entropy in nats per token."""

    tokens: int
    nats_per_token: float


def entropy(counts: np.ndarray) -> float:
    """Return the Shannon entropy, in nats, of a distribution given by counts [V]."""
    used = counts[counts > 0] / counts.sum()
    return float(-(used * np.log(used)).sum())


def unigram(prefix: str | Path) -> Unigram:
    """Count all tokens of a ``.bin/.idx`` pair, including end-of-document tokens.

    Raises:
        UserError: for missing, damaged or empty files.
    """
    dataset = IndexedDataset(prefix)
    counts = np.zeros(0, dtype=np.int64)
    for index in range(len(dataset)):
        document = np.bincount(dataset[index])
        counts = np.pad(counts, (0, max(0, len(document) - len(counts))))
        counts[: len(document)] += document
    if counts.sum() == 0:
        raise UserError(f"{dataset.bin_path}: holds no tokens")
    return Unigram(int(counts.sum()), entropy(counts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", nargs="+", help="path of a .bin/.idx pair without its extension")
    args = parser.parse_args()
    try:
        for prefix in args.prefix:
            result = unigram(prefix)
            print(f"{prefix}: {result.tokens:,} tokens, {result.nats_per_token:.4f} nats per token")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
