"""Operations of compressors: each with its inputs, its reference implementation and its traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.state import CompressorState
from megatron.kernels import combine, ops, reference

TP, MICRO_BATCH, SEQUENCE = 8, 8, 1024
MODELS = {"2.5B": 1920, "8.3B": 3072, "175B": 12288}
BITS, DENSITIES, RANKS = (2, 4, 8), (0.01, 0.1, 0.5), (8, 32, 128)
MESSAGE_RANKS = (8, 16, 24, 32, 40)
SECTOR = 32
"""Minimum bytes of a memory access."""
Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BuiltCase:
    """An operation on an input set.

    Args:
        run: the compiled operation.
        reference: the reference implementation in pure torch.
        input_bytes: bytes that GB/s counts.
        traffic: minimum bytes that must be read and written.
        in_place: share of the traffic that is read and written in place, in bytes.
        rival: another implementation.
    """

    run: Callable[[], Any]
    reference: Callable[[], Any]
    input_bytes: int
    traffic: int
    in_place: int = 0
    rival: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """An operation on a shape.

    Args:
        op, model, shape, setting: columns of the table.
        build: allocates an input set.
        rival_name: name of the other implementation.
    """

    op: str
    model: str
    shape: str
    setting: str
    build: Callable[[], BuiltCase]
    rival_name: str = ""


def matrices(hidden: int) -> dict[str, Size]:
    """Gradients of a layer's weights on a tensor-parallel rank."""
    return {
        "qkv": (3 * hidden // TP, hidden),
        "dense": (hidden, hidden // TP),
        "h-4h": (4 * hidden // TP, hidden),
        "4h-h": (hidden, 4 * hidden // TP),
    }


def nbytes(*tensors: Tensor) -> int:
    """Size of tensors in bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


def draw_normal(shape: Sequence[int], device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers from a separate generator: a failed graph capture breaks the device's generator."""
    generator = torch.Generator(device).manual_seed(7)
    return torch.randn(*shape, device=device, generator=generator).to(dtype)


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype in a setting's text."""
    return " bf16" if dtype == torch.bfloat16 else ""


def message_cases(model: str, device: str, quick: bool) -> Iterator[KernelCase]:
    """Cases of Optimus-CC's compressed backpropagation: an activation's gradient to two low-rank factors, and back."""
    size = (SEQUENCE * MICRO_BATCH // TP, MODELS[model])

    def build(rank: int, back: bool) -> BuiltCase:
        x_nm = draw_normal(size, device)
        codec, state = LowRankCodec(LowRankConfig(rank)), CompressorState()
        payload = codec.encode(x_nm, state, 0)
        state.commit()
        sizes = nbytes(x_nm), nbytes(x_nm, payload.wire)
        if back:
            run = partial(codec.decode, payload, x_nm.shape, x_nm.dtype, state, 0)
            return BuiltCase(run, partial(product, payload.wire, x_nm.shape, rank), *sizes)
        rival = partial(factors, x_nm, rank, gram_schmidt)
        return BuiltCase(
            partial(codec.encode, x_nm, state, 0), partial(factors, x_nm, rank, _reference_basis), *sizes, rival=rival
        )

    for rank in MESSAGE_RANKS[1:2] if quick else MESSAGE_RANKS:
        shape, setting = f"{size[0]} x {size[1]}", f"rank {rank}"
        columns = "Gram-Schmidt by columns"
        yield KernelCase("low-rank compress", model, shape, setting, partial(build, rank, False), columns)
        yield KernelCase("low-rank decompress", model, shape, setting, partial(build, rank, True))


def factors(x_nm: Tensor, rank: int, basis: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a low-rank message in pure torch: two bases and two products."""
    q_mr = basis(x_nm[:rank].T.contiguous())
    p_nr = basis(x_nm @ q_mr)
    return torch.cat([p_nr.flatten(), (x_nm.T @ p_nr).flatten()])


def product(wire: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """Return the matrix of a low-rank message, in pure torch."""
    n, m = shape
    return wire[: n * rank].view(n, rank) @ wire[n * rank :].view(m, rank).T


def _reference_basis(x_nr: Tensor) -> Tensor:
    q_nr = torch.empty_like(x_nr)
    reference.orthonormalize(x_nr.unsqueeze(0), q_nr.unsqueeze(0))
    return q_nr


def gram_schmidt(x_nr: Tensor) -> Tensor:
    """Gram-Schmidt column by column, as in PowerSGD's published code."""
    q_nr = x_nr.clone()
    for i in range(q_nr.shape[1]):
        column = q_nr[:, i : i + 1]
        column /= torch.sqrt(torch.sum(column**2)) + 1e-8
        if i + 1 < q_nr.shape[1]:
            later_columns = q_nr[:, i + 1 :]
            later_columns -= torch.sum(column * later_columns, dim=0) * column
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
    """Cases of Top-K of n numbers, and of gathers and scatters at its indices."""
    count = int(density * n)

    def choose() -> tuple[Tensor, Tensor, Tensor]:
        x_n = draw_normal((n,), device)
        return x_n, ops.abs_topk(x_n.view(1, -1), count), torch.zeros(count, device=device)

    def topk() -> BuiltCase:
        x_n, indices_1c, _ = choose()
        x_1n = x_n.view(1, -1)
        return BuiltCase(
            lambda: ops.abs_topk(x_1n, count), lambda: reference.abs_topk(x_1n, indices_1c.clone()), nbytes(x_n),
            nbytes(x_n, indices_1c), rival=lambda: torch.topk(x_1n.abs(), count, dim=1, sorted=False),
        )  # fmt: skip

    def gather() -> BuiltCase:
        x_n, indices_1c, packed_c = choose()
        indices_c, reference_c = indices_1c.view(-1), torch.empty_like(packed_c)
        return BuiltCase(
            lambda: ops.gather_packed(x_n, indices_c), lambda: reference.gather_packed(x_n, indices_c, reference_c),
            nbytes(packed_c), nbytes(indices_c, packed_c, packed_c),
        )  # fmt: skip

    def scatter() -> BuiltCase:
        x_n, indices_1c, packed_c = choose()
        indices_c, in_place = indices_1c.view(-1), 2 * nbytes(packed_c)
        return BuiltCase(
            lambda: ops.scatter_add_packed(x_n, indices_c, packed_c),
            lambda: reference.scatter_add_packed(x_n, indices_c, packed_c),
            nbytes(packed_c), nbytes(indices_c, packed_c) + in_place, in_place,
        )  # fmt: skip

    setting = f"{density:.0%}"
    yield KernelCase("abs_topk", model, shape, setting, topk, "torch.topk")
    yield KernelCase("gather", model, shape, setting, gather)
    yield KernelCase("scatter-add", model, shape, setting, scatter)


def basis_case(
    model: str, n: int, rank: int, device: str, rival: Callable[[Tensor], object], rival_name: str
) -> KernelCase:
    """Return the case of an orthonormal basis of a few columns."""

    def build() -> BuiltCase:
        p_knr = draw_normal((1, n, rank), device)
        out_knr = torch.empty_like(p_knr)
        return BuiltCase(
            lambda: ops.orthonormalize(p_knr), lambda: reference.orthonormalize(p_knr, out_knr),
            nbytes(p_knr), 2 * nbytes(p_knr), rival=lambda: rival(p_knr[0]),
        )  # fmt: skip

    return KernelCase("orthonormalize", model, f"{n} x {rank}", f"rank {rank}", build, rival_name)


def norm_cases(
    model: str, shape: str, size: Size, device: str, dtype: torch.dtype = torch.float32
) -> Iterator[KernelCase]:
    """Cases of a norm, and of a histogram of a sample."""
    bins, stride = 1000, 4

    def norm() -> BuiltCase:
        x_nm, out_2 = draw_normal(size, device, dtype), torch.empty(2, dtype=torch.float64, device=device)
        return BuiltCase(
            lambda: ops.finite_norm(x_nm), lambda: reference.finite_norm(x_nm, out_2), nbytes(x_nm), nbytes(x_nm)
        )

    def histogram() -> BuiltCase:
        x_nm = draw_normal(size, device, dtype)
        counts_b = torch.empty(bins, dtype=torch.int64, device=device)
        range_2 = torch.empty(2, dtype=torch.float64, device=device)
        fetched = min(nbytes(x_nm), x_nm.numel() // stride * SECTOR)
        return BuiltCase(
            lambda: ops.sample_histogram(x_nm, stride, bins),
            lambda: reference.sample_histogram(x_nm, stride, counts_b, range_2), nbytes(x_nm) // stride, fetched,
        )  # fmt: skip

    yield KernelCase("finite_norm", model, shape, dtype_text(dtype).strip(), norm)
    yield KernelCase("histogram", model, shape, f"every {stride}th, {bins} bins{dtype_text(dtype)}", histogram)


def combine_cases(
    model: str, device: str, quick: bool = False, dtype: torch.dtype = torch.float32
) -> Iterator[KernelCase]:
    """Cases of adding up the rows that 2 experts return for each token of a micro-batch, and of the gradients."""
    size, k = (SEQUENCE * MICRO_BATCH // TP, MODELS[model]), 2

    def draw_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        indices_n = torch.randperm(size[0] * k, device=device, generator=torch.Generator(device).manual_seed(7))
        rows_rh = draw_normal((size[0] * k, size[1]), device, dtype)
        return rows_rh, indices_n.view(-1, k), draw_normal((size[0], k), device), draw_normal(size, device, dtype)

    def forward() -> BuiltCase:
        rows_rh, indices_tk, weights_tk, out_th = draw_rows()
        return BuiltCase(
            lambda: ops.combine_rows(rows_rh, indices_tk, weights_tk, out_th),
            lambda: combine.combine_rows(rows_rh, indices_tk, weights_tk, out_th),
            nbytes(rows_rh), nbytes(rows_rh, indices_tk, weights_tk, out_th),
        )  # fmt: skip

    def backward() -> BuiltCase:
        rows_rh, indices_tk, weights_tk, grad_th = draw_rows()
        return BuiltCase(
            lambda: ops.combine_rows_back(grad_th, rows_rh, indices_tk, weights_tk),
            lambda: combine.combine_rows_back(grad_th, rows_rh, indices_tk, weights_tk),
            nbytes(rows_rh), nbytes(grad_th, rows_rh, indices_tk, weights_tk, rows_rh, weights_tk),
        )  # fmt: skip

    shape, setting = f"{size[0]} x {size[1]}", f"{k} rows a token{dtype_text(dtype)}"
    yield KernelCase("combine_rows", model, shape, setting, forward)
    yield KernelCase("combine_rows_back", model, shape, setting, backward)
