"""Which products of groups are taken together, and how many rows are computed for a group of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.parallel.tensor.grouped import batched_linear, groups_products, recurring


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_cuda_takes_what_torch_multiplies_by_groups(dtype: torch.dtype) -> None:
    """Torch's answers on a CPU, where its checks are the same, for widths of 16 bytes and of fewer."""
    for width in (16, 3):
        rows, weight = torch.ones(4, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
        try:
            F.grouped_mm(rows, weight.expand(2, -1, -1).contiguous(), offs=torch.tensor([4, 4], dtype=torch.int32))
            multiplies = True
        except (RuntimeError, ValueError):
            multiplies = False
        assert groups_products(_on_cuda(rows), [weight]) == multiplies
        on_meta = groups_products(rows.to("meta"), [weight])
        assert on_meta == (multiplies and dtype is torch.bfloat16)


def test_cuda_asks_for_every_width_of_a_weight() -> None:
    """Of a gated MLP's second product the inner width counts, and not twice it."""
    rows = torch.ones(4, 16, dtype=torch.bfloat16)
    assert groups_products(_on_cuda(rows), [torch.ones(24, 16)])
    assert not groups_products(_on_cuda(rows), [torch.ones(16, 12)])


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 8], [0, 0, 0]])
def test_batched_products_are_each_groups_own(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 3, dtype=torch.float64, generator=generator)
    weights = torch.randn(3, 5, 3, dtype=torch.float64, generator=generator)
    found = []
    for batched in (True, False):
        x, own = rows.clone().requires_grad_(), [weight.clone().requires_grad_() for weight in weights]
        parts = [part @ weight.t() for part, weight in zip(x.split(counts), own, strict=True)]
        out = batched_linear(x, own, torch.tensor(counts)) if batched else torch.cat(parts)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        found.append([out.detach(), x.grad, *(weight.grad for weight in own)])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted)


def _on_cuda(x: torch.Tensor) -> Any:
    """What is asked of a tensor there."""
    element_size = x.element_size
    return SimpleNamespace(
        is_cpu=False, is_cuda=True, is_meta=False, dtype=x.dtype, shape=x.shape, element_size=element_size
    )


def test_products_that_torch_compiles_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    monkeypatch.setattr("megatron.parallel.tensor.grouped._compiles_products", compiles)
    filled = [recurring(torch.empty(rows, 3, dtype=torch.bfloat16)) for rows in range(5000)]
    assert filled[0] == 0
    assert all(own >= rows for rows, own in enumerate(filled))
    assert filled[1] == filled[32] == 32
    assert all(own <= rows * 1.125 for rows, own in enumerate(filled) if rows > 256)
    for power in (256, 512, 2048):
        assert len(set(filled[power + 1 : 2 * power + 1])) == 8
    assert recurring(torch.empty(33, 3)) == 33
    assert recurring(torch.empty(33, 3, dtype=torch.bfloat16, device="meta")) == 33


def test_a_torch_without_onednn_compiles_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)  # it has no such operators
    for dtype in (torch.bfloat16, torch.float16):
        assert recurring(torch.empty(33, 3, dtype=dtype)) == 33


def test_what_torch_compiles_for_each_shape() -> None:
    """In half precision, where the processor has instructions for them; never in fp32."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        has_onednn = torch.backends.mkldnn.is_available()
        supported = has_onednn and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
        assert (recurring(torch.empty(33, 3, dtype=dtype)) == 64) == supported
    assert recurring(torch.empty(33, 3)) == 33
