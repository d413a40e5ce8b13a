"""Pure-torch forms of the hot operations: what native ones are compared with, and what runs without them."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(codes_n: Tensor, bits: int) -> Tensor:
    """Packs unsigned codes into bytes.

    Args:
        codes_n: uint8 values below 2**bits, flat, any length.
        bits: 1 to 8.

    Returns:
        uint8, ceil(n / 8) * bits long: eight codes make ``bits`` bytes, the first code in the lowest bits, the
        first byte the lowest. Padding codes are 0.
    """
    if bits == 8:
        padded = torch.zeros(-(-codes_n.numel() // 8) * 8, dtype=torch.uint8, device=codes_n.device)
        padded[: codes_n.numel()] = codes_n
        return padded
    groups = -(-codes_n.numel() // 8)
    padded = torch.zeros(groups * 8, dtype=torch.int64, device=codes_n.device)
    padded[: codes_n.numel()] = codes_n
    shifts = torch.arange(8, device=codes_n.device) * bits
    words_g = (padded.view(groups, 8) << shifts).sum(dim=1)
    places = torch.arange(bits, device=codes_n.device) * 8
    return ((words_g.unsqueeze(1) >> places) & 0xFF).to(torch.uint8).flatten()


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes of what ``pack_bits`` made, as uint8."""
    if bits == 8:
        return packed[:count]
    places = torch.arange(bits, device=packed.device) * 8
    words_g = (packed.view(-1, bits).to(torch.int64) << places).sum(dim=1)
    shifts = torch.arange(8, device=packed.device) * bits
    codes = (words_g.unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten()[:count]


def packed_size(count: int, bits: int) -> int:
    """Bytes of ``count`` packed codes."""
    return -(-count // 8) * bits


def quantize(x_gn: Tensor, bits: int, scale_g: Tensor, noise_gn: Tensor | None, symmetric: bool) -> Tensor:
    """Codes of numbers on a uniform grid.

    Args:
        x_gn: groups of n numbers, fp32.
        bits: 1 to 8.
        scale_g: largest magnitude of each group (for 1 symmetric bit: the mean one); 0 marks a group of zeros.
        noise_gn: uniform numbers in [0, 1) for stochastic rounding (unbiased); None rounds to nearest.
        symmetric: levels k/(2^(b-1) - 1), both peaks representable; else k/2^(b-1), whose positive peak is clipped.

    Returns:
        uint8 codes; a number that is not finite gives an arbitrary one.
    """
    if bits == 1 and symmetric:
        return (x_gn >= 0).to(torch.uint8)
    top = _top(bits, symmetric)
    step = torch.where(scale_g > 0, top / scale_g, 0.0).unsqueeze(1)
    steps = x_gn * step
    steps = torch.round(steps) if noise_gn is None else torch.floor(steps + noise_gn)
    low = -top if symmetric else -(1 << (bits - 1))
    high = top if symmetric else (1 << (bits - 1)) - 1
    return (steps.nan_to_num_(0.0).clamp_(low, high) + (1 << (bits - 1))).to(torch.uint8)


def dequantize(codes_gn: Tensor, bits: int, scale_g: Tensor, symmetric: bool) -> Tensor:
    """Numbers of codes, fp32; see ``quantize``."""
    scale = scale_g.unsqueeze(1)
    if bits == 1 and symmetric:
        return (codes_gn.to(torch.float32) * 2 - 1) * scale
    return (codes_gn.to(torch.float32) - (1 << (bits - 1))) * (scale / _top(bits, symmetric))


def _top(bits: int, symmetric: bool) -> int:
    return (1 << (bits - 1)) - 1 if symmetric else 1 << (bits - 1)


def abs_topk(x_kn: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest magnitudes in each row, (k, count), ascending; ties go to the lower index.

    A number that is not finite counts as larger than all others.
    """
    magnitude = x_kn.abs().nan_to_num(torch.inf, posinf=torch.inf)
    order = torch.sort(magnitude, dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def dilate(mask_kn: Tensor, radius: int) -> Tensor:
    """True where a True lies within ``radius`` places in the same row."""
    ones = torch.nn.functional.pad(mask_kn.to(torch.int64).cumsum(dim=1), (1, 0))
    n = mask_kn.shape[1]
    places = torch.arange(n, device=mask_kn.device)
    return ones[:, (places + radius + 1).clamp(max=n)] > ones[:, (places - radius).clamp(min=0)]
