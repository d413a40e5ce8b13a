"""Training speed of a single process compared with Hugging Face's models on equal work.

    make bench-train                          the whole table
    make bench-train ARGS="--only experts"    a part: steps (GPT-2) or experts (Mixtral)
    make bench-train ARGS="--no-compiled"     without the peers that torch compiles
    make bench-train ARGS="--quick"           a smoke run on tiny shapes

Each side runs in its own process, and the sides take turns, so both see the same state of the machine; ratios are
medians over pairs. Both sides do equal work: the same shape, vocabulary, dropout 0, AdamW (torch's fused), clipping,
number of threads, and precision (fp32, or bf16, for which the peers use autocast). GPT-2 is compared with Hugging
Face's, eager and compiled by torch.compile, and models with experts with Mixtral. Rates are medians over the steps
after a warm-up, during which torch compiles.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import parse_names
from benchmarks.comparison import COLUMNS, StepComparison
from benchmarks.models import Shape
from benchmarks.report import Table, device_name, header, write_record
from benchmarks.rows import RowFile, RowLog
from benchmarks.steps import COMPILED
from benchmarks.turns import in_turns, timed

SHAPES = {
    "steps": [
        Shape(4, 256, 256, 8),
        Shape(8, 512, 512, 4),
        Shape(12, 768, 1024, 1),
        Shape(4, 256, 256, 1),
        Shape(6, 512, 512, 2, vocab=50304),
    ],
    "experts": [
        Shape(4, 256, 256, 8, vocab=32000, llama=True, ffn=896, groups=2, experts=8),
        Shape(4, 512, 512, 2, vocab=32000, llama=True, ffn=1792, groups=4, experts=8),
    ],
}
QUICK_SHAPES = {
    "steps": [Shape(2, 128, 32, 2, vocab=128)],
    "experts": [Shape(2, 128, 32, 2, vocab=128, llama=True, ffn=256, groups=1, experts=4)],
}
PRECISIONS = ("fp32", "bf16")
PEER = "hugging-face"


def peak_rate(precision: str, size: int, device: str) -> float:
    """Measure the best rate of a square matrix product, FLOP/s."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / in_turns(partial(timed, lambda: a @ b, device), turns=6).best()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes and two steps, as a test")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side (5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side (all cores)")
    parser.add_argument("--only", help=f"comma-separated parts, of {', '.join(SHAPES)} (all)")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="precision of the steps (both); bf16 is very slow on a processor without instructions for it",
    )
    parser.add_argument("--no-compiled", action="store_true", help="leave out the peers that torch compiles")
    parser.add_argument("--out", type=Path, default=Path("bench_out/train"), help="folder of the figures")
    options = parser.parse_args(words)
    part_names = parse_names(parser, "--only", options.only, SHAPES)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    log = RowLog(options.out / "rows.jsonl")
    log.path.unlink(missing_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 256 if options.quick else 8192 if device == "cuda" else 2048
    precisions = (options.precision,) if options.precision else PRECISIONS
    peaks = {precision: peak_rate(precision, size, device) for precision in precisions}
    measured = RowFile()
    for group in part_names:
        peers = [PEER, PEER + COMPILED] if group == "steps" and not options.no_compiled else [PEER]
        for shape in (QUICK_SHAPES if options.quick else SHAPES)[group]:
            for precision, peak in peaks.items():
                steps = 2 if options.quick else options.steps
                StepComparison(shape, precision, options.threads, device, peak, log, turns=steps).measure(peers)
                measured.read(log.path)
                for key, reason in measured.failures.items():
                    fix = "; --no-compiled leaves compiled peers out" if key.endswith(COMPILED) else ""
                    print(f"error: {reason}{fix}", file=sys.stderr)
                    return 1
                print(f"{shape.name} {precision}", file=sys.stderr, flush=True)
    rows = list(measured.rows.values())
    peaks_text = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in peaks.items())
    print(f"Measured peak of a matrix product: {peaks_text}.\n\n{Table(*COLUMNS).text(rows)}")
    write_record(options.out / "rows.json", header(device_name(device)), peaks=peaks, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
