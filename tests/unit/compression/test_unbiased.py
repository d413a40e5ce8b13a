"""Stochastic rounding: the mean of many draws is the number itself, in every documented setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.compression.float8 import Float8Config, Float8Format
from megatron.compression.message import Format
from tests.support.combinations import pairwise

DRAWS = 4096

PEAK = 1.0 + 2.0**-9 + 2.0**-12
"""Largest magnitude. Rounded to nearest, its bf16 scale would be 1, less than the magnitude."""


def _numbers(sign: float) -> Tensor:
    """Numbers with peaks of either sign and zeros, (64,)."""
    x = torch.rand(64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[3], x[9], x[20:22] = PEAK * sign, -0.99 * sign, 0.0
    return x


def _draws(options: dict[str, Any], x: Tensor) -> Tensor:
    """Decoded numbers of many draws in a single message, (draws, 64) in fp64."""
    form = _form(options)
    wide = x.repeat(DRAWS).view((-1, 1) if options.get("scale") == "channel" else (DRAWS, 64))
    wire = torch.empty(form.nbytes(wide.shape), dtype=torch.uint8)
    form.encode(wide, 7, wire=wire)
    return form.decode(wire, wide.shape).double().view(DRAWS, 64)


def _deviations(x: Tensor, draws: Tensor) -> Tensor:
    """Deviations of the means from the numbers, in standard deviations of an unbiased mean.

    A draw takes one of the two levels around a number; a number outside of all levels has no standard deviation.
    Rounding in fp32 adds up to 1e-6.
    """
    levels, exact = draws.unique(), x.double()
    above = torch.searchsorted(levels, exact).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    variance = ((exact - low) * (high - exact)).clamp(min=0.0)
    return ((draws.mean(dim=0) - exact).abs() - 1e-6).clamp(min=0.0) / (variance / DRAWS).sqrt().clamp(min=1e-12)


FIXPOINT = [
    {"bits": bits, "grid": grid, "scale_dtype": dtype, "scale": scale}
    for widths, grids in (
        ((2, 3, 4, 8), ("auto", "symmetric", "signed", "midrise", "minmax")),
        ((1,), ("midrise", "minmax")),
    )
    for bits, grid, dtype, scale in pairwise(widths, grids, ("fp32", "bf16"), ("group", "channel", "tensor"))
]
FLOAT8 = [
    {"format": kind, "scale_dtype": dtype, "scale": scale, **({"tile": 64} if scale == "tile" else {})}
    for kind, dtype, scale in pairwise(("e4m3", "e5m2"), ("fp32", "bf16", "e8m0"), ("tile", "row", "tensor"))
]


def _form(options: dict[str, Any]) -> Format:
    if "format" in options:
        return Float8Format(Float8Config(rounding="stochastic", **options))
    return Quantizer(FixpointConfig(rounding="stochastic", **options))


@pytest.mark.parametrize("options", [*FIXPOINT, *FLOAT8], ids=lambda options: "-".join(map(str, options.values())))
def test_the_mean_of_many_draws_is_the_number(options: dict[str, Any]) -> None:
    for sign in (1.0, -1.0):
        x = _numbers(sign)
        draws = _draws(options, x)
        assert float(_deviations(x, draws).max()) < 4
        if options.get("grid") not in ("midrise", "minmax"):
            assert not draws[:, x == 0].any()
        assert not _draws(options, torch.zeros(64)).any()


@pytest.mark.parametrize(
    "options",
    [
        {"scale_method": "l2", "bits": 4},
        {"grid": "asymmetric", "bits": 4},
        {"bits": 1},
        {"bits": 1, "grid": "symmetric"},
    ],
    ids=str,
)
def test_settings_that_clip_are_biased(options: dict[str, Any]) -> None:
    x = _numbers(1.0)
    x[5:] *= 0.1  # twice the root mean square is less than the peak
    assert float(_deviations(x, _draws(options, x)).max()) > 1e3
