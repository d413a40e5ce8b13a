"""Throughput of the compressors' kernels, compared with a copy and their reference implementations in the same run.

    make bench-kernels                          on the CPU, or on a GPU if the CUDA kernels are built
    make bench-kernels ARGS="--models 2.5B --quick"

Shapes are those of Optimus-CC's models: activations of a micro-batch (s x b x h / TP) and the gradients of a layer's
matrices. GB/s counts the input's bytes. The limit is the time of the operation's minimum traffic (each input read once,
each output written once) at the speed of a copy, measured on as many bytes; operations in place are compared with
scaling in place, since a copy also fetches the memory that it overwrites. "Of limit" is the limit over the measured
time. For the timing method see device_clock.py. Prints Markdown tables, and writes them with every figure to --out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import parse_names
from benchmarks.device_clock import CallTimer, Time, clock_of
from benchmarks.kernel_cases import MODELS, KernelCase, combine_cases, gradient_cases, message_cases
from benchmarks.quantizer_cases import codec_cases, tile_cases
from benchmarks.report import Column, Table, device_name, header, write_record
from megatron.kernels import native

SECONDS = 0.3
"""Seconds of each measurement."""


@dataclass(frozen=True)
class KernelRow:
    """An operation on a shape.

    Args:
        op, model, shape, setting: names of the operation, of the shape and of its options.
        gbps, copy_gbps: rates of the input and of a copy, in GB/s.
        of_limit: time of a copy over the time of the operation.
        times_reference, times_rival: times of the reference implementation and of the rival over that of the operation.
        rival: name of the other implementation.
        seconds: time of the operation.
        traffic: minimum bytes that must be read and written.
        how: way in which the time was measured.
    """

    op: str
    model: str
    shape: str
    setting: str
    gbps: float
    copy_gbps: float
    of_limit: float
    times_reference: float
    times_rival: float
    rival: str
    seconds: float = 0.0
    traffic: int = 0
    how: str = ""


def _with_rival(ratio: str, rival: str) -> str:
    """Return a ratio to another implementation; empty without a rival."""
    return f"{ratio} x {rival}" if rival else ""


ROWS = Table(
    Column("operation", "op"),
    Column("model", "model"),
    Column("shape", "shape"),
    Column("setting", "setting"),
    Column("GB/s of input", "gbps", ".1f"),
    Column("copy GB/s", "copy_gbps", ".1f"),
    Column("of limit", "of_limit", ".2f"),
    Column("x reference", "times_reference", ".1f"),
    Column("x others", lambda row: _with_rival(f"{row['times_rival']:.1f}", row["rival"])),
)
SUMMARY = Table(
    Column("operation", "op"),
    Column("setting", "setting"),
    Column("GB/s of input", "gbps"),
    Column("of limit", "of_limit"),
    Column("x reference", "times_reference"),
    Column("x others", lambda row: _with_rival(row["times_rival"], row["rival"])),
)


def summarize(rows: Sequence[KernelRow]) -> str:
    """Return a table with a line for each operation and setting: ranges over models and shapes."""
    groups: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.setting), []).append(row)

    def span(group: Sequence[KernelRow], name: str, digits: int) -> str:
        values = [getattr(row, name) for row in group]
        low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
        return low if min(values) == max(values) else f"{low} to {high}"

    digits_by_name = {"gbps": 1, "of_limit": 2, "times_reference": 1, "times_rival": 1}
    lines: list[Mapping[str, Any]] = [
        {"op": op, "setting": setting, "rival": group[0].rival}
        | {name: span(group, name, digits) for name, digits in digits_by_name.items()}
        for (op, setting), group in groups.items()
    ]
    return SUMMARY.text(lines)


def measure(case: KernelCase, clock: CallTimer, device: str) -> KernelRow:
    """Measure a case, its reference implementation, its rival, and its limit: passes over as many bytes."""
    first = case.build()
    input_sets = [first, *(case.build() for _ in range(clock.sets(first.traffic) - 1))]
    limit = _limit_seconds(first.traffic - first.in_place, first.in_place, clock, device)
    time = clock.time([runs.run for runs in input_sets])
    reference = clock.time([runs.reference for runs in input_sets])
    rivals = [runs.rival for runs in input_sets if runs.rival is not None]
    rival = clock.time(rivals) if rivals else Time(0.0, "")
    seconds = time.seconds
    return KernelRow(
        case.op, case.model, case.shape, case.setting, first.input_bytes / seconds / 1e9, first.traffic / limit / 1e9,
        limit / seconds, reference.seconds / seconds, rival.seconds / seconds, case.rival_name,
        seconds, first.traffic, time.how,
    )  # fmt: skip


def _limit_seconds(copied: int, in_place: int, clock: CallTimer, device: str) -> float:
    """Time copying some bytes (half of them read, half written), and scaling others in place, in seconds."""
    elements = max(copied // 8, 1)
    pairs = [[torch.ones(elements, device=device) for _ in range(2)] for _ in range(clock.sets(8 * elements))]
    seconds = clock.time([partial(target.copy_, source) for source, target in pairs]).seconds * copied / (8 * elements)
    if in_place:
        elements = max(in_place // 8, 1)
        tensors = [torch.ones(elements, device=device) for _ in range(clock.sets(4 * elements))]
        seconds += clock.time([partial(x.mul_, 1.0) for x in tensors]).seconds
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help=f"comma-separated, of {', '.join(MODELS)} (all)")
    parser.add_argument("--quick", action="store_true", help="one gradient shape, scales of groups only")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the CPU's kernels (all cores)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/kernels"), help="folder of tables and figures")
    options = parser.parse_args()
    models = parse_names(parser, "--models", options.models, MODELS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = native.problem()
    if problem is not None or device not in native.devices():
        parser.error(f"the kernels are not compiled for {device}: {problem or 'build them on a machine with nvcc'}")
    torch.set_num_threads(options.threads)
    rows: list[KernelRow] = []
    print(ROWS.head(), flush=True)
    for model in models:
        # The first measurement includes the start-up of the processor and the allocator, so it is repeated.
        measure(next(codec_cases(model, device, options.quick)), clock_of(device, 4 * SECONDS), device)
        for cases in (codec_cases, tile_cases, message_cases, combine_cases, gradient_cases):
            for case in cases(model, device, options.quick):
                rows.append(measure(case, clock_of(device, SECONDS), device))
                print(ROWS.line(asdict(rows[-1])), flush=True)
    figures, summary = list(map(asdict, rows)), summarize(rows)
    write_record(options.out / "rows.json", header(device_name(device)), threads=options.threads, rows=figures)
    (options.out / "table.md").write_text(ROWS.text(figures) + "\n")
    (options.out / "summary.md").write_text(summary + "\n")
    print(f"\n{summary}\n\nwritten to {options.out}")


if __name__ == "__main__":
    main()
