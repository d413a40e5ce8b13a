"""Training speed of one process beside Hugging Face's GPT-2, and the overhead of each kind of parallelism.

    make bench-train                         the whole table
    make bench-train ARGS="--no-compiled"    without the peers that torch compiles
    make bench-train ARGS="--quick"          a smoke run on tiny shapes

Each side runs in its own process, which steps when it is told to: the sides take turns, so both see the same state
of the machine, and the ratio is taken pair by pair. Equal work on both sides: shapes, vocabulary, dropout 0, AdamW
(torch's fused one), clipping, number of threads, precision: fp32, or bf16, in which the peers run under autocast. GPT-2
has two peers, Hugging Face's model as it is (eager) and compiled by torch.compile. Rates are medians over the steps
after a warm-up, during which torch compiles. The whole program, pretrain_gpt.py by its log, is measured beside a plain
script around each of these two peers in the same way, run by run.
Models with experts are measured beside Hugging Face's Mixtral in the same precision.
Where this library has fp32 products of its own, those of each layer are measured beside torch's.
Steps of sequences that a curriculum has cut to half their length are measured beside whole ones, and steps of BERT and
T5 beside those of a GPT of the same shape, by their time for an operation that the model needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import products
from benchmarks.program import compare_programs
from benchmarks.record import device_name, header, write_record
from benchmarks.runs import free_port
from benchmarks.tables import Cells, Column, Table
from benchmarks.train_sides import Shape
from benchmarks.train_steps import process_step, rank_step, run_config
from benchmarks.turns import Side, SideError, in_turns, step_together, timed
from megatron.config.model_types import ModelType
from megatron.kernels import products as own_products
from megatron.training.flops import model_flops_per_sample
from megatron.training.report import model_shape

SHAPES = [
    Shape(4, 256, 256, 8),
    Shape(8, 512, 512, 4),
    Shape(12, 768, 1024, 1),
    Shape(4, 256, 256, 1),
    Shape(6, 512, 512, 2, vocab=50304),
]
PROGRAMS = [Shape(4, 256, 256, 8, vocab=50304), Shape(6, 512, 512, 2, vocab=50304)]
MIXTURES = [
    Shape(4, 256, 256, 8, vocab=32000, llama=True, ffn=896, groups=2, experts=8),
    Shape(4, 512, 512, 2, vocab=32000, llama=True, ffn=1792, groups=4, experts=8),
]
PRECISIONS = ("fp32", "bf16")
COMPILED = "hugging-face compiled"
QUICK = [Shape(2, 128, 32, 2, vocab=128)]


def peak_rate(precision: str, quick: bool, device: str) -> float:
    """Measures the best rate of a square matrix product, FLOP/s.

    Args:
        precision: fp32 or bf16.
        quick: whether to use a small model.
        device: torch's name of the device.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    n = 256 if quick else 8192 if device == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / in_turns(partial(timed, lambda: a @ b, device), turns=6).best()


def compare(
    shape: Shape, precision: str, threads: int, steps: int, peak: float, device: str, compiled: bool
) -> dict[str, Any]:
    """Measures this project against Hugging Face's model in the same precision, eager and perhaps compiled."""
    step = partial(process_step, shape=shape, precision=precision, threads=threads, device=device)
    sides = [Side(kind, partial(step, kind), device) for kind in ("ours", "hugging-face")]
    if compiled:
        sides.append(Side(COMPILED, partial(step, "hugging-face", compiled=True), device))
    turns = in_turns(*(side.step for side in sides), turns=steps, warm=2)
    memory = [side.close() for side in sides]
    tokens = shape.samples * shape.seq
    row = {
        "shape": shape.name,
        "precision": precision,
        "tokens_per_second": tokens / turns.median(),
        "hugging_face_tokens_per_second": tokens / turns.median(1),
        "ratio": turns.ratio(),
        "rate_over_peak": shape.flops() / turns.median() / peak,
        "memory_bytes": memory[0],
        "hugging_face_memory_bytes": memory[1],
    }
    if compiled:
        row |= {"compiled_tokens_per_second": tokens / turns.median(2), "compiled_ratio": turns.ratio(2)}
        row["compiled_memory_bytes"] = memory[2]
    return row


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor-parallel 2": {"tensor_model_parallel_size": 2},
    "pipeline 2, two micro-batches": {"pipeline_model_parallel_size": 2},
    "data-parallel 2": {},
    "data-parallel 2, sharded optimizer": {"use_distributed_optimizer": True},
}


