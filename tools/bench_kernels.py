"""Throughput of the compressors' kernels, beside a plain copy and their pure-torch twins in the same run.

    make bench-kernels                          on the CPU, or on a GPU where the CUDA kernels are built
    make bench-kernels ARGS="--models 2.5B --quick"

Shapes are those of Optimus-CC's models: activations of one micro-batch (s x b x h / TP) and the gradients of a layer's
matrices. GB/s counts the input's bytes. The limit is the time that the operation's smallest possible traffic (each
input read once, each output written once) would take at a copy's speed, measured on as many bytes; what is changed in
place is compared with scaling as many numbers in place, since a copy also fetches the memory that it overwrites. "Of
limit" is that over the measured time. Prints Markdown and writes it with a plot.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.state import CompressorState
from megatron.kernels import native, ops, reference
from megatron.kernels.grid import Grid, Layout, Role
from tools.kernel_table import ROWS, Row, draw, kinds_of, line, summary

TP, MICRO_BATCH, SEQUENCE = 8, 8, 1024
MODELS = {"2.5B": 1920, "8.3B": 3072, "175B": 12288}
BITS, DENSITIES, RANKS = (2, 4, 8), (0.01, 0.1, 0.5), (8, 32, 128)
MESSAGE_RANKS = (8, 16, 24, 32, 40)


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one shape.

    Args:
        op, model, shape, setting: for the table.
        run: the operation, compiled.
        twin: the same in pure torch.
        input_bytes: what GB/s counts.
        traffic: the least that must be read and written.
        in_place: how much of it is read and written again at the same place.
        rival, rival_name: what else it is compared with.
    """

    op: str
    model: str
    shape: str
    setting: str
    run: Callable[[], Any]
    twin: Callable[[], Any]
    input_bytes: int
    traffic: int
    rival: Callable[[], Any] | None = None
    rival_name: str = ""
    in_place: int = 0


