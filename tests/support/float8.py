"""Checks of the kernels of 8-bit floats on any device: equality with the reference implementations, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.kernels import float8, ops
from megatron.kernels.float8 import Float8
from tests.support.kernels import DTYPES, noise, same, spoil

MANTISSAS = (3, 2)
SCALES = (torch.float32, torch.bfloat16, torch.uint8)
GROUPS = (1, 7, 8, 32, 40, 128, 256, 768, 2048)


def message(count: int, form: Float8, scale: torch.dtype, device: str, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Codes, from a byte of their memory on, and scales that hold something else."""
    codes = torch.full((offset + count,), 77, dtype=torch.uint8, device=device)[offset:]
    return codes, torch.full((form.scale_count(count),), 7, dtype=scale, device=device)


def check(x: Tensor, form: Float8, scale: torch.dtype, seed: int | None = None, offset: int = 0) -> None:
    """Codes, scales and decoded values equal those of the reference."""
    device = x.device.type
    codes, scales = message(x.numel(), form, scale, device, offset)
    wanted_codes, wanted_scales = message(x.numel(), form, scale, device)
    ops.float8_encode(x, codes, scales, form, seed)
    float8.float8_encode(x, wanted_codes, wanted_scales, form, seed)
    assert same(scales.float(), wanted_scales.float())
    assert torch.equal(codes, wanted_codes)
    check_decoding(codes, scales, form, x.dtype)


def check_decoding(codes: Tensor, scales: Tensor, form: Float8, dtype: torch.dtype) -> None:
    for added, kind in ((0, dtype), (1, torch.float32), (-1, torch.float32)):
        out = noise((codes.numel(),), 5, codes.device.type).to(kind)
        expected = out.clone()
        ops.float8_decode(codes, scales, out, form, added)
        float8.float8_decode(codes, scales, expected, form, added)
        assert same(out, expected)


def formats() -> Iterator[tuple[int, Float8, torch.dtype]]:
    """Every format with groups of every kind and scales of every type, numbered."""
    number = 0
    for mantissa in MANTISSAS:
        for group in GROUPS:
            for scale in SCALES:
                yield number, Float8(mantissa, group), scale
                number += 1


def check_formats(device: str, counts: tuple[int, ...]) -> None:
    """Numbers of all sizes, spoiled and not, of every type."""
    for number, form, scale in formats():
        for count in counts:
            x = noise((count,), number, device) * 2.0 ** (number % 7 * 40 - 120)
            seed = (5 << 40) + 7 if number % 2 else None
            for values in (x, spoil(x, number)):
                check(values.to(DTYPES[number % 3]), form, scale, seed)


def check_codes(device: str, mantissa: int) -> None:
    """All 256 codes equal torch's, for inputs on, beside and halfway between the values of the codes."""
    codes = torch.arange(256, device=device).to(torch.uint8)
    form = Float8(mantissa, 256)
    values = torch.empty(256, device=device)
    ops.float8_decode(codes, torch.full((1,), form.most, device=device), values, form)
    assert same(values, codes.view(form.dtype).float())
    finite = values[values.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    edges = torch.cat([finite, middle])
    near = torch.cat([edges, *(torch.nextafter(edges, torch.full_like(edges, end)) for end in (1e9, -1e9))])
    near = torch.cat([near.clamp(-form.most, form.most), torch.tensor([form.most], device=device)])
    form = Float8(mantissa, near.numel())
    encoded, scales = message(near.numel(), form, torch.float32, device)
    ops.float8_encode(near, encoded, scales, form)
    assert scales.tolist() == [form.most]
    assert torch.equal(encoded, near.to(form.dtype).view(torch.uint8))


def check_large_groups(device: str) -> None:
    """Groups that a thread or block does not take alone."""
    x = noise((100_001,), 1, device)
    for group in (20_000, 33_000, 100_001):
        for values in (x, spoil(x, group)):
            check(values, Float8(3, group), torch.float32)
        check(x.bfloat16(), Float8(2, group), torch.uint8, 3)


def check_unaligned(device: str) -> None:
    """Numbers and codes that do not begin at 16 bytes."""
    for start in (1, 2, 3, 5):
        for dtype in DTYPES:
            check(noise((3000,), start, device, dtype)[start:], Float8(3, 128), torch.float32, offset=start)
            check(noise((3000,), start, device, dtype)[start:], Float8(2, 100), torch.bfloat16, offset=start + 1)
