"""Checks of compiled kernels on any device: equality with the reference implementations, bit by bit where defined."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.kernels import native, ops, reference
from megatron.kernels.grid import Grid, GridKind, Role, ScaleLayout, ScaleMethod
from tests.support import combinations

LACKING = native.library_path() is None and os.environ.get("MEGATRON_CC_BUILD") != "require"
"""Whether the kernels were not compiled and need not be. Where they must be there, their tests fail without them."""
need_kernels = pytest.mark.skipif(LACKING, reason="the kernels were not compiled")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -3e-45, 3e38, -3e38)


def noise(shape: tuple[int, ...], seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def spoil(x: Tensor, seed: int) -> Tensor:
    """x with a few numbers replaced by special values."""
    flat = x.clone().view(-1)
    generator = torch.Generator().manual_seed(seed)
    for value in SPECIAL:
        if flat.numel():
            flat[int(torch.randint(flat.numel(), (1,), generator=generator))] = value
    return flat.view(x.shape)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values, with the signs of zeros; NaN equals NaN."""
    signs = torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())
    return signs and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def check_codec(
    x: Tensor, other: Tensor | None, grid: Grid, role: Role, seed: int | None, scale: torch.dtype, offset: int = 0
) -> bool:
    """Codes, scales, the second tensor and decoded values equal those of the reference.

    Args:
        offset: where codes begin in their memory, in bytes.

    Returns:
        Whether codes could be compared. Scales that are made of sums may differ, and then codes do.
    """
    messages = []
    for run in (_encode_native, reference.quantize_pack):
        codes = torch.full((offset + grid.code_bytes(x.numel()),), 77, dtype=torch.uint8, device=x.device)[offset:]
        scales = torch.full((grid.scale_count(x.numel()),), 7.0, dtype=scale, device=x.device)
        moved = None if other is None else other.clone()
        run(x, moved, codes, scales, grid, role, seed)
        messages.append((codes, scales, moved))
    (codes, scales, moved), (wanted_codes, wanted_scales, wanted_moved) = messages
    if grid.sums:
        # Sums in another order may round to the neighboring number; then the codes have another grid.
        rtol = 1e-6 if scale == torch.float32 else 2**-7
        torch.testing.assert_close(scales.float(), wanted_scales.float(), rtol=rtol, atol=0, equal_nan=True)
        if not same(scales, wanted_scales):
            return False
    assert same(scales, wanted_scales)
    assert torch.equal(codes, wanted_codes)
    if moved is not None and wanted_moved is not None:
        assert same(moved, wanted_moved)
    _check_decoding(codes, scales, other, grid, x.dtype, role)
    if role is Role.DELTA and other is not None and moved is not None:
        received = other.clone()
        ops.unpack_dequantize(codes, scales, torch.empty_like(x), grid, Role.DELTA, received)
        assert same(received, moved)
    return True


def _encode_native(
    x: Tensor, other: Tensor | None, codes: Tensor, scales: Tensor, grid: Grid, role: Role, seed: int | None
) -> None:
    ops.quantize_pack(x, codes, scales, grid, role, other, seed)


def _check_decoding(
    codes: Tensor, scales: Tensor, other: Tensor | None, grid: Grid, dtype: torch.dtype, role: Role
) -> None:
    count = other.numel() if other is not None else codes.numel() // grid.bits * 8
    if grid.layout is ScaleLayout.CHANNEL:
        count = count // grid.group * grid.group
    if grid.code_bytes(count) != codes.numel() or grid.scale_count(count) != scales.numel():
        return
    for how, kind in ((Role.PLAIN, dtype), (Role.ADD, torch.float32)):
        out = torch.ones(count, dtype=kind, device=codes.device)
        expected = out.clone()
        ops.unpack_dequantize(codes, scales, out, grid, how)
        reference.unpack_dequantize(codes, scales, None, expected, grid, how)
        assert same(out, expected)


