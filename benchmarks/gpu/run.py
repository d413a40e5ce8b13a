"""All speeds on a GPU in one run: training, kernels, generation, slow networks; tables and JSON to a folder.

    make bench-gpu                                the most important rows of every section, in about eight minutes
    make bench-gpu ARGS="--minutes 30"            more of them
    make bench-gpu ARGS="--only train,kernels"    some sections
    make bench-gpu ARGS="--limit network=900"     a section with more time than its share
    make bench-gpu ARGS="--device cpu"            toy sizes: does it run?

Every section runs in a process of its own; one that hangs, crashes or runs out of memory is reported as such, and the
others go on. The sections share the --minutes of the call, and each measures its most important rows first: its time
limit may cut the others. Finished rows are kept, as long as the hardware, torch and the sources stay the same: the same
command goes on with those that are missing, --again measures all anew. Writes report.md, results.json and each
section's log to --out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import chosen
from benchmarks.gpu import machine, report
from benchmarks.gpu.run_section import run_section
from benchmarks.gpu.section import NAMES, path_of, section_of
from benchmarks.gpu.setting import Setting
from benchmarks.record import header, made_by, write_record
from benchmarks.rows import Book, kept, opened
from megatron.data.interrupt import stopped_in_order

SHORTEST_SECONDS = 30.0
"""What a section gets even where nothing is left: less would not even start it."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help=f"comma-separated sections, of {', '.join(NAMES)}")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: toy sizes, to see that everything runs"
    )
    parser.add_argument("--again", action="store_true", help="measure finished rows anew")
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="SECTION=SECONDS",
        help="time limit of a section, such as network=500, instead of its share of the call's time",
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time of the whole call, which the sections share (8)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench_out/gpu"), help="folder of tables, figures and logs")
    options = parser.parse_args(words)
    options.only = chosen(parser, "--only", options.only, NAMES)
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


def write(out: Path, made_with: dict[str, object], books: dict[str, Book], setting: Setting) -> str:
    """Writes the report and the results; returns the claims that were measured."""
    parts, claims, results = [report.heading(made_with)], [], {}
    for name, book in books.items():
        section = section_of(name)
        parts.append(report.table(section, book, section.keys(setting)))
        claims += section.claims(book.rows)
        results[name] = {"rows": book.rows, "failures": book.failures}
    claims = report.merged(claims)
    closing = report.wanted(claims) if claims and not setting.toy else ""
    parts += [closing] if closing else []
    (out / "report.md").write_text("\n\n".join(parts) + "\n")
    values = [{"what": c.what, "at_least": c.least, "measured": c.values, "met": c.met} for c in claims]
    write_record(out / "results.json", made_with, sections=results, wanted=values)
    return closing


def limit_of(names: Sequence[str], given: Mapping[str, float], seconds: float) -> float:
    """The time limit of the first of the sections that are left: its share of the time that is left.

    Args:
        names: names of the sections with missing rows.
        given: the limits that the command line has, which are no shares.
        seconds: time left for all of them.
    """
    if names[0] in given:
        return given[names[0]]
    weights = {name: section_of(name).WEIGHT for name in names if name not in given}
    free = seconds - sum(given[name] for name in names if name in given)
    return max(SHORTEST_SECONDS, free * weights[names[0]] / sum(weights.values()))


def measure(options: argparse.Namespace) -> tuple[str, dict[str, Book]]:
    """Runs the sections one after another; writes the report anew after each."""
    # Toys show that everything runs.
    end = math.inf if options.device == "cpu" else time.monotonic() + 60 * options.minutes
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found = machine.probe(options.device)
    made_with = {**header(str(found["device"])), **found}
    copied, peak = (float(str(found[key])) for key in ("copy_bytes_per_s", "peak_flops"))
    setting = Setting(options.device, out, copied, peak)
    print(report.heading(made_with).partition("\n\n")[2], flush=True)
    books: dict[str, Book] = {}
    for name in NAMES:
        path = path_of(out, name)
        if name in options.only:
            books[name] = opened(path, made_by(made_with), options.again)
        elif (earlier := kept(path, made_by(made_with))).rows:  # stay in the report
            books[name] = earlier
    rows = {name: section_of(name).keys(setting) for name in options.only}
    closing = ""
    with tqdm(total=sum(map(len, rows.values())), unit="row", mininterval=1.0) as bar:
        for number, name in enumerate(options.only):
            later = [other for other in options.only[number + 1 :] if {*rows[other]} - books[other].rows.keys()]
            limit = limit_of([name, *later], options.limits, end - time.monotonic())
            books[name] = run_section(name, setting, rows[name], books[name], limit, bar)
            closing = write(out, made_with, books, setting)
    return closing, {name: books[name] for name in options.only}


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    try:
        with stopped_in_order():
            closing, books = measure(options)
    except KeyboardInterrupt:
        print("bench-gpu: interrupted; finished rows are kept", file=sys.stderr)
        return 130
    except (OSError, RuntimeError) as error:
        print(f"bench-gpu: error: {error}", file=sys.stderr)
        return 1
    for name, book in books.items():
        reasons = list(dict.fromkeys(book.failures.values()))
        print(f"{name}: {len(book.rows)} rows" + (f"; {len(book.failures)} missing: {reasons[0]}" if reasons else ""))
    print(f"{closing}\n\nwritten to {options.out / 'report.md'} and results.json".lstrip())
    return 1 if any(book.failures for book in books.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
