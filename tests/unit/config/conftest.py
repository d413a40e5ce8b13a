"""Short command lines that resolve."""

from __future__ import annotations

import pytest

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 0.001 "
    "--vocab-size 100"
)


@pytest.fixture
def minimal() -> list[str]:
    """All required flags but the length of the run."""
    return MINIMAL.split()


@pytest.fixture
def by_iterations(minimal: list[str]) -> list[str]:
    """A complete command line of a run counted in iterations."""
    return [*minimal, "--train-iters", "100"]


@pytest.fixture
def by_samples(minimal: list[str]) -> list[str]:
    """A complete command line of a run counted in samples."""
    return [*minimal, "--train-samples", "6400"]
