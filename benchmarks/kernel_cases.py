"""Operations that the kernels' benchmark measures: each with its inputs, its pure-torch twin and its traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.state import CompressorState
from megatron.kernels import float8, ops, reference
from megatron.kernels.float8 import Float8
from megatron.kernels.grid import Grid, Role, ScaleLayout

TP, MICRO_BATCH, SEQUENCE = 8, 8, 1024
MODELS = {"2.5B": 1920, "8.3B": 3072, "175B": 12288}
BITS, DENSITIES, RANKS = (2, 4, 8), (0.01, 0.1, 0.5), (8, 32, 128)
MESSAGE_RANKS = (8, 16, 24, 32, 40)
SECTOR = 32
"""Bytes that memory gives at least."""
Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Runs:
    """An operation on inputs of its own.

    Args:
        run: the compiled operation.
        twin: the same operation in pure torch.
        input_bytes: bytes that GB/s counts.
        traffic: least bytes that must be read and written.
        in_place: bytes of it that are read and written again at the same place.
        rival: another operation that it is compared with.
    """

    run: Callable[[], Any]
    twin: Callable[[], Any]
    input_bytes: int
    traffic: int
    in_place: int = 0
    rival: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One operation on one shape.

    Args:
        op, model, shape, setting: what the table shows of it.
        build: allocates a set of inputs.
        rival_name: name of the operation of torch that it is compared with.
    """

    op: str
    model: str
    shape: str
    setting: str
    build: Callable[[], Runs]
    rival_name: str = ""


