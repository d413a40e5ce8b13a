"""Settings of all tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    """Restore the number of threads after each test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