def overhead(shape: Shape, steps: int) -> list[dict[str, Any]]:
    """Measures two processes of one thread against one of two threads, with the same global batch, in turns."""
    single = Side("ours", partial(process_step, "ours", shape, "fp32", 2))
    rows = []
    for name, parallel in LAYOUTS.items():
        port = free_port()
        ranks = [Side(f"rank {rank}", partial(rank_step, rank, port, shape, parallel)) for rank in range(2)]
        turns = in_turns(single.step, partial(step_together, ranks), turns=steps, warm=2)
        for rank in reversed(ranks):  # the first one holds the rendezvous
            rank.close()
        seconds = {"seconds": turns.median(1), "one_process_seconds": turns.median()}
        rows.append({"layout": name, "shape": shape.name, **seconds, "overhead": turns.ratio() - 1})
    single.close()
    return rows


def half_length(shape: Shape, threads: int, steps: int, device: str) -> dict[str, Any]:
    """Measures steps of half the sequence length against whole ones, in turns."""
    whole, half = (
        Side(kind, partial(process_step, kind, shape, "fp32", threads, device), device)
        for kind in ("ours", "half-length")
    )
    turns = in_turns(whole.step, half.step, turns=steps, warm=2)
    for side in (whole, half):
        side.close()
    seconds = {"seconds": turns.median(), "half_length_seconds": turns.median(1)}
    return {"shape": shape.name, **seconds, "ratio": turns.ratio()}


KINDS: tuple[ModelType, ...] = ("bert", "t5")


def beside_gpt(kind: ModelType, shape: Shape, threads: int, steps: int, device: str) -> dict[str, Any]:
    """Measures steps of another kind of model against GPT's of nearly equal operations, in turns."""
    configs = [run_config(shape, "fp32", {}, shape.batch, 1, kind=name) for name in ("gpt", kind)]
    theirs, own = (model_flops_per_sample(model_shape(config, shape.vocab)) for config in configs)
    # As many samples as have the operations of GPT's: what a step costs whatever its size then weighs alike.
    batch = max(1, round(shape.batch * theirs / own))
    sized = {"gpt": shape, kind: replace(shape, batch=batch)}
    sides = [Side(name, partial(process_step, name, s, "fp32", threads, device), device) for name, s in sized.items()]
    turns = in_turns(sides[0].step, sides[1].step, turns=steps, warm=2)
    for side in sides:
        side.close()
    seconds = {"seconds": turns.median(1), "gpt_seconds": turns.median()}
    operations = own * batch / (theirs * shape.batch)
    ratios = {"operations": operations, "ratio": turns.ratio() / operations}
    return {"kind": kind, "shape": sized[kind].name, **seconds, **ratios}


def _gib(name: str) -> Callable[[Cells], str | None]:
    """A function that writes bytes as GiB."""
    return lambda row: f"{row[name] / 2**30:.2f} GiB" if name in row else None


