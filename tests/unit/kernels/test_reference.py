"""Reference implementations without kernels, and on devices with another division."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels import native, reference
from megatron.kernels.grid import Grid, Role, ScaleLayout
from tests.support import kernels as checks


class DividesAsCuda(TorchDispatchMode):
    """Divides a tensor by a scalar as CUDA does: by multiplication with the reciprocal."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor):
            x, divisor = args
            number = divisor if not isinstance(divisor, Tensor) else divisor.item() if divisor.dim() == 0 else None
            if number is not None and x.dim() > 0:
                return x.mul_(1.0 / number) if func is torch.ops.aten.div_.Tensor else x * torch.tensor(1.0 / number)
        return func(*args, **(kwargs or {}))


def _result(run: Callable[[], Tensor], as_cuda: bool) -> Tensor:
    if not as_cuda:
        return run()
    with DividesAsCuda():
        return run()


def test_the_mode_changes_division() -> None:
    x = checks.noise((1000,), 0, "cpu")
    assert not torch.equal(_result(lambda: x / 7, True), x / 7)


def test_decoding_gives_the_same_bits_on_every_device() -> None:
    """For all widths, in decoders and in encoders that update a second tensor."""
    x = checks.noise((4096,), 1, "cpu")
    grids = [grid for grid in checks.grids() if grid.layout is not ScaleLayout.CHANNEL]
    for grid in [*grids, *(Grid(bits, ScaleLayout.CHANNEL, 64) for bits in range(1, 9))]:
        codes = torch.empty(grid.code_bytes(x.numel()), dtype=torch.uint8)
        scales = torch.empty(grid.scale_count(x.numel()))

        def updated(grid: Grid = grid, codes: Tensor = codes, scales: Tensor = scales) -> Tensor:
            other = x * 0.5
            reference.quantize_pack(x, other, codes, scales, grid, Role.FEEDBACK, None)
            return other

        def decoded(grid: Grid = grid, codes: Tensor = codes, scales: Tensor = scales) -> Tensor:
            out = torch.empty_like(x)
            reference.unpack_dequantize(codes, scales, None, out, grid, Role.PLAIN)
            return out

        for run in (updated, decoded):
            assert torch.equal(_result(run, True), _result(run, False)), grid


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_rows_are_combined_without_kernels(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(native, "serves", lambda *_: False)
    for shape in ((1, 1, 1, 0), (5, 2, 40, 0), (4, 3, 96, 5), (3, 2, 8, 6), (0, 2, 8, 0)):
        checks.check_combined_rows("cpu", dtype, *shape)
