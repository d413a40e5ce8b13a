"""Pure-torch reference implementations of the native kernels, for comparison and as a fallback.

Like the native operators of the same names, functions write to tensors allocated by the caller. They define the results
bit for bit unless noted otherwise. They run on any device and also support fp64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.kernels.grid import MIDRISE_RMS, SIGNED_RMS, STANDS_OUT, Grid, GridKind, Role, ScaleLayout, ScaleMethod


def pack_bits(codes_n: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes into bytes.

    Args:
        codes_n: uint8 values below 2**bits, flat, any length.
        bits: 1 to 8.

    Returns:
        uint8, ceil(n / 8) * bits long: eight codes make ``bits`` bytes, little-endian, with the first code in the
        lowest bits. Padding codes are 0.
    """
    groups = -(-codes_n.numel() // 8)
    padded = torch.zeros(groups * 8, dtype=torch.uint8, device=codes_n.device)
    padded[: codes_n.numel()] = codes_n
    words_g = padded.view(torch.int64)
    for width, mask in _halves(bits):  # join neighboring codes of this width
        words_g = (words_g & mask) | ((words_g >> (width - width * bits // 8)) & (mask << (width * bits // 8)))
    return words_g.view(torch.uint8).view(groups, 8)[:, :bits].reshape(-1)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first ``count`` codes from ``pack_bits``, as uint8."""
    eights = torch.zeros(packed.numel() // bits, 8, dtype=torch.uint8, device=packed.device)
    eights[:, :bits] = packed.view(-1, bits)
    words_g = eights.view(torch.int64).view(-1)
    for width, mask in reversed(_halves(bits)):
        words_g = (words_g & mask) | ((words_g & (mask << (width * bits // 8))) << (width - width * bits // 8))
    return words_g.view(torch.uint8)[:count]


def _halves(bits: int) -> list[tuple[int, int]]:
    """Steps that pack the eight bytes of a word to ``bits`` bits each, as (width, mask).

    A step joins neighbors ``width`` bits apart; its mask selects the lower neighbors.
    """
    steps = []
    for width in (8, 16, 32) if bits < 8 else ():
        filled = (1 << (width * bits // 8)) - 1
        steps.append((width, sum(filled << shift for shift in range(0, 64, 2 * width))))
    return steps


def noise(count: int, seed: int, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), fp32, each a function of only seed and index, on any device."""
    mask = 0xFFFFFFFF

    def mixed(x: Tensor) -> Tensor:
        x = x ^ (x >> 16)
        x = (x * 0x7FEB352D) & mask
        x = x ^ (x >> 15)
        x = (x * 0x846CA68B) & mask
        return x ^ (x >> 16)

    index = torch.arange(count, device=device) & mask
    drawn = mixed(mixed(index ^ (seed & mask)) ^ ((seed >> 32) & mask))
    return (drawn >> 8).to(torch.float32) * 2.0**-24


def rotate(x_n: Tensor, block: int) -> Tensor:
    """Normalized Walsh-Hadamard transform of consecutive blocks, which is its own inverse."""
    h = 1
    while h < block:
        pairs = x_n.view(-1, block // (2 * h), 2, h)
        x_n = torch.cat([pairs[:, :, :1] + pairs[:, :, 1:], pairs[:, :, :1] - pairs[:, :, 1:]], dim=2)
        h *= 2
    return x_n.reshape(-1) * (1.0 / torch.sqrt(torch.tensor(float(block))).to(x_n.device))


def _scales(x_n: Tensor, grid: Grid, stochastic: bool) -> Tensor:
    """Scales of flat numbers, fp32, (groups) or (groups, 2); not bit-exact if ``Grid.sums``."""
    count, groups = x_n.numel(), grid.groups(x_n.numel())
    if count == 0 or groups == 0:
        return torch.zeros(grid.scale_count(count), device=x_n.device)
    if grid.layout is ScaleLayout.CHANNEL:
        groups_gn = x_n.view(-1, grid.group).t()
    elif grid.layout is ScaleLayout.TENSOR:
        groups_gn = x_n.view(1, count)
    else:
        groups_gn = torch.nn.functional.pad(x_n, (0, groups * grid.group - count)).view(groups, grid.group)
    if grid.kind is GridKind.MINMAX:
        low_g, high_g = groups_gn.amin(dim=1), groups_gn.amax(dim=1)
        spare = groups_gn.numel() - count
        if spare:
            last_n = groups_gn[-1, : groups_gn.shape[1] - spare]
            low_g[-1], high_g[-1] = last_n.amin(), last_n.amax()
        return (torch.stack([low_g, high_g], dim=1) + 0.0).flatten()  # no negative zeros
    # The last group may be short; its padding with zeros changes neither sums nor magnitudes.
    sizes_g = torch.full((groups,), groups_gn.shape[1], dtype=torch.float64, device=x_n.device)
    if grid.layout is ScaleLayout.GROUP:
        sizes_g[-1] = count - (groups - 1) * grid.group
    if grid.is_sign and grid.method is not ScaleMethod.L2:
        return (groups_gn.abs().sum(dim=1, dtype=torch.float64) / sizes_g).float()
    most_g = groups_gn.abs().amax(dim=1)
    if grid.method is ScaleMethod.MAX and grid.kind in (GridKind.SYMMETRIC, GridKind.ASYMMETRIC):
        return most_g
    if grid.method is ScaleMethod.MAX and stochastic:
        # Scales of mid-rise and signed grids whose levels cover every number.
        if grid.kind is GridKind.MIDRISE:
            signs_g, outer_g = torch.ones_like(most_g), most_g * ((1 << grid.bits) / ((1 << grid.bits) - 1))
        else:
            signs_g, half = _peak_signs(groups_gn), 1 << (grid.bits - 1)
            opposite_g = torch.minimum(groups_gn.amax(dim=1), -groups_gn.amin(dim=1)).clamp(min=0.0)
            outer_g = torch.maximum(most_g, opposite_g * (half / (half - 1))) if half > 1 else most_g
        finite_g = outer_g.clamp(max=torch.finfo(torch.float32).max)
        return torch.where(most_g.isfinite(), finite_g, most_g) * signs_g + 0.0
    sum_g = groups_gn.double().square().sum(dim=1)
    root_g = (sum_g / sizes_g).sqrt()
    if grid.method is ScaleMethod.L2:
        return (root_g * 2.0).float()
    if grid.kind is GridKind.MIDRISE:
        return torch.minimum((root_g * MIDRISE_RMS[grid.bits - 1]).float(), most_g)
    square_g = most_g.double().square()
    stands_out_g = square_g * (sizes_g - 1) > (sum_g - square_g) * STANDS_OUT**2
    usual_g = torch.minimum((root_g * SIGNED_RMS[grid.bits - 1]).float(), most_g)
    return torch.where(stands_out_g | (most_g == 0), most_g, usual_g) * _peak_signs(groups_gn)


def _peak_signs(groups_gn: Tensor) -> Tensor:
    """-1 if the number with the largest magnitude in a group is positive, else 1, so that its level is -1."""
    return torch.where(groups_gn.amax(dim=1) > -groups_gn.amin(dim=1), -1.0, 1.0)


def bf16_towards(x: Tensor, outwards: Tensor) -> Tensor:
    """Round to bf16 away from zero where ``outwards``, else towards zero; finite numbers stay finite."""
    bits = x.view(torch.int32)
    up = outwards & (x.abs() < torch.finfo(torch.bfloat16).max)
    cut = torch.where(up, bits + 0xFFFF, bits) & -0x10000
    return torch.where(x.isnan(), x, cut.view(torch.float32)).to(torch.bfloat16)


def _spread(scale_g: Tensor, count: int, grid: Grid) -> Tensor:
    """Expand scales of groups to ``count`` numbers."""
    if grid.layout is ScaleLayout.CHANNEL:
        return scale_g.repeat(count // max(grid.group, 1))
    if grid.layout is ScaleLayout.TENSOR:
        return scale_g.expand(count)
    return scale_g.repeat_interleave(grid.group)[:count]


def _bases(scale_g: Tensor, grid: Grid) -> tuple[Tensor | None, Tensor]:
    """Value of code 0 of a minmax grid (None for other grids), and total length of ``Grid.top`` steps."""
    if grid.kind is not GridKind.MINMAX:
        return None, scale_g
    low_g, high_g = scale_g.view(-1, 2).unbind(dim=1)
    return low_g, high_g - low_g


def _codes(x_n: Tensor, scale_g: Tensor, grid: Grid, seed: int | None) -> Tensor:
    if grid.is_sign:
        return (x_n >= 0).to(torch.uint8)
    base_g, length_g = _bases(scale_g, grid)
    if base_g is not None:
        x_n = x_n - _spread(base_g, x_n.numel(), grid)
    # torch computes scalar / tensor as the reciprocal times the scalar, which rounds twice.
    steps_g = torch.where(length_g.abs() > 0, torch.full_like(length_g, grid.top) / length_g, 0.0)
    steps_n = x_n * _spread(steps_g, x_n.numel(), grid) - grid.shift
    low, high = grid.limits
    if seed is not None:
        steps_n = (steps_n + noise(x_n.numel(), seed, x_n.device)).floor()
    else:
        steps_n = steps_n.round()
    finite_n = torch.where(steps_n.isnan(), float(low), steps_n).clamp(low, high)
    return (finite_n + grid.offset).to(torch.uint8)


def _values(codes_n: Tensor, scale_g: Tensor, grid: Grid) -> Tensor:
    levels_n = codes_n.to(torch.float32)
    if grid.is_sign:
        return (levels_n * 2 - 1) * _spread(scale_g, codes_n.numel(), grid)
    base_g, length_g = _bases(scale_g, grid)
    # CUDA computes tensor / scalar as a product with the reciprocal, which rounds twice.
    unit_g = length_g / torch.full_like(length_g, grid.top)
    values_n = (levels_n - (grid.offset - grid.shift)) * _spread(unit_g, codes_n.numel(), grid)
    return values_n if base_g is None else values_n + _spread(base_g, codes_n.numel(), grid)


def quantize_pack(
    x: Tensor, other: Tensor | None, codes: Tensor, scales: Tensor, grid: Grid, role: Role, seed: int | None
) -> None:
    """Quantize numbers on a uniform grid, and pack the codes.

    Args:
        x: contiguous, any shape.
        other: the reference (``Role.DELTA``) or the residual (``Role.FEEDBACK``), of the same size; updated in place.
        codes: output, uint8, ``grid.code_bytes`` long.
        scales: output, fp32 or bf16, ``grid.scale_count`` long. Codes use the rounded scales. The scale of zeros is 0;
            an infinite or NaN number makes its group's scale infinite or NaN, and the group decodes to NaN. Scales of a
            minmax grid are pairs, minimum and maximum.
        role: encode x (PLAIN), x - other (DELTA), or x + other (FEEDBACK).
        seed: seed of stochastic rounding, which is unbiased if the levels cover all numbers (not with
            ``ScaleMethod.L2``, asymmetric grids or sign grids); None rounds to nearest, ties to even.
    """
    input_n = x.reshape(-1).float()
    if role is Role.DELTA and other is not None:
        input_n = input_n - other.reshape(-1).float()
    elif role is Role.FEEDBACK and other is not None:
        input_n = input_n + other.reshape(-1).float()
    count, coded = input_n.numel(), grid.coded(input_n.numel())
    coded_n = torch.nn.functional.pad(input_n, (0, coded - count))
    coded_n = rotate(coded_n, grid.rotation) if grid.rotation and count else coded_n
    scale_g = _scales(coded_n, grid, seed is not None)
    # Scales are rounded to nearest, for the lowest error, but limits of minmax grids and scales for stochastic rounding
    # are never rounded inwards, because clipping would add a bias.
    outwards = seed is not None and not grid.is_sign
    if scales.dtype == torch.float32 or not (outwards or grid.kind is GridKind.MINMAX):
        scales.copy_(scale_g)
    elif grid.kind is not GridKind.MINMAX:
        scales.copy_(bf16_towards(scale_g, torch.ones_like(scale_g, dtype=torch.bool)))
    else:
        upper_g = torch.arange(scale_g.numel(), device=scale_g.device) % 2 == 1
        scales.copy_(bf16_towards(scale_g, (scale_g < 0) != upper_g))
    codes_n = _codes(coded_n, scales.float(), grid, seed)
    codes.copy_(pack_bits(codes_n, grid.bits))
    if role is Role.PLAIN or other is None:
        return
    decoded_n = _values(codes_n, scales.float(), grid)
    decoded_n = (rotate(decoded_n, grid.rotation) if grid.rotation and count else decoded_n)[:count]
    if role is Role.DELTA:
        other.copy_((other.reshape(-1).float() + decoded_n).view(other.shape))
    else:
        other.copy_((input_n - decoded_n).view(other.shape))


def unpack_dequantize(
    codes: Tensor, scales: Tensor, other: Tensor | None, out: Tensor | None, grid: Grid, role: Role
) -> None:
    """Decode numbers encoded by ``quantize_pack``.

    Args:
        codes, scales: outputs of ``quantize_pack``.
        other: with ``Role.DELTA``, the reference to which the numbers are added.
        out: output, overwritten, or added to in fp32 with ``Role.ADD``; may be None with ``Role.DELTA``.
        grid: the encoder's grid.
        role: PLAIN, DELTA or ADD.
    """
    like = out if out is not None else other
    assert like is not None
    count, coded = like.numel(), grid.coded(like.numel())
    values_n = _values(unpack_bits(codes, grid.bits, coded), scales.float(), grid)
    values_n = (rotate(values_n, grid.rotation) if grid.rotation and count else values_n)[:count]
    if role is Role.DELTA and other is not None:
        values_n = other.reshape(-1).float() + values_n
        other.copy_(values_n.view(other.shape))
    if out is None:
        return
    if role is Role.ADD:
        out.add_(values_n.view(out.shape))
    else:
        out.copy_(values_n.view(out.shape))


def abs_topk(x_kn: Tensor, indices_kc: Tensor) -> None:
    """Indices of the largest magnitudes in each row, ascending; ties go to the lower index.

    Nonfinite numbers count as infinite.
    """
    magnitude = x_kn.abs().nan_to_num(torch.inf, posinf=torch.inf)
    order = torch.sort(magnitude, dim=1, descending=True, stable=True).indices
    indices_kc.copy_(order[:, : indices_kc.shape[1]].sort(dim=1).values)


def dilate(mask_kn: Tensor, radius: int, out_kn: Tensor) -> None:
    """Dilate a mask: True if the same row has a True within ``radius`` positions."""
    counts = torch.nn.functional.pad(mask_kn.to(torch.int64).cumsum(dim=1), (1, 0))
    n = mask_kn.shape[1]
    places = torch.arange(n, device=mask_kn.device)
    out_kn.copy_(counts[:, (places + radius + 1).clamp(max=n)] > counts[:, (places - radius).clamp(min=0)])


def gather_packed(x_n: Tensor, indices_c: Tensor, packed_c: Tensor) -> None:
    """Gather the elements at ascending indices."""
    torch.take(x_n, indices_c, out=packed_c)


def scatter_add_packed(x_n: Tensor, indices_c: Tensor, packed_c: Tensor) -> None:
    """Add packed numbers at ascending, distinct indices."""
    x_n.index_add_(0, indices_c, packed_c)


def finite_norm(x: Tensor, out_2: Tensor) -> None:
    """Sum of squares, in fp64, and whether all are finite (1 or 0).

    The sum may differ between implementations in the last digits of fp64.
    """
    out_2[0] = torch.linalg.vector_norm(x.reshape(-1), dtype=torch.float64).square()
    out_2[1] = torch.isfinite(x).all()


def sample_histogram(x: Tensor, stride: int, counts_b: Tensor, range_2: Tensor) -> None:
    """Histogram with equal bins over the range of the finite elements among every ``stride``-th, and that range.

    Bins are [low + i w, low + (i + 1) w); the last includes its upper end. If none is finite: counts 0, (inf, -inf).
    """
    values = x.reshape(-1)[::stride]
    values = values[torch.isfinite(values)].double()
    counts_b.zero_()
    if not values.numel():
        range_2.copy_(torch.tensor([math.inf, -math.inf]))
        return
    low, high = torch.aminmax(values)
    range_2.copy_(torch.stack([low, high]))
    bins = counts_b.numel()
    # scalar / tensor would be a product with the tensor's reciprocal, with another rounding.
    factor = torch.full_like(low, bins) / (high - low) if high > low else torch.zeros_like(low)
    places = ((values - low) * factor).to(torch.int64).clamp(max=bins - 1)
    counts_b.add_(torch.bincount(places, minlength=bins))


def orthonormalize(x_knr: Tensor, q_knr: Tensor) -> None:
    """Orthonormal bases of the columns of a stack of matrices, n >= r; triangular factors have positive diagonals.

    Unique up to rounding (1e-6 for each entry, times the condition of the columns, relative to 1) for independent
    columns. For dependent columns the result is still orthonormal, in any directions. NaN if a matrix is nonfinite.
    """
    q, r_krr = torch.linalg.qr(x_knr.double(), mode="reduced")
    signs_kr = torch.where(torch.diagonal(r_krr, dim1=1, dim2=2) < 0, -1.0, 1.0)
    q_knr.copy_(q * signs_kr.unsqueeze(1))


_CHUNK_ELEMENTS = {"cpu": 1 << 20}
"""Logits per chunk: on a CPU, as many as fit in a core's cache in fp32; on other devices, 1 GiB."""


def cross_entropy(
    logits_tv: Tensor,
    labels_t: Tensor,
    valid: int,
    lse_t: Tensor,
    target_t: Tensor | None,
    weights_t: Tensor | None,
) -> None:
    """Cross-entropy over the first ``valid`` columns of each row, and its gradient, in place of the logits.

    Args:
        logits_tv: logits, overwritten if ``weights_t`` is given. Columns from ``valid`` on may hold any values.
        labels_t: int64 columns below ``valid``; negative if the label belongs to another rank.
        lse_t: log-sum-exp of each row, in the accumulation dtype (fp32, or fp64 for fp64 logits).
        target_t: logit of each row's label, 0 for a negative label. If given, it and ``lse_t`` are outputs; otherwise
            ``lse_t`` is an input, such as the log-sum-exp over a vocabulary sharded over ranks.
        weights_t: if given, the logits become the gradient of the sum of weights x (lse - logit of the label), 0 from
            column ``valid`` on.
    """
    size = max(1, _CHUNK_ELEMENTS.get(logits_tv.device.type, 1 << 28) // max(logits_tv.shape[1], 1))
    for first in range(0, logits_tv.shape[0], size):
        rows = slice(first, first + size)
        wide, label = widened(logits_tv[rows]), labels_t[rows].unsqueeze(1)
        elsewhere, column = label < 0, label.clamp(min=0)
        if target_t is not None:
            lse_t[rows] = torch.logsumexp(wide[:, :valid], dim=1)
            target_t[rows] = wide.gather(1, column).masked_fill(elsewhere, 0.0).squeeze(1)
        if weights_t is not None:
            wide[:, valid:] = -torch.inf
            grad = wide.sub_(lse_t[rows].unsqueeze(1)).exp_()
            grad.scatter_add_(1, column, elsewhere.to(grad.dtype) - 1)
            logits_tv[rows] = grad.mul_(weights_t[rows].unsqueeze(1))


def widened(x: Tensor) -> Tensor:
    """Cast to the accumulation dtype: fp64 stays, other dtypes become fp32."""
    return x if x.dtype == torch.float64 else x.float()


def add_product_(total_nm: Tensor, a_tn: Tensor, b_tm: Tensor, fresh: bool) -> None:
    """``total += a^T b``, or ``= a^T b`` if ``fresh``; sums in fp32 and rounds the product to the factors' dtype."""
    product_nm = a_tn.t() @ b_tm
    if fresh:
        total_nm.copy_(product_nm)
    else:
        total_nm.add_(product_nm)