def matrices(hidden: int) -> dict[str, Size]:
    """Gradients of a layer's weights on one tensor-parallel rank."""
    return {
        "qkv": (3 * hidden // TP, hidden),
        "dense": (hidden, hidden // TP),
        "h-4h": (4 * hidden // TP, hidden),
        "4h-h": (hidden, 4 * hidden // TP),
    }


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def drawn(shape: Sequence[int], device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, drawn by their own generator: a graph whose capture fails takes the device's with it."""
    generator = torch.Generator(device).manual_seed(7)
    return torch.randn(*shape, device=device, generator=generator).to(dtype)


def kind_of(dtype: torch.dtype) -> str:
    """A dtype in the words of a setting."""
    return " bf16" if dtype == torch.bfloat16 else ""


def codec_cases(model: str, device: str, quick: bool) -> Iterator[KernelCase]:
    """Cases of quantizers on activations."""
    hidden = MODELS[model]
    size = (SEQUENCE * MICRO_BATCH // TP, hidden)
    for bits in BITS:
        yield from grid_cases(model, size, bits, device)
        if not quick:
            yield from scale_cases(
                model, size, f"{bits} bits, channel", Grid(bits, ScaleLayout.CHANNEL, hidden), device
            )
            yield from scale_cases(model, size, f"{bits} bits, tensor", Grid(bits, ScaleLayout.TENSOR), device)
    yield from float8_cases(model, size, device, plain=quick)


def _message(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    codes = torch.empty(grid.code_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(grid.scale_count(x.numel()), device=x.device)


def _encode(x: Tensor, grid: Grid, role: Role = Role.PLAIN, seed: int | None = None) -> Runs:
    codes, scales = _message(x, grid)
    other = None if role is Role.PLAIN else torch.zeros_like(x)
    moved = 0 if other is None else 2 * nbytes(other)
    return Runs(
        lambda: ops.quantize_pack(x, codes, scales, grid, role, other, seed),
        lambda: reference.quantize_pack(x, other, codes, scales, grid, role, seed),
        nbytes(x), nbytes(x, codes, scales) + moved, moved,
    )  # fmt: skip


def _decode(x: Tensor, grid: Grid, role: Role = Role.PLAIN) -> Runs:
    codes, scales = _message(x, grid)
    ops.quantize_pack(x, codes, scales, grid)
    out = torch.zeros_like(x)
    moved = 2 * nbytes(out) if role is Role.ADD else 0
    return Runs(
        lambda: ops.unpack_dequantize(codes, scales, out, grid, role),
        lambda: reference.unpack_dequantize(codes, scales, None, out, grid, role),
        nbytes(x), nbytes(codes, scales) + (moved or nbytes(out)), moved,
    )  # fmt: skip


def scale_cases(
    model: str, size: Size, setting: str, grid: Grid, device: str, dtype: torch.dtype = torch.float32
) -> Iterator[KernelCase]:
    """Cases of a grid, there and back."""
    shape = f"{size[0]} x {size[1]}"
    yield KernelCase("quantize", model, shape, setting, lambda: _encode(drawn(size, device, dtype), grid))
    yield KernelCase("dequantize", model, shape, setting, lambda: _decode(drawn(size, device, dtype), grid))


def grid_cases(
    model: str, size: Size, bits: int, device: str, dtype: torch.dtype = torch.float32, *, plain: bool = False
) -> Iterator[KernelCase]:
    """Cases of group scales; ``plain`` leaves out other uses of the numbers."""
    grid, shape, setting = Grid(bits), f"{size[0]} x {size[1]}", f"{bits} bits{kind_of(dtype)}, group"
    yield from scale_cases(model, size, setting, grid, device, dtype)
    if plain:
        return

    def case(op: str, build: Callable[[Tensor], Runs]) -> KernelCase:
        return KernelCase(op, model, shape, setting, lambda: build(drawn(size, device, dtype)))

    yield case("quantize, delta", lambda x: _encode(x, grid, Role.DELTA))
    yield case("quantize, feedback", lambda x: _encode(x, grid, Role.FEEDBACK))
    if dtype == torch.float32:
        yield case("dequantize, add", lambda x: _decode(x, grid, Role.ADD))
    if bits == 4:
        yield case("quantize, stochastic", lambda x: _encode(x, grid, seed=7))
        rotated = dataclasses.replace(grid, rotation=64)
        yield case("quantize, rotated", lambda x: _encode(x, rotated))


def float8_cases(
    model: str, size: Size, device: str, dtype: torch.dtype = torch.float32, *, plain: bool = False
) -> Iterator[KernelCase]:
    """Cases of both formats with scales of tiles; unless ``plain``, also of other scales and uses."""
    groups = {"tile": 128, "row": size[1], "tensor": size[0] * size[1]}
    kinds = [("e4m3", 3, "tile"), ("e5m2", 2, "tile")]
    if not plain:
        kinds += [("e4m3", 3, "row"), ("e4m3", 3, "tensor")]
    for name, mantissa, scale in kinds:

        def case(op: str, build: partial[Runs], setting: str = f"{name}{kind_of(dtype)}, {scale}") -> KernelCase:
            return KernelCase(
                op, model, f"{size[0]} x {size[1]}", setting, lambda: build(drawn(size, device, dtype))
            )  # fmt: skip

        form = Float8(mantissa, groups[scale])
        yield case("quantize", partial(_encode_float8, form=form))
        yield case("dequantize", partial(_decode_float8, form=form))
        if not plain and scale == "tile" and dtype == torch.float32:
            yield case("dequantize, add", partial(_decode_float8, form=form, added=1))
            yield case("quantize, stochastic", partial(_encode_float8, form=form, seed=7))


def _float8_message(x: Tensor, form: Float8) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(form.scale_count(x.numel()), device=x.device)


def _encode_float8(x: Tensor, form: Float8, seed: int | None = None) -> Runs:
    codes, scales = _float8_message(x, form)
    return Runs(
        lambda: ops.float8_encode(x, codes, scales, form, seed),
        lambda: float8.float8_encode(x, codes, scales, form, seed), nbytes(x), nbytes(x, codes, scales),
    )  # fmt: skip


def _decode_float8(x: Tensor, form: Float8, added: int = 0) -> Runs:
    codes, scales = _float8_message(x, form)
    ops.float8_encode(x, codes, scales, form)
    out = torch.zeros_like(x)
    moved = 2 * nbytes(out) if added else 0
    return Runs(
        lambda: ops.float8_decode(codes, scales, out, form, added),
        lambda: float8.float8_decode(codes, scales, out, form, added),
        nbytes(x), nbytes(codes, scales) + (moved or nbytes(out)), moved,
    )  # fmt: skip


def message_cases(model: str, device: str, quick: bool) -> Iterator[KernelCase]:
    """Cases of Optimus-CC's compressed backpropagation: an activation's gradient as two thin factors, and back."""
    size = (SEQUENCE * MICRO_BATCH // TP, MODELS[model])

    def build(rank: int, back: bool) -> Runs:
        x_nm = drawn(size, device)
        codec, state = LowRankCodec(LowRankConfig(rank)), CompressorState()
        payload = codec.encode(x_nm, state, 0)
        state.commit()
        sizes = nbytes(x_nm), nbytes(x_nm, payload.wire)
        if back:
            run = partial(codec.decode, payload, x_nm.shape, x_nm.dtype, state, 0)
            return Runs(run, partial(product, payload.wire, x_nm.shape, rank), *sizes)
        rival = partial(factors, x_nm, rank, gram_schmidt)
        return Runs(
            partial(codec.encode, x_nm, state, 0), partial(factors, x_nm, rank, _twin_basis), *sizes, rival=rival
        )

    for rank in MESSAGE_RANKS[1:2] if quick else MESSAGE_RANKS:
        shape, setting = f"{size[0]} x {size[1]}", f"rank {rank}"
        columns = "Gram-Schmidt by columns"
        yield KernelCase("low-rank compress", model, shape, setting, partial(build, rank, False), columns)
        yield KernelCase("low-rank decompress", model, shape, setting, partial(build, rank, True))


def factors(x_nm: Tensor, rank: int, basis: Callable[[Tensor], Tensor]) -> Tensor:
    """A low-rank message in plain torch: two bases and two products, as the compiled one."""
    q_mr = basis(x_nm[:rank].T.contiguous())
    p_nr = basis(x_nm @ q_mr)
    return torch.cat([p_nr.flatten(), (x_nm.T @ p_nr).flatten()])


def product(wire: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """The matrix of a low-rank message, in plain torch."""
    n, m = shape
    return wire[: n * rank].view(n, rank) @ wire[n * rank :].view(m, rank).T


def _twin_basis(x_nr: Tensor) -> Tensor:
    q_nr = torch.empty_like(x_nr)
    reference.orthonormalize(x_nr.unsqueeze(0), q_nr.unsqueeze(0))
    return q_nr


def gram_schmidt(x_nr: Tensor) -> Tensor:
    """Gram-Schmidt column by column, as in PowerSGD's published codes."""
    q_nr = x_nr.clone()
    for i in range(q_nr.shape[1]):
        column = q_nr[:, i : i + 1]
        column /= torch.sqrt(torch.sum(column**2)) + 1e-8
        if i + 1 < q_nr.shape[1]:
            rest = q_nr[:, i + 1 :]
            rest -= torch.sum(column * rest, dim=0) * column
    return q_nr


def gradient_cases(model: str, device: str, quick: bool) -> Iterator[KernelCase]:
    """Cases of Top-K, low rank, norm and entropy on gradients."""
    for name, size in matrices(MODELS[model]).items():
        if quick and name != "qkv":
            continue
        shape = f"{name} {size[0]} x {size[1]}"
        for density in DENSITIES:
            yield from choice_cases(model, shape, size[0] * size[1], density, device)
        yield from norm_cases(model, shape, size, device)
        for rank in RANKS:
            yield basis_case(model, size[0], rank, device, gram_schmidt, "Gram-Schmidt by columns")


def choice_cases(model: str, shape: str, n: int, density: float, device: str) -> Iterator[KernelCase]:
    """Cases of choosing the largest of n numbers, and of gathers and scatters at their indices."""
    count = int(density * n)

    def chosen() -> tuple[Tensor, Tensor, Tensor]:
        x_n = drawn((n,), device)
        return x_n, ops.abs_topk(x_n.view(1, -1), count), torch.zeros(count, device=device)

    def topk() -> Runs:
        x_n, places_1c, _ = chosen()
        x_1n = x_n.view(1, -1)
        return Runs(
            lambda: ops.abs_topk(x_1n, count), lambda: reference.abs_topk(x_1n, places_1c.clone()), nbytes(x_n),
            nbytes(x_n, places_1c), rival=lambda: torch.topk(x_1n.abs(), count, dim=1, sorted=False),
        )  # fmt: skip

    def gather() -> Runs:
        x_n, places_1c, packed_c = chosen()
        places_c, twin_c = places_1c.view(-1), torch.empty_like(packed_c)
        return Runs(
            lambda: ops.gather_packed(x_n, places_c), lambda: reference.gather_packed(x_n, places_c, twin_c),
            nbytes(packed_c), nbytes(places_c, packed_c, packed_c),
        )  # fmt: skip

    def scatter() -> Runs:
        x_n, places_1c, packed_c = chosen()
        places_c, moved = places_1c.view(-1), 2 * nbytes(packed_c)
        return Runs(
            lambda: ops.scatter_add_packed(x_n, places_c, packed_c),
            lambda: reference.scatter_add_packed(x_n, places_c, packed_c),
            nbytes(packed_c), nbytes(places_c, packed_c) + moved, moved,
        )  # fmt: skip

    setting = f"{density:.0%}"
    yield KernelCase("abs_topk", model, shape, setting, topk, "torch.topk")
    yield KernelCase("gather", model, shape, setting, gather)
    yield KernelCase("scatter-add", model, shape, setting, scatter)


def basis_case(
    model: str, n: int, rank: int, device: str, rival: Callable[[Tensor], object], rival_name: str
) -> KernelCase:
    """The case of an orthonormal basis of thin columns."""

    def build() -> Runs:
        p_knr = drawn((1, n, rank), device)
        out_knr = torch.empty_like(p_knr)
        return Runs(
            lambda: ops.orthonormalize(p_knr), lambda: reference.orthonormalize(p_knr, out_knr),
            nbytes(p_knr), 2 * nbytes(p_knr), rival=lambda: rival(p_knr[0]),
        )  # fmt: skip

    return KernelCase("orthonormalize", model, f"{n} x {rank}", f"rank {rank}", build, rival_name)


def residual_case(model: str, shape: str, size: Size, rank: int, device: str) -> KernelCase:
    """The case of subtracting a product of factors: torch's fused batched product, beside a product and a sum."""

    def build() -> Runs:
        m_knc, p_knr = drawn((1, *size), device), drawn((1, size[0], rank), device)
        q_krc = (drawn((1, size[1], rank), device) * 1e-3).transpose(1, 2)
        moved = nbytes(m_knc, m_knc)
        return Runs(
            lambda: m_knc.baddbmm_(p_knr, q_krc, alpha=-1), lambda: m_knc.sub_(p_knr @ q_krc),
            nbytes(m_knc), moved + nbytes(p_knr, q_krc), moved,
        )  # fmt: skip

    return KernelCase("M - P Q^T", model, shape, f"rank {rank}", build)


def norm_cases(
    model: str, shape: str, size: Size, device: str, dtype: torch.dtype = torch.float32
) -> Iterator[KernelCase]:
    """Cases of a norm, and of a histogram of a sample."""
    bins, stride = 1000, 4

    def norm() -> Runs:
        x_nm, out_2 = drawn(size, device, dtype), torch.empty(2, dtype=torch.float64, device=device)
        return Runs(
            lambda: ops.finite_norm(x_nm), lambda: reference.finite_norm(x_nm, out_2), nbytes(x_nm), nbytes(x_nm)
        )

    def histogram() -> Runs:
        x_nm = drawn(size, device, dtype)
        counts_b = torch.empty(bins, dtype=torch.int64, device=device)
        range_2 = torch.empty(2, dtype=torch.float64, device=device)
        fetched = min(nbytes(x_nm), x_nm.numel() // stride * SECTOR)
        return Runs(
            lambda: ops.sample_histogram(x_nm, stride, bins),
            lambda: reference.sample_histogram(x_nm, stride, counts_b, range_2), nbytes(x_nm) // stride, fetched,
        )  # fmt: skip

    yield KernelCase("finite_norm", model, shape, kind_of(dtype).strip(), norm)
    yield KernelCase("histogram", model, shape, f"every {stride}th, {bins} bins{kind_of(dtype)}", histogram)
