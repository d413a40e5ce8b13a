"""Grouped products: support by device and type, and padding of rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.parallel.tensor.grouped import batched_linear, round_up_rows, supports_grouped_products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_cuda_groups_the_products_that_torch_supports(dtype: torch.dtype) -> None:
    """Compared with torch's checks on a CPU, for widths of 16 bytes and less."""
    for width in (16, 3):
        rows, weight = torch.ones(4, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
        try:
            F.grouped_mm(rows, weight.expand(2, -1, -1).contiguous(), offs=torch.tensor([4, 4], dtype=torch.int32))
            multiplies = True
        except (RuntimeError, ValueError):
            multiplies = False
        assert supports_grouped_products(_on_cuda(rows), [weight]) == multiplies
        on_meta = supports_grouped_products(rows.to("meta"), [weight])
        assert on_meta == (multiplies and dtype is torch.bfloat16)


def test_cuda_checks_every_width_of_a_weight() -> None:
    """For the second product of a gated MLP, the inner width counts, not twice the width."""
    rows = torch.ones(4, 16, dtype=torch.bfloat16)
    assert supports_grouped_products(_on_cuda(rows), [torch.ones(24, 16)])
    assert not supports_grouped_products(_on_cuda(rows), [torch.ones(16, 12)])


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 8], [0, 0, 0]])
def test_batched_products_match_a_loop_over_groups(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 3, dtype=torch.float64, generator=generator)
    weights = torch.randn(3, 5, 3, dtype=torch.float64, generator=generator)
    results = []
    for batched in (True, False):
        x, weights_of_run = rows.clone().requires_grad_(), [weight.clone().requires_grad_() for weight in weights]
        outputs = [group_rows @ weight.t() for group_rows, weight in zip(x.split(counts), weights_of_run, strict=True)]
        out = batched_linear(x, weights_of_run, torch.tensor(counts)) if batched else torch.cat(outputs)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), x.grad, *(weight.grad for weight in weights_of_run)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected)


def _on_cuda(x: torch.Tensor) -> Any:
    """Stand-in for a CUDA tensor."""
    element_size = x.element_size
    return SimpleNamespace(
        is_cpu=False, is_cuda=True, is_meta=False, dtype=x.dtype, shape=x.shape, element_size=element_size
    )


def test_products_that_torch_compiles_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    monkeypatch.setattr("megatron.parallel.tensor.grouped._compiles_products", compiles)
    filled = [round_up_rows(torch.empty(rows, 3, dtype=torch.bfloat16)) for rows in range(5000)]
    assert filled[0] == 0
    assert all(padded >= rows for rows, padded in enumerate(filled))
    assert filled[1] == filled[32] == 32
    assert all(padded <= rows * 1.125 for rows, padded in enumerate(filled) if rows > 256)
    for power in (256, 512, 2048):
        assert len(set(filled[power + 1 : 2 * power + 1])) == 8
    assert round_up_rows(torch.empty(33, 3)) == 33
    assert round_up_rows(torch.empty(33, 3, dtype=torch.bfloat16, device="meta")) == 33


def test_a_torch_without_onednn_compiles_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)  # it has no such operators
    for dtype in (torch.bfloat16, torch.float16):
        assert round_up_rows(torch.empty(33, 3, dtype=dtype)) == 33


def test_rows_are_padded_only_where_torch_compiles_products() -> None:
    """In half precision with native instructions; never in fp32."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        has_onednn = torch.backends.mkldnn.is_available()
        supported = has_onednn and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
        assert (round_up_rows(torch.empty(33, 3, dtype=dtype)) == 64) == supported
    assert round_up_rows(torch.empty(33, 3)) == 33
