"""Throughput of the compressors' kernels, beside a plain copy and their pure-torch twins in the same run.

    make bench-kernels                          on the CPU, or on a GPU where the CUDA kernels are built
    make bench-kernels ARGS="--models 2.5B --quick"

Shapes are those of Optimus-CC's models: activations of one micro-batch (s x b x h / TP) and the gradients of a layer's
matrices. GB/s counts the input's bytes. The limit is the time that the operation's smallest possible traffic (each
input read once, each output written once) would take at a copy's speed, measured on as many bytes; what is changed in
place is compared with scaling as many numbers in place, since a copy also fetches the memory that it overwrites. "Of
limit" is that over the measured time. device_clock.py says how times are taken. Prints Markdown and writes it with a
plot.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks import chosen
from benchmarks.device_clock import CallTimer, Time, clock_of
from benchmarks.kernel_cases import MODELS, KernelCase, codec_cases, gradient_cases, message_cases
from benchmarks.kernel_table import ROWS, Row, draw, kinds_of, summary
from benchmarks.record import device_name, header, write_record
from benchmarks.row_cases import row_cases
from benchmarks.tile_cases import tile_cases
from megatron.kernels import native


def measure(case: KernelCase, clock: CallTimer, device: str) -> Row:
    """Measures a case, its twin, its rival, and the passes over as many bytes that are its limit."""
    sets = [case.build()]
    one = sets[0]
    sets += [case.build() for _ in range(clock.sets(one.traffic) - 1)]
    limit = _passes(one.traffic - one.in_place, one.in_place, clock, device)
    own, twin = clock.time([runs.run for runs in sets]), clock.time([runs.twin for runs in sets])
    rivals = [runs.rival for runs in sets if runs.rival is not None]
    rival = clock.time(rivals) if rivals else Time(0.0, "")
    seconds = own.seconds
    return Row(
        case.op, case.model, case.shape, case.setting, one.input_bytes / seconds / 1e9, one.traffic / limit / 1e9,
        limit / seconds, twin.seconds / seconds, rival.seconds / seconds, case.rival_name,
        seconds, one.traffic, own.how,
    )  # fmt: skip


def _passes(copied: int, in_place: int, clock: CallTimer, device: str) -> float:
    """Times copying some bytes (half of them read, half written), and scaling others in place, in seconds."""
    elements = max(copied // 8, 1)
    ends = [[torch.ones(elements, device=device) for _ in range(2)] for _ in range(clock.sets(8 * elements))]
    seconds = clock.time([partial(target.copy_, source) for source, target in ends]).seconds * copied / (8 * elements)
    if in_place:
        elements = max(in_place // 8, 1)
        scaled = [torch.ones(elements, device=device) for _ in range(clock.sets(4 * elements))]
        seconds += clock.time([partial(x.mul_, 1.0) for x in scaled]).seconds
    return seconds


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Writes tables, figures and the plot."""
    out, kinds, plain = options.out, kinds_of(rows), [asdict(row) for row in rows]
    write_record(out / "rows.json", header(device_name(options.device)), threads=options.threads, rows=plain)
    (out / "table.md").write_text(ROWS.text(plain) + "\n")
    (out / "summary.md").write_text(summary(kinds) + "\n")
    name = device_name("cuda") if options.device == "cuda" else f"{platform.machine()}, {options.threads} threads"
    draw(kinds, out / "kernels.png", f"{name}, torch {torch.__version__}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one gradient shape, scales of groups only")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU's kernels")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for each measurement")
    parser.add_argument("--out", type=Path, default=Path("bench_out/kernels"), help="folder of table and plot")
    options = parser.parse_args()
    models = chosen(parser, "--models", options.models, MODELS)
    why = native.problem()
    if why is not None or options.device not in native.devices():
        parser.error(f"the kernels are not compiled for {options.device}: {why or 'build them where nvcc is'}")
    torch.set_num_threads(options.threads)
    device, rows = options.device, list[Row]()
    print(ROWS.head(), flush=True)
    for model in models:
        # What comes first pays for the processor's and the allocator's start: it is measured once more.
        measure(next(codec_cases(model, device, options.quick)), clock_of(device, 4 * options.budget), device)
        for cases in (codec_cases, tile_cases, message_cases, row_cases, gradient_cases):
            for case in cases(model, device, options.quick):
                rows.append(measure(case, clock_of(device, options.budget), device))
                print(ROWS.line(asdict(rows[-1])), flush=True)
    write(rows, options)
    print(f"\n{summary(kinds_of(rows))}\n\nwritten to {options.out}")


if __name__ == "__main__":
    main()
