"""Section kernels: the operations of bench_kernels at the sizes that figures are wanted for, in fp32 and bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from benchmarks.device_clock import clock_of
from benchmarks.gpu.setting import Claim, Setting
from benchmarks.kernel_cases import (
    MODELS,
    RANKS,
    KernelCase,
    basis_case,
    choice_cases,
    float8_cases,
    grid_cases,
    matrices,
    norm_cases,
    residual_case,
)
from benchmarks.kernels import measure as measure_case
from benchmarks.row_cases import row_cases
from benchmarks.rows import RowLog
from benchmarks.tables import Cells, Column
from megatron.kernels import native

TITLE = "Kernels"
NOTE = (
    "Times are the device's own: events around replays of a graph over sets of inputs that are together four times as"
    " large as the L2, or (timed by: events) around single calls with the L2 overwritten in between. Traffic is the"
    " least that the operation must move. Of a copy: the time of a copy of as many bytes (of scaling, for what is"
    " changed in place) over the operation's. The limit is the traffic at the rate of a large copy. x twin, x others:"
    " their time over ours."
)
COLUMNS = (
    Column("operation", "op"),
    Column("model", "model"),
    Column("shape", "shape"),
    Column("setting", "setting"),
    Column("us", "us", ",.1f"),
    Column("GB/s of traffic", "gbps", ",.0f"),
    Column("limit, us", "limit", ",.1f"),
    Column("measured/limit", "of_limit", ".2f"),
    Column("of a copy", "of_copy", ".2f"),
    Column("x twin", "times_twin", ".1f"),
    Column("x others", "times_rival", ".1f"),
    Column("others", "rival"),
    Column("timed by", "how"),
)
WEIGHT = 7.0
PATIENCE_SECONDS = 25.0
BUDGET = {"cuda": 0.02, "cpu": 0.0}
"""Seconds of each measurement of a case."""

ACTIVATIONS = {"8.3B": (1024, 3072), "": (1024, 32768)}
BITS, ODD_BITS = (2, 4, 8), (1, 3, 5, 6, 7)
ELEMENTS = (4_000_000, 16_000_000, 100_000_000)
DENSITIES = (0.01, 0.1, 0.5)
WANTED = {
    "quantize": 0.85,
    "dequantize": 0.85,
    "quantize, delta": 0.9,
    "quantize, feedback": 0.9,
    "dequantize, add": 0.9,
    "quantize, stochastic": 0.7,
    "quantize, rotated": 0.6,
    "finite_norm": 0.85,
    "histogram": 0.6,
}


def qr(x_nr: Tensor) -> object:
    """Orthonormal bases by torch's QR decomposition."""
    return torch.linalg.qr(x_nr)


def cases(setting: Setting) -> Iterator[KernelCase]:
    """The cases of a device, those that most runs use first; a toy's are fewer."""
    device = setting.device
    toy = setting.toy
    activations = {"toy": (8, 128)} if toy else ACTIVATIONS
    dtypes = (torch.float32, torch.bfloat16)
    for model, size in activations.items():
        for dtype in dtypes:
            for bits in (4,) if toy else BITS:
                yield from grid_cases(model, size, bits, device, dtype)
            yield from norm_cases(model, f"{size[0]} x {size[1]}", size, device, dtype)
    for model in ("2.5B",) if toy else MODELS:
        for dtype in dtypes:
            yield from row_cases(model, device, dtype=dtype)
    for elements in (1000,) if toy else ELEMENTS:
        for density in DENSITIES:
            yield next(choice_cases("", f"{elements:,}", elements, density, device))  # the others are torch's size
    yield from _rank_cases({"toy": 64} if toy else MODELS, (8,) if toy else RANKS, device)
    for model, size in activations.items():
        for dtype in dtypes:
            yield from float8_cases(model, size, device, dtype)
            for bits in () if toy else ODD_BITS:
                yield from grid_cases(model, size, bits, device, dtype, plain=True)


def _rank_cases(models: Mapping[str, int], ranks: Sequence[int], device: str) -> Iterator[KernelCase]:
    for model, hidden in models.items():
        sizes = matrices(hidden)
        for rank in ranks:
            for n in sorted({n for size in sizes.values() for n in size if n >= rank}):
                yield basis_case(model, n, rank, device, qr, "torch.linalg.qr")
            for name, size in sizes.items():
                yield residual_case(model, f"{name} {size[0]} x {size[1]}", size, rank, device)


def key_of(case: KernelCase) -> str:
    """The key of a row."""
    return f"{case.op}, {case.model}, {case.shape}, {case.setting}"


def keys(setting: Setting) -> list[str]:
    """Keys of all operations of a device."""
    return [key_of(case) for case in cases(setting)]


def measure(setting: Setting, wanted: Sequence[str], report: RowLog) -> None:
    """Measures each operation, its twin, and its rival."""
    why = native.problem()
    if why is not None or setting.device not in native.devices():
        raise SystemExit(f"the kernels are not compiled for {setting.device}: {why or 'build them where nvcc is'}")
    chosen = set(wanted)
    clock = clock_of(setting.device, BUDGET[setting.device])
    for case in cases(setting):
        key = key_of(case)
        if key not in chosen:
            continue
        report.begin(key)
        row = measure_case(case, clock, setting.device)
        limit = row.traffic / setting.copy_bytes_per_s
        own = {"us": 1e6 * row.seconds, "gbps": row.traffic / row.seconds / 1e9, "limit": 1e6 * limit}
        own |= {"of_limit": limit / row.seconds, "of_copy": row.of_limit}
        report.row(key, **{**asdict(row), **own, "times_rival": row.times_rival if row.rival else None})


def tidy() -> None:
    """Does nothing: a killed section leaves nothing."""


def claims(rows: Mapping[str, Cells]) -> list[Claim]:
    """Claims: shares of a copy's rate, and multiples of others' rates."""

    def of(what: str, key: str, op: str, least: float) -> Iterator[Claim]:
        values = tuple(cells[key] for cells in rows.values() if cells["op"] == op)
        if values:
            yield Claim(f"kernels, {what}", least, values)

    made = [claim for op, least in WANTED.items() for claim in of(f"{op}: of a copy", "of_copy", op, least)]
    times = partial(of, key="times_rival")
    made += times("abs_topk: x torch.topk", op="abs_topk", least=5.0)
    made += times("orthonormalize: x torch.linalg.qr", op="orthonormalize", least=10.0)
    made += of("orthonormalize: x twin", "times_twin", "orthonormalize", 1.0)
    made += of("M - P Q^T (torch's baddbmm): x product and difference", "times_twin", "M - P Q^T", 1.0)
    return made