SINGLE = Table(
    Column("shape", "shape"),
    Column("precision", "precision"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("Hugging Face tokens/s", "hugging_face_tokens_per_second", ",.0f"),
    Column("ratio", "ratio", ".2f"),
    Column("compiled tokens/s", "compiled_tokens_per_second", ",.0f"),
    Column("ratio to compiled", "compiled_ratio", ".2f"),
    Column("of measured peak", "rate_over_peak", ".0%"),
    Column("memory", _gib("memory_bytes")),
    Column("theirs", _gib("hugging_face_memory_bytes")),
    Column("compiled", _gib("compiled_memory_bytes")),
)
WHOLE = Table(
    Column("whole program, fp32", "shape"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("Hugging Face tokens/s", "hugging_face_tokens_per_second", ",.0f"),
    Column("ratio", "ratio", ".2f"),
    Column("compiled tokens/s", "compiled_tokens_per_second", ",.0f"),
    Column("ratio to compiled", "compiled_ratio", ".2f"),
)
PRODUCTS = Table(
    Column("fp32 products of", "layer"),
    Column("in", "shape"),
    Column("tokens x inputs x outputs", "sizes"),
    Column("own GFLOP/s", lambda row: row["own_rate"] / 1e9, ",.0f"),
    Column("torch's", lambda row: row["torchs_rate"] / 1e9, ",.0f"),
    Column("ratio", "ratio", ".2f"),
)
LENGTHS = Table(
    Column("fp32", "shape"),
    Column("s per step", "seconds", ".3f"),
    Column("at half length", "half_length_seconds", ".3f"),
    Column("ratio", "ratio", ".2f"),
)
OTHER_KINDS = Table(
    Column("kind, fp32", "kind"),
    Column("shape", "shape"),
    Column("s per step", "seconds", ".3f"),
    Column("GPT's", "gpt_seconds", ".3f"),
    Column("operations / GPT's", "operations", ".2f"),
    Column("time for an operation / GPT's", "ratio", ".2f"),
)
PARALLEL = Table(
    Column("two processes x 1 thread", "layout"),
    Column("shape", "shape"),
    Column("s per step", "seconds", ".3f"),
    Column("one process x 2 threads", "one_process_seconds", ".3f"),
    Column("overhead", "overhead", "+.0%"),
)


def _of_kinds(shapes: Sequence[Shape], parts: set[str]) -> list[Shape]:
    """Shapes with a sequence length that kinds other than GPT are trained with."""
    return [shape for shape in shapes if "kinds" in parts and shape.seq <= 512]


def measure(
    parts: set[str], quick: bool, steps: int, threads: int, precisions: Sequence[str], compiled: bool
) -> dict[str, Any]:
    """Measures some parts; returns their rows and the rates that they are compared with."""
    shapes, programs, steps = (QUICK, QUICK, 2) if quick else (SHAPES, PROGRAMS, steps)
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        # The script, two ranks of a thread each and own products are a CPU's.
        parts = parts - {"programs", "layouts", "products"}
    peaks = {precision: peak_rate(precision, quick, device) for precision in precisions}
    mixtures = [Shape(2, 128, 32, 2, vocab=128, llama=True, ffn=256, groups=1, experts=4)] if quick else MIXTURES
    rows, whole, routed = [], [], []
    for shape in shapes if "steps" in parts else ():
        for precision in peaks:
            rows.append(compare(shape, precision, threads, steps, peaks[precision], device, compiled))
            print(f"{shape.name} {precision}: ratio {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    for shape in mixtures if "experts" in parts else ():
        for precision in peaks:
            routed.append(compare(shape, precision, threads, steps, peaks[precision], device, compiled=False))
            print(f"{shape.name} {precision}: ratio {routed[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    for shape in programs if "programs" in parts else ():
        whole.append(compare_programs(shape, threads, steps, 1 if quick else 3, compiled))
        print(f"{shape.name} whole program: ratio {whole[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    multiplied = [shapes[-1], mixtures[-1]] if "products" in parts and own_products.problem() is None else []
    layers = [row for shape in multiplied for row in products.beside_torch(shape, threads, steps)]
    lengths = [half_length(shape, threads, steps, device) for shape in shapes if "lengths" in parts]
    kinds = [beside_gpt(kind, shape, threads, steps, device) for shape in _of_kinds(shapes, parts) for kind in KINDS]
    layouts = overhead(shapes[min(1, len(shapes) - 1)], steps) if "layouts" in parts else []
    content = {
        "peaks": peaks,
        "single": rows,
        "experts": routed,
        "programs": whole,
        "products": layers,
        "lengths": lengths,
        "kinds": kinds,
        "parallel": layouts,
    }
    return {**content, "shapes": [asdict(shape) for shape in shapes]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two steps: does it run?")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each side (default: 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side (default: all cores)")
    parts = ("steps", "experts", "programs", "products", "lengths", "kinds", "layouts")
    parser.add_argument("--only", choices=parts, help="this part of the table alone")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="steps in this precision alone: on a processor without bf16 instructions those in bf16 take very long",
    )
    parser.add_argument("--no-compiled", action="store_true", help="leave out the peers that torch compiles")
    parser.add_argument("--out", type=Path, default=Path("bench_out/train.json"), help="where the figures go as JSON")
    flags = parser.parse_args()
    try:
        precisions = (flags.precision,) if flags.precision else PRECISIONS
        chosen = {flags.only} if flags.only else set(parts)
        compiled = not flags.no_compiled
        found = measure(chosen, flags.quick, flags.steps, flags.threads, precisions, compiled=compiled)
    except SideError as error:
        fix = "; --no-compiled leaves compiled peers out" if error.kind == COMPILED else ""
        print(f"error: {error}{fix}", file=sys.stderr)
        return 1
    peaks = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in found["peaks"].items())
    tables = {
        "single": SINGLE,
        "experts": SINGLE,
        "programs": WHOLE,
        "products": PRODUCTS,
        "lengths": LENGTHS,
        "kinds": OTHER_KINDS,
        "parallel": PARALLEL,
    }
    measured = [table.filled(found[name]).text(found[name]) for name, table in tables.items() if found[name]]
    print("\n\n".join([f"Measured peak of a matrix product: {peaks}.", *measured]))
    write_record(flags.out, header(device_name("cuda" if torch.cuda.is_available() else "cpu")), **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