def matrices(hidden: int) -> dict[str, tuple[int, int]]:
    """The gradients of a layer's weights on one tensor-parallel rank."""
    return {
        "qkv": (3 * hidden // TP, hidden),
        "dense": (hidden, hidden // TP),
        "h-4h": (4 * hidden // TP, hidden),
        "4h-h": (hidden, 4 * hidden // TP),
    }


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""An operation and its twin."""


def codec_cases(model: str, device: str, quick: bool) -> Iterator[Case]:
    """Quantisers on activations."""
    hidden = MODELS[model]
    x = torch.randn(SEQUENCE * MICRO_BATCH // TP, hidden, device=device)
    for bits in BITS:
        yield from _grid_cases(model, x, f"{bits} bits, group", Grid(bits))
        if not quick:
            yield from _scale_cases(model, x, f"{bits} bits, channel", Grid(bits, Layout.CHANNEL, hidden))
            yield from _scale_cases(model, x, f"{bits} bits, tensor", Grid(bits, Layout.TENSOR))


def _message(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    codes = torch.empty(grid.code_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(grid.scale_count(x.numel()), device=x.device)


def _encode(x: Tensor, grid: Grid, role: Role = Role.PLAIN, seed: int | None = None) -> Pair:
    codes, scales = _message(x, grid)
    other = None if role is Role.PLAIN else torch.zeros_like(x)
    return (
        lambda: ops.quantize_pack(x, codes, scales, grid, role, other, seed),
        lambda: reference.quantize_pack(x, other, codes, scales, grid, role, seed),
    )


def _decode(x: Tensor, grid: Grid, role: Role = Role.PLAIN) -> Pair:
    codes, scales = _message(x, grid)
    ops.quantize_pack(x, codes, scales, grid)
    out = torch.zeros_like(x)
    return (
        lambda: ops.unpack_dequantize(codes, scales, out, grid, role),
        lambda: reference.unpack_dequantize(codes, scales, None, out, grid, role),
    )


def _scale_cases(model: str, x: Tensor, setting: str, grid: Grid) -> Iterator[Case]:
    shape, size, message = f"{x.shape[0]} x {x.shape[1]}", nbytes(x), nbytes(*_message(x, grid))
    yield Case("quantize", model, shape, setting, *_encode(x, grid), size, size + message)
    yield Case("dequantize", model, shape, setting, *_decode(x, grid), size, size + message)


def _grid_cases(model: str, x: Tensor, setting: str, grid: Grid) -> Iterator[Case]:
    yield from _scale_cases(model, x, setting, grid)
    shape, size, message = f"{x.shape[0]} x {x.shape[1]}", nbytes(x), nbytes(*_message(x, grid))
    for role, name in ((Role.DELTA, "quantize, delta"), (Role.FEEDBACK, "quantize, feedback")):
        pair = _encode(x, grid, role)
        yield Case(name, model, shape, setting, *pair, size, 3 * size + message, in_place=2 * size)
    pair = _decode(x, grid, Role.ADD)
    yield Case("dequantize, add", model, shape, setting, *pair, size, 2 * size + message, in_place=2 * size)
    if grid.bits == 4:
        yield Case("quantize, stochastic", model, shape, setting, *_encode(x, grid, seed=7), size, size + message)
        rotated = dataclasses.replace(grid, rotation=64)
        yield Case("quantize, rotated", model, shape, setting, *_encode(x, rotated), size, size + message)


def message_cases(model: str, device: str, quick: bool) -> Iterator[Case]:
    """Optimus-CC's compressed backpropagation: an activation's gradient as two thin factors, and back (Fig. 14)."""
    x_nm = torch.randn(SEQUENCE * MICRO_BATCH // TP, MODELS[model], device=device)
    shape, size = f"{x_nm.shape[0]} x {x_nm.shape[1]}", nbytes(x_nm)
    for rank in MESSAGE_RANKS[1:2] if quick else MESSAGE_RANKS:
        codec, state, setting = LowRankCodec(LowRankConfig(rank)), CompressorState(), f"rank {rank}"
        payload = codec.encode(x_nm, state, 0)
        state.commit()
        sent = nbytes(payload.wire)
        yield Case(
            "low-rank compress", model, shape, setting, partial(codec.encode, x_nm, state, 0),
            partial(factors, x_nm, rank, _twin_basis), size, size + sent,
            partial(factors, x_nm, rank, gram_schmidt), "Gram-Schmidt by columns",
        )  # fmt: skip
        yield Case(
            "low-rank decompress", model, shape, setting,
            partial(codec.decode, payload, x_nm.shape, x_nm.dtype, state, 0),
            partial(product, payload.wire, x_nm.shape, rank), size, size + sent,
        )  # fmt: skip


def factors(x_nm: Tensor, rank: int, basis: Callable[[Tensor], Tensor]) -> Tensor:
    """A message of plain torch; two bases and two products, as the compiled one."""
    q_mr = basis(x_nm[:rank].T.contiguous())
    p_nr = basis(x_nm @ q_mr)
    return torch.cat([p_nr.flatten(), (x_nm.T @ p_nr).flatten()])


def product(wire: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """The matrix of a message's factors, in plain torch."""
    n, m = shape
    return wire[: n * rank].view(n, rank) @ wire[n * rank :].view(m, rank).T


def _twin_basis(x_nr: Tensor) -> Tensor:
    q_nr = torch.empty_like(x_nr)
    reference.orthonormalize(x_nr.unsqueeze(0), q_nr.unsqueeze(0))
    return q_nr


def gram_schmidt(x_nr: Tensor) -> Tensor:
    """Column by column, as PowerSGD's published codes have it."""
    q_nr = x_nr.clone()
    for i in range(q_nr.shape[1]):
        column = q_nr[:, i : i + 1]
        column /= torch.sqrt(torch.sum(column**2)) + 1e-8
        if i + 1 < q_nr.shape[1]:
            rest = q_nr[:, i + 1 :]
            rest -= torch.sum(column * rest, dim=0) * column
    return q_nr


def gradient_cases(model: str, device: str, quick: bool) -> Iterator[Case]:
    """Top-k, low rank, norm and entropy on gradients."""
    for name, (n, m) in matrices(MODELS[model]).items():
        if quick and name != "qkv":
            continue
        x_nm = torch.randn(n, m, device=device)
        shape, size = f"{name} {n} x {m}", nbytes(x_nm)
        for density in DENSITIES:
            yield from _choice_cases(model, x_nm.view(1, -1), shape, density)
        yield Case("finite_norm", model, shape, "", *_norm(x_nm), size, size)
        yield Case("histogram", model, shape, "every 4th, 1000 bins", *_histogram(x_nm), size // 4, size // 4)
        for rank in RANKS:
            yield from _rank_cases(model, x_nm.unsqueeze(0), rank)


def _choice_cases(model: str, x: Tensor, shape: str, density: float) -> Iterator[Case]:
    flat, count, setting = x.view(-1), int(density * x.numel()), f"{density:.0%}"
    chosen, packed = ops.abs_topk(x, count), torch.zeros(count, device=x.device)
    where, traffic = chosen.view(-1), nbytes(chosen, packed, packed)
    yield Case(
        "abs_topk", model, shape, setting, lambda: ops.abs_topk(x, count),
        lambda: reference.abs_topk(x, chosen.clone()), nbytes(x), nbytes(x, chosen),
        lambda: torch.topk(x.abs(), count, dim=1, sorted=False), "torch.topk",
    )  # fmt: skip
    twin = torch.empty_like(packed)
    yield Case(
        "gather", model, shape, setting, lambda: ops.gather_packed(flat, where),
        lambda: reference.gather_packed(flat, where, twin), nbytes(packed), traffic,
    )  # fmt: skip
    yield Case(
        "scatter-add", model, shape, setting, lambda: ops.scatter_add_packed(flat, where, packed),
        lambda: reference.scatter_add_packed(flat, where, packed), nbytes(packed), traffic + nbytes(packed),
        in_place=2 * nbytes(packed),
    )  # fmt: skip


def _rank_cases(model: str, m_knc: Tensor, rank: int) -> Iterator[Case]:
    p_knr = torch.randn(1, m_knc.shape[1], rank, device=m_knc.device)
    out, setting = torch.empty_like(p_knr), f"rank {rank}"
    yield Case(
        "orthonormalize", model, f"{p_knr.shape[1]} x {rank}", setting, lambda: ops.orthonormalize(p_knr),
        lambda: reference.orthonormalize(p_knr, out), nbytes(p_knr), 2 * nbytes(p_knr),
        lambda: gram_schmidt(p_knr[0]), "Gram-Schmidt by columns",
    )  # fmt: skip


def _norm(x: Tensor) -> Pair:
    out = torch.empty(2, dtype=torch.float64, device=x.device)
    return lambda: ops.finite_norm(x), lambda: reference.finite_norm(x, out)


def _histogram(x: Tensor) -> Pair:
    counts = torch.empty(1000, dtype=torch.int64, device=x.device)
    limits = torch.empty(2, dtype=torch.float64, device=x.device)
    return lambda: ops.sample_histogram(x, 4, 1000), lambda: reference.sample_histogram(x, 4, counts, limits)


def timed(run: Callable[[], Any], device: str, budget: float) -> float:
    """Median seconds of one run, over at least three and as many as the budget allows."""

    def once() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()  # what is imported, compiled or allocated at first
    first = once()
    if first > budget:
        return first
    return statistics.median(once() for _ in range(max(3, min(30, int(budget / max(first, 1e-6))))))


def measure(case: Case, device: str, budget: float) -> Row:
    """The case, its twin, its rival, and the passes over as many bytes that are its limit."""
    limit = _passes(case.traffic - case.in_place, case.in_place, device, budget)
    own, twin = timed(case.run, device, budget), timed(case.twin, device, budget)
    rival = timed(case.rival, device, budget) if case.rival is not None else 0.0
    return Row(
        case.op, case.model, case.shape, case.setting, case.input_bytes / own / 1e9, case.traffic / limit / 1e9,
        limit / own, twin / own, rival / own, case.rival_name,
    )  # fmt: skip


def _passes(copied: int, in_place: int, device: str, budget: float) -> float:
    """Seconds of copying some bytes (half of them read, half written), and of scaling others where they are."""
    elements = max(copied // 8, 1)
    source, target = torch.ones(elements, device=device), torch.empty(elements, device=device)
    seconds = timed(lambda: target.copy_(source), device, budget) * copied / (8 * elements)
    if in_place:
        scaled = torch.ones(max(in_place // 8, 1), device=device)
        seconds += timed(lambda: scaled.mul_(1.0), device, budget)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one gradient shape, scales of groups only")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU's kernels")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for each measurement")
    parser.add_argument("--out", type=Path, default=Path("bench_out/kernels"), help="folder of table and plot")
    options = parser.parse_args()
    unknown = [name for name in options.models.split(",") if name not in MODELS]
    if unknown:
        parser.error(f"--models: no model is named {unknown[0]!r}; the choices are {', '.join(MODELS)}")
    why = native.problem()
    if why is not None or options.device not in native.devices():
        parser.error(f"the kernels are not compiled for {options.device}: {why or 'build them where nvcc is'}")
    torch.set_num_threads(options.threads)
    name = (
        torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, {options.threads} threads"
    )
    rows: list[Row] = []
    print(ROWS, flush=True)
    for model in options.models.split(","):
        # What comes first pays for the processor's and the allocator's start: it is measured once more.
        measure(next(iter(codec_cases(model, options.device, options.quick))), options.device, 4 * options.budget)
        for cases in (codec_cases, message_cases, gradient_cases):
            for case in cases(model, options.device, options.quick):
                rows.append(measure(case, options.device, options.budget))
                print(line(rows[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text("\n".join([ROWS, *map(line, rows)]) + "\n")
    text = summary(kinds := kinds_of(rows))
    (options.out / "summary.md").write_text(text + "\n")
    (options.out / "rows.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    draw(kinds, options.out / "kernels.png", f"{name}, torch {torch.__version__}")
    print(f"\n{text}\n\nwritten to {options.out}")


if __name__ == "__main__":
    main()
