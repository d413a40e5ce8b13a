"""Section kernels: the operations of bench-kernels at large sizes, in fp32 and bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from benchmarks.device_clock import clock_of
from benchmarks.gpu.setting import Setting
from benchmarks.kernel_cases import (
    DENSITIES,
    MODELS,
    RANKS,
    KernelCase,
    basis_case,
    choice_cases,
    combine_cases,
    matrices,
    norm_cases,
)
from benchmarks.kernels import ROWS
from benchmarks.kernels import measure as measure_case
from benchmarks.quantizer_cases import float8_cases, grid_cases
from benchmarks.report import Column
from benchmarks.rows import RowLog
from megatron.kernels import native

TITLE = "Kernels"
NOTE = (
    "Times are the device's own: events around replays of a graph over input sets that are together four times as"
    " large as the L2, or (timed by: events) around single calls with the L2 overwritten in between. Traffic is the"
    " least that the operation must move; the limit is a copy of as many bytes (scaling, for operations in place)."
    " x reference, x others: their time over ours."
)
COLUMNS = (*ROWS.columns, Column("us", "us", ",.1f"), Column("timed by", "how"))
WEIGHT = 7.0
PATIENCE_SECONDS = 25.0
SECONDS = {"cuda": 0.02, "cpu": 0.0}
"""Seconds of each measurement of a case."""

ACTIVATIONS = {"8.3B": (1024, 3072), "": (1024, 32768)}
BITS, ODD_BITS = (2, 4, 8), (1, 3, 5, 6, 7)
ELEMENTS = (4_000_000, 16_000_000, 100_000_000)


def cases(setting: Setting) -> Iterator[KernelCase]:
    """Return the cases of a device, the most common operations first; fewer for a toy."""
    device, toy = setting.device, setting.toy
    activations = {"toy": (8, 128)} if toy else ACTIVATIONS
    dtypes = (torch.float32, torch.bfloat16)
    for model, size in activations.items():
        for dtype in dtypes:
            for bits in (4,) if toy else BITS:
                yield from grid_cases(model, size, bits, device, dtype)
            yield from norm_cases(model, f"{size[0]} x {size[1]}", size, device, dtype)
    for model in ("2.5B",) if toy else MODELS:
        for dtype in dtypes:
            yield from combine_cases(model, device, dtype=dtype)
    for elements in (1000,) if toy else ELEMENTS:
        for density in DENSITIES:
            yield next(choice_cases("", f"{elements:,}", elements, density, device))  # Top-K alone
    for model, hidden in ({"toy": 64} if toy else MODELS).items():
        sizes = sorted({n for size in matrices(hidden).values() for n in size})
        for rank in (8,) if toy else RANKS:
            for n in sizes:
                if n >= rank:
                    yield basis_case(model, n, rank, device, torch.linalg.qr, "torch.linalg.qr")
    for model, size in activations.items():
        for dtype in dtypes:
            yield from float8_cases(model, size, device, dtype)
            for bits in () if toy else ODD_BITS:
                yield from grid_cases(model, size, bits, device, dtype, plain=True)


def key_of(case: KernelCase) -> str:
    return f"{case.op}, {case.model}, {case.shape}, {case.setting}"


def keys(setting: Setting) -> list[str]:
    """Keys of all operations of a device."""
    return [key_of(case) for case in cases(setting)]


def measure(setting: Setting, row_keys: Sequence[str], log: RowLog) -> None:
    """Measure each operation, its reference implementation, and its rival."""
    problem = native.problem()
    if problem is not None or setting.device not in native.devices():
        raise SystemExit(
            f"the kernels are not compiled for {setting.device}: {problem or 'build them on a machine with nvcc'}"
        )
    clock = clock_of(setting.device, SECONDS[setting.device])
    for case in cases(setting):
        key = key_of(case)
        if key not in row_keys:
            continue
        log.begin(key)
        row = measure_case(case, clock, setting.device)
        log.row(key, **asdict(row), us=1e6 * row.seconds)
