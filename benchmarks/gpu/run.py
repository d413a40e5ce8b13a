"""All speeds on a GPU: training, 8-bit products, kernels, generation, slow networks; tables and JSON to a folder.

    make bench-gpu                                the most important rows of every section, in about eight minutes
    make bench-gpu ARGS="--minutes 30"            more rows
    make bench-gpu ARGS="--only train,kernels"    some sections
    make bench-gpu ARGS="--limit network=900"     another time limit for a section
    make bench-gpu ARGS="--device cpu"            toy sizes, to check that everything runs

Each section runs in its own process: if it hangs, crashes or runs out of memory, the report notes it, and the other
sections continue. The sections share --minutes, and each measures its most important rows first, since its time limit
may cut off the rest. Finished rows are kept while hardware, torch and sources stay the same: the same command continues
with the missing rows, and --again repeats all. Writes report.md, results.json and each section's log to --out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import parse_names
from benchmarks.gpu import machine
from benchmarks.gpu.section import NAMES, load_section, rows_path, run_section
from benchmarks.gpu.setting import Section, Setting
from benchmarks.report import Table, header, write_record
from benchmarks.rows import RowFile, earlier_rows, open_rows
from megatron.data.interrupt import interrupt_on_signals

SHORTEST_SECONDS = 30.0
"""Minimum time of a section; in less time it would not even start."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"comma-separated sections, of {', '.join(NAMES)} (all)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: toy sizes, to check that everything runs"
    )
    parser.add_argument("--again", action="store_true", help="repeat finished rows")
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="SECTION=SECONDS",
        help="time limit of a section, such as network=500, instead of its share of --minutes",
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="total time, which the sections share (8)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/gpu"), help="folder of tables, figures and logs")
    options = parser.parse_args(words)
    options.only = parse_names(parser, "--only", options.only, NAMES)
    options.limits = {}
    for word in options.limit:
        name, _, seconds = word.partition("=")
        if name not in NAMES or not seconds.isdecimal() or not 1 <= int(seconds) <= 86_400:
            parser.error(f"--limit {word}: write SECTION=SECONDS, such as network=500")
        options.limits[name] = float(seconds)
    if not 1 <= options.minutes <= 1440:
        parser.error(f"--minutes {options.minutes:g}: give 1 to 1440")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; --device cpu runs toy sizes")
    return options


def heading(record_header: Mapping[str, Any]) -> str:
    """Return the report's heading: hardware, versions, date."""
    gib = float(record_header["memory_bytes"]) / 2**30
    memory = f", {gib:.0f} GiB" if gib else ""
    return "\n".join(
        [
            "# GPU benchmark",
            "",
            f"- {record_header['device']}{memory}, driver {record_header['driver']}; {record_header['cpus']} processor"
            " cores",
            f"- {record_header['date']}; torch {record_header['torch']}, CUDA {record_header['cuda']}, NCCL"
            f" {record_header['nccl']}",
            f"- git commit {record_header['commit']}; sources {record_header['sources']}",
            f"- a large copy moves {record_header['copy_bytes_per_s'] / 1e9:,.0f} GB/s, read and written; a large bf16"
            f" product computes {record_header['product_flops'] / 1e12:,.1f} TFLOP/s, the peak is"
            f" {record_header['peak_flops'] / 1e12:,.1f}",
        ]
    )


def section_report(section: Section, file: RowFile, order: Sequence[str]) -> str:
    """Return a table of a section's finished rows, and the reasons for missing rows."""
    rows = [file.rows[key] for key in order if key in file.rows]
    lines = [f"## {section.TITLE}", "", section.NOTE, ""]
    if rows:
        lines += [Table(*section.COLUMNS).without_empty_columns(rows).text(rows), ""]
    keys_by_reason: dict[str, list[str]] = {}
    for key in order:
        if key not in file.rows:
            keys_by_reason.setdefault(file.failures.get(key, "not requested"), []).append(key)
    for reason, keys in keys_by_reason.items():
        named = "; ".join(keys) if len(keys) <= 3 else f"{len(keys)} rows, the first {keys[0]}"
        lines.append(f"Not measured ({named}): {reason}.")
    return "\n".join(lines).rstrip()


def write(out: Path, record_header: dict[str, object], files: dict[str, RowFile], setting: Setting) -> None:
    """Write the report and the results."""
    sections = {name: load_section(name) for name in files}
    texts = [section_report(section, files[name], section.keys(setting)) for name, section in sections.items()]
    (out / "report.md").write_text("\n\n".join([heading(record_header), *texts]) + "\n")
    results = {name: {"rows": file.rows, "failures": file.failures} for name, file in files.items()}
    write_record(out / "results.json", record_header, sections=results)


def section_limit(names: Sequence[str], limits: Mapping[str, float], seconds: float) -> float:
    """Return the time limit of the next section: its share of the remaining time.

    Args:
        names: names of the sections with missing rows, the next section first.
        limits: limits from the command line.
        seconds: remaining time of all sections.
    """
    if names[0] in limits:
        return limits[names[0]]
    weights = {name: load_section(name).WEIGHT for name in names if name not in limits}
    shared = seconds - sum(limits[name] for name in names if name in limits)
    return max(SHORTEST_SECONDS, shared * weights[names[0]] / sum(weights.values()))


def measure(options: argparse.Namespace) -> dict[str, RowFile]:
    """Run the sections in order; write the report anew after each."""
    end = math.inf if options.device == "cpu" else time.monotonic() + 60 * options.minutes
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    figures = machine.probe(options.device)
    record_header = {**header(str(figures["device"])), **figures}
    dependencies = {key: str(record_header[key]) for key in ("device", "torch", "cuda", "sources")}
    copy_rate, peak = (float(str(figures[key])) for key in ("copy_bytes_per_s", "peak_flops"))
    setting = Setting(options.device, out, copy_rate, peak)
    print(heading(record_header).partition("\n\n")[2], flush=True)
    files: dict[str, RowFile] = {}
    for name in NAMES:
        path = rows_path(out, name)
        if name in options.only:
            files[name] = open_rows(path, dependencies, options.again)
        elif (earlier := earlier_rows(path, dependencies)).rows:  # other sections stay in the report
            files[name] = earlier
    keys = {name: load_section(name).keys(setting) for name in options.only}
    with tqdm(total=sum(map(len, keys.values())), unit="row", mininterval=1.0) as bar:
        for number, name in enumerate(options.only):
            later = [other for other in options.only[number + 1 :] if {*keys[other]} - files[other].rows.keys()]
            limit = section_limit([name, *later], options.limits, end - time.monotonic())
            files[name] = run_section(name, setting, keys[name], files[name], limit, bar)
            write(out, record_header, files, setting)
    return {name: files[name] for name in options.only}


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    try:
        with interrupt_on_signals():
            files = measure(options)
    except KeyboardInterrupt:
        print("bench-gpu: interrupted; finished rows are kept", file=sys.stderr)
        return 130
    except (OSError, RuntimeError) as error:
        print(f"bench-gpu: error: {error}", file=sys.stderr)
        return 1
    for name, file in files.items():
        reasons = list(dict.fromkeys(file.failures.values()))
        print(f"{name}: {len(file.rows)} rows" + (f"; {len(file.failures)} missing: {reasons[0]}" if reasons else ""))
    print(f"written to {options.out / 'report.md'} and results.json")
    return 1 if any(file.failures for file in files.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