def grids() -> Iterator[Grid]:
    """Every width with every layout, method and kind of grid, and rotations."""
    for bits in range(1, 9):
        for kind in GridKind:
            for method in ScaleMethod if kind is not GridKind.MINMAX else (ScaleMethod.MAX,):
                yield Grid(bits, ScaleLayout.GROUP, 64 if bits % 2 else 24, kind, method)
                yield Grid(bits, ScaleLayout.GROUP, 2048, kind, method)
                yield Grid(bits, ScaleLayout.CHANNEL, 40, kind, method)
                yield Grid(bits, ScaleLayout.TENSOR, 64, kind, method)
            yield Grid(bits, ScaleLayout.GROUP, 256 if bits % 2 else 32, kind, ScaleMethod.MAX, 64)
            yield Grid(bits, ScaleLayout.TENSOR, 64, kind, ScaleMethod.MAX, 128)
            yield Grid(bits, ScaleLayout.GROUP, 64, kind, ScaleMethod.MAX, 512 if bits % 2 else 256)


def lengths_in_turn(lengths: tuple[int, ...], turn: int) -> tuple[int, ...]:
    """Every other length, beginning with the first or the second."""
    return lengths if combinations.all_combinations else lengths[turn % 2 :: 2]


def check_usual_codecs(device: str) -> None:
    """Codecs of group scales on the default levels, for which CUDA has separate kernels.

    Whole and broken words and warps, numbers and codes in aligned and unaligned memory, with and without noise, every
    dtype, there and back.
    """
    compared = cases = 0
    for number, (bits, group, count) in enumerate(itertools.product(range(2, 9), (8, 16, 64, 256), (5, 503, 1031))):
        grid = Grid(bits, group=group, kind=GridKind.SYMMETRIC if bits > 3 else GridKind.SIGNED)
        scale = torch.bfloat16 if number % 2 else torch.float32
        offset = 0 if number % 3 == 0 else number % 8
        for dtype in DTYPES:
            x = spoil(noise((count + 1,), number, device, dtype), number)[number % 4 // 3 :]
            for seed in (None, 77):
                cases += 1
                compared += check_codec(x, None, grid, Role.PLAIN, seed, scale, offset)
                _check_broken_words(x, grid, seed, scale, offset)
            check_codec(x, None, dataclasses.replace(grid, rotation=64), Role.PLAIN, 77, scale, offset)
    assert compared > 0.9 * cases


def _check_broken_words(x: Tensor, grid: Grid, seed: int | None, scale: torch.dtype, offset: int) -> None:
    """Values decoded into memory that begins and ends anywhere equal those of the reference."""
    codes = torch.empty(offset + grid.code_bytes(x.numel()), dtype=torch.uint8, device=x.device)[offset:]
    scales = torch.empty(grid.scale_count(x.numel()), dtype=scale, device=x.device)
    ops.quantize_pack(x, codes, scales, grid, seed=seed)
    out, expected = (torch.ones(x.numel() + 9, dtype=x.dtype, device=x.device)[-x.numel() :] for _ in range(2))
    ops.unpack_dequantize(codes, scales, out, grid)
    reference.unpack_dequantize(codes, scales, None, expected, grid, Role.PLAIN)
    assert same(out, expected)


def check_topk(x_kn: Tensor, count: int) -> None:
    """The same indices as a stable sort's."""
    expected = torch.empty((x_kn.shape[0], count), dtype=torch.int64, device=x_kn.device)
    reference.abs_topk(x_kn, expected)
    assert torch.equal(ops.abs_topk(x_kn, count), expected)


def check_topks(device: str, shapes: Iterable[tuple[int, int]]) -> None:
    """Numbers apart and with many ties, from none to all of a row; and rows of equal numbers, as zero and NaN."""
    for seed, (rows, n) in enumerate(shapes):
        x_kn = spoil(noise((rows, n), seed, device), seed)
        for share in (0.0, 0.01, 0.5, 0.99, 1.0):
            check_topk(x_kn, int(share * n))
            check_topk((x_kn * 2).nan_to_num(0.0).round(), int(share * n))
    equal_k = torch.tensor([0.0, math.nan, 2.5, -1e-45], device=device)
    for n in (100, 20_001):
        check_topk(equal_k[:, None].repeat(1, n), n // 3)


def check_places(x_n: Tensor, indices_c: Tensor) -> None:
    """Gather and scatter-add at a choice of coordinates."""
    packed = ops.gather_packed(x_n, indices_c)
    assert torch.equal(packed, x_n[indices_c])
    summed = x_n.clone()
    ops.scatter_add_packed(summed, indices_c, packed)
    expected = x_n.clone()
    expected[indices_c] *= 2
    assert torch.equal(summed, expected)


def check_dilate(mask_kn: Tensor, radius: int) -> None:
    expected = torch.empty_like(mask_kn)
    reference.dilate(mask_kn, radius, expected)
    assert torch.equal(ops.dilate(mask_kn, radius), expected)


def check_norm(x: Tensor) -> None:
    """Sum of squares to 1e-12, and the flag."""
    total, finite = ops.finite_norm(x).tolist()
    assert bool(finite) is bool(torch.isfinite(x).all())
    expected = float(x.double().square().sum())
    assert (math.isnan(total) and math.isnan(expected)) or math.isclose(total, expected, rel_tol=1e-12)


def check_histograms(device: str, counts: Iterable[int]) -> None:
    """With norms; of numbers of each kind, and where none is finite."""
    for seed, count in enumerate(counts):
        for x in (y := noise((count,), seed, device, DTYPES[seed % 3]), spoil(y, seed), torch.full_like(y, math.nan)):
            check_norm(x)
            for bins in (1, 100, 5000):
                check_histogram(x, 1 + seed, bins)


def check_histogram(x: Tensor, stride: int, bins: int) -> None:
    counts, limits = ops.sample_histogram(x, stride, bins)
    wanted_counts, wanted_limits = torch.empty_like(counts), torch.empty_like(limits)
    reference.sample_histogram(x, stride, wanted_counts, wanted_limits)
    assert torch.equal(limits, wanted_limits)
    assert torch.equal(counts, wanted_counts)


def check_whole_64s(device: str, bits: int) -> None:
    """Lengths and groups that fill vector registers have a path of their own on some processors."""
    for n in (64, 192, 1024, 4096 + 64):
        plain = noise((n,), n, device)
        for layout, group in _SCALE_GROUPS:
            for kind in GridKind:
                grid = Grid(bits, layout, group, kind)
                for x in (plain, spoil(plain, n), plain.bfloat16()):
                    check_codec(x, None, grid, Role.PLAIN, None, torch.float32)
                check_codec(plain, None, grid, Role.PLAIN, 3, torch.bfloat16)
                check_codec(plain, plain * 0.9, grid, Role.DELTA, None, torch.bfloat16)


_SCALE_GROUPS = (
    (ScaleLayout.GROUP, 64),
    (ScaleLayout.GROUP, 128),
    (ScaleLayout.GROUP, 2048),
    (ScaleLayout.TENSOR, 64),
    (ScaleLayout.CHANNEL, 64),
)


def check_places_outside(device: str) -> None:
    """Kernels of CUDA read and write nothing at a broken message's indices; in between, where CPUs do not look."""
    full, indices = noise((60,), 1, device), torch.tensor([3, 50, -1, 2**40, 7], device=device)
    x, packed, expected = full[5:55], torch.full((5,), 9.0, device=device), full.clone()
    native.operators().gather_packed(x, indices, packed)
    assert packed.tolist() == [float(x[3]), 0.0, 0.0, 0.0, float(x[7])]
    expected[[8, 12]] += 2.0
    native.operators().scatter_add_packed(x, indices, torch.full_like(packed, 2.0))
    assert torch.equal(full, expected)


def check_bases(x_knr: Tensor) -> None:
    """Orthonormal to 2e-6, and spanning the columns wherever they are independent."""
    q_knr = ops.orthonormalize(x_knr)
    gram = q_knr.double().transpose(1, 2) @ q_knr.double()
    torch.testing.assert_close(gram, torch.eye(x_knr.shape[2], device=x_knr.device).double().expand_as(gram), **_CLOSE)
    wide = x_knr.double()
    remainder = wide - q_knr.double() @ (q_knr.double().transpose(1, 2) @ wide)
    assert float(remainder.norm()) <= 1e-6 * float(wide.norm()) + 1e-300


def check_extraordinary_bases(device: str) -> None:
    """Any basis of zeros is right; non-finite values stay visible, and spoil no other matrix."""
    x_knr = noise((5, 60, 20), 4, device)
    x_knr[0] = 0.0
    x_knr[1, :, ::3] = 0.0
    x_knr[2, 7, 3] = torch.nan
    x_knr[3, :, 19] = torch.inf
    check_bases(x_knr[[0, 1, 4]])
    q_knr = ops.orthonormalize(x_knr)
    assert torch.equal(q_knr[[0, 1, 4]], ops.orthonormalize(x_knr[[0, 1, 4]]))
    assert q_knr.isnan().flatten(1).any(1).tolist() == [False, False, True, True, False]


def check_mixed_bases(device: str, rank: int) -> None:
    """A matrix with a good factor; another that needs another round for a late column; a third with a repeated
    column."""
    x_knr = noise((3, rank + 20, rank), rank, device)
    x_knr[1, :, rank // 2] = x_knr[1, :, 0] + 1e-3 * x_knr[1, :, rank // 2]
    x_knr[2, :, -1] = x_knr[2, :, 0]
    check_bases(x_knr)
    assert torch.equal(ops.orthonormalize(x_knr[:2]), ops.orthonormalize(x_knr)[:2])


def check_leading_bases(device: str, ranks: Iterable[int]) -> None:
    """Columns do not depend on later ones: CUDA's kernels for narrow and wide matrices give the same bits."""
    x_knr = noise((2, 150, 129), 7, device)
    x_knr[1, :, 5] = x_knr[1, :, 0] + 1e-4 * x_knr[1, :, 5]
    q_knr = ops.orthonormalize(x_knr)
    for rank in ranks:
        assert torch.equal(ops.orthonormalize(x_knr[:, :, :rank].contiguous()), q_knr[:, :, :rank])


def check_combined_rows(device: str, dtype: torch.dtype, tokens: int, k: int, width: int, missing: int) -> None:
    """Weighted sums of rows, sums, and the gradients of the first, against a plain loop in fp64.

    Args:
        missing: so many choices have no row.
    """
    generator = torch.Generator().manual_seed(tokens * k + width)
    count = tokens * k - missing
    places_tk = torch.randperm(tokens * k, generator=generator).view(tokens, k).clamp_(max=count).to(device)
    rows_rh, grad_th = noise((count, width), 1, device, dtype), noise((tokens, width), 2, device, dtype)
    weights_tk = torch.rand((tokens, k), generator=generator).to(device)
    near: dict[str, Any] = {"rtol": {torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps), "atol": 2e-6}
    wanted_th, plain_th = (torch.zeros(tokens, width, dtype=torch.float64) for _ in range(2))
    wanted_rh, wanted_tk = torch.zeros(count, width, dtype=torch.float64), torch.zeros(tokens, k, dtype=torch.float64)
    for t, j in ((t, j) for t in range(tokens) for j in range(k)):
        if (slot := int(places_tk[t, j])) < count:
            row, weight = rows_rh[slot].double().cpu(), float(weights_tk[t, j])
            wanted_th[t] += weight * row
            plain_th[t] += row
            wanted_rh[slot] = weight * grad_th[t].double().cpu()
            wanted_tk[t, j] = row @ grad_th[t].double().cpu()
    for weights, expected in ((weights_tk, wanted_th), (None, plain_th)):
        out_th = torch.full((tokens, width), 7.0, device=device, dtype=dtype)
        ops.combine_rows(rows_rh, places_tk, weights, out_th)
        torch.testing.assert_close(out_th.double().cpu(), expected, **near)
    grad_rh, grad_tk = ops.combine_rows_back(grad_th, rows_rh, places_tk, weights_tk)
    assert (grad_rh.dtype, grad_tk.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(grad_rh.double().cpu(), wanted_rh, **near)
    torch.testing.assert_close(grad_tk.double().cpu(), wanted_tk, rtol=1e-5, atol=2e-6 * max(width, 1) ** 0.5)


_CLOSE: dict[str, Any] = {"rtol": 0, "atol": 2e-6}


def check_cross_entropy(logits_tv: Tensor, valid: int, labels_t: Tensor, weights_t: Tensor) -> None:
    """Losses and gradients, in one pass and from two halves of the vocabulary, against torch's in fp64.

    Args:
        logits_tv: of any type; columns beyond the valid ones must not matter.
        valid: columns that count.
        labels_t: below ``valid``.
        weights_t: fp32, of each token in the sum.
    """
    exact = logits_tv[:, :valid].double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, labels_t, reduction="none")
    (losses * weights_t.double()).sum().backward()
    assert exact.grad is not None
    expected = torch.nn.functional.pad(exact.grad, (0, logits_tv.shape[1] - valid))
    place_value = float(torch.logsumexp(exact.detach(), dim=1).abs().max()) * 2**-22  # of a log-sum-exp in fp32, twice
    rounding = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[logits_tv.dtype]
    near: dict[str, Any] = {"rtol": rounding + place_value, "atol": 2e-6 + place_value}
    losses_near: dict[str, Any] = {"rtol": 0, "atol": 4e-6 + place_value}

    def stats() -> tuple[Tensor, Tensor]:
        lse_t, target_t = (torch.full(labels_t.shape, 7.0, device=logits_tv.device) for _ in range(2))
        return lse_t, target_t

    lse_t, target_t = stats()
    grad_tv = logits_tv.clone()
    ops.cross_entropy(grad_tv, labels_t, valid, lse_t, target_t, weights_t)
    torch.testing.assert_close((lse_t - target_t).double(), losses.detach(), **losses_near)
    torch.testing.assert_close(grad_tv.double(), expected, **near)
    assert not grad_tv[:, valid:].any()

    cut = logits_tv.shape[1] // 2
    shards = [
        (logits_tv[:, :cut].contiguous(), 0, min(valid, cut)),
        (logits_tv[:, cut:].contiguous(), cut, max(valid - cut, 0)),
    ]
    results = []
    for part_tv, first, counts in shards:
        local_t = torch.where((labels_t >= first) & (labels_t < first + counts), labels_t - first, -1)
        before_tv = part_tv[:, :counts].clone()
        results.append((*stats(), local_t))
        ops.cross_entropy(part_tv, local_t, counts, *results[-1][:2])
        assert torch.equal(part_tv[:, :counts], before_tv)
    whole_t = torch.logsumexp(torch.stack([lse for lse, _, _ in results]), dim=0)
    split_t = whole_t - sum(target for _, target, _ in results)
    torch.testing.assert_close(split_t.double(), losses.detach(), **losses_near)
    for (part_tv, _, counts), (_, _, local_t) in zip(shards, results, strict=True):
        ops.cross_entropy(part_tv, local_t, counts, whole_t, None, weights_t)
    torch.testing.assert_close(torch.cat([gradient for gradient, _, _ in shards], dim=1).double(), expected, **near)


def check_cross_entropies(device: str, dtype: torch.dtype, tokens: int, columns: int, valid: int, scale: float) -> None:
    """Random logits with some weights zero, ordinary and shifted far from zero; rows that are not finite stay apart."""
    generator = torch.Generator().manual_seed(columns)
    labels_t = torch.randint(0, valid, (tokens,), generator=generator).to(device)
    weights_t = (torch.rand(tokens, generator=generator) * (torch.arange(tokens) % 3 > 0)).to(device)
    logits_tv = noise((tokens, columns), tokens, device, dtype) * scale
    logits_tv[:, valid:] = torch.tensor(SPECIAL, dtype=dtype, device=device).repeat(columns)[: columns - valid]
    check_cross_entropy(logits_tv, valid, labels_t, weights_t)
    check_cross_entropy(logits_tv - 300, valid, labels_t, weights_t)
    if tokens > 1:
        spoiled_tv = logits_tv.clone()
        spoiled_tv[0, valid - 1] = torch.nan
        lse_t, target_t = (torch.empty(tokens, device=device) for _ in range(2))
        ops.cross_entropy(spoiled_tv, labels_t, valid, lse_t, target_t, weights_t + 1)
        assert lse_t[0].isnan()
        assert spoiled_tv[0, :valid].isnan().all()
        assert spoiled_tv[1:].isfinite().all()
