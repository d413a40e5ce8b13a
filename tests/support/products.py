"""For tests of this library's own matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from megatron.kernels import native, products
from tests.support.kernels import LACKING

need_products = pytest.mark.skipif(
    LACKING or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="the kernels were not compiled, or the processor has no AVX2",
)
"""Where they must be there, they are not skipped: see ``products_chosen``."""


@contextmanager
def products_chosen(ours: bool) -> Iterator[list[str]]:
    """Own products or torch's, regardless of the environment; yields the names of the operators called.

    Own products are used from a size of 1 on, on every processor.
    """
    assert native.problem() is None
    assert native.operators().multiplies()
    calls: list[str] = []

    class Operators:
        def __getattr__(self, name: str) -> Callable[..., object]:
            calls.append(name)
            operator: Callable[..., object] = getattr(torch.ops.megatron_cc, name)
            return operator

    chosen = mock.patch.object(products, "own_products", return_value=ours)
    from_here = mock.patch.object(products, "smallest_product", return_value=1)
    with chosen, from_here, mock.patch.object(native, "operators", Operators):
        yield calls
