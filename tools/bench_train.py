#!/usr/bin/env python
"""Training speed of one process beside Hugging Face's GPT-2, and the overhead of each kind of parallelism.

    make bench-train                    the whole table (about 15 minutes on two cores)
    make bench-train ARGS="--quick"     a smoke run on tiny shapes

Each side runs in its own process, which steps when it is told to: the sides take turns, so both see the same state
of the machine, and the ratio is taken pair by pair. Equal work on both sides: shapes, vocabulary, dropout 0, AdamW
(torch's fused one), clipping, number of threads. Rates are medians over the steps after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron.config.run import RunConfig
from megatron.data.atomic import atomic_write
from megatron.data.batch import Batch
from megatron.topology.launch import LaunchEnvironment, init_process_group, shutdown
from megatron.topology.topology import Topology, build_topology, single_process
from megatron.training.assembly import build_engines, layout_of
from megatron.training.flops import ModelShape, model_flops_per_sample
from megatron.training.step import train_step

VOCAB = 50257


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    seq: int
    batch: int
    vocab: int = VOCAB

    @property
    def name(self) -> str:
        return f"L{self.layers} h{self.hidden} s{self.seq} b{self.batch}"

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)

    def flops(self) -> float:
        """Operations of one step that the model needs."""
        shape = ModelShape(
            self.layers,
            self.hidden,
            4 * self.hidden,
            self.heads,
            self.heads,
            self.hidden // self.heads,
            self.seq,
            self.vocab,
        )
        return float(model_flops_per_sample(shape) * self.batch)


SHAPES = [Shape(4, 256, 256, 8), Shape(8, 512, 512, 4), Shape(12, 768, 1024, 1)]
QUICK = [Shape(2, 128, 32, 2, vocab=128)]


def run_config(shape: Shape, precision: str, parallel: dict[str, Any], micro: int, world: int) -> RunConfig:
    return RunConfig.from_dict(
        {
            "model": {
                "num_layers": shape.layers,
                "hidden_size": shape.hidden,
                "num_attention_heads": shape.heads,
                "seq_length": shape.seq,
                "max_position_embeddings": shape.seq,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "make_vocab_size_divisible_by": 1,
            },
            "training": {"micro_batch_size": micro, "global_batch_size": shape.batch, "train_iters": 1},
            "optimizer": {"lr": 1e-4, "clip_grad": 1.0},
            "tokenizer": {"vocab_size": shape.vocab},
            "parallel": {"distributed_backend": "gloo", **parallel},
            "precision": {} if precision == "fp32" else {precision: True},
        }
    ).resolve(world)


def our_step(
    shape: Shape, precision: str, parallel: dict[str, Any], topology: Topology | None = None
) -> Callable[[], None]:
    """One step of this project, the whole global batch over the ranks of the topology."""
    world = topology.layout.world_size if topology else 1
    dp = topology.layout.dp if topology else 1
    pipeline = topology is not None and topology.layout.pp > 1
    micro = max(1, shape.batch // (dp * (2 if pipeline else 1)))
    config = run_config(shape, precision, parallel, micro, world)
    if topology is None:
        topology = single_process("cuda" if torch.cuda.is_available() else "cpu")
    engines = build_engines(config, topology, shape.vocab)
    tokens = torch.randint(0, shape.vocab, (micro, shape.seq + 1))
    batch = Batch(
        sample_ids_b=torch.arange(micro),
        draw_ids_b=torch.arange(micro),
        tokens_bs=tokens[:, :-1].contiguous(),
        labels_bs=tokens[:, 1:].contiguous(),
        loss_mask_bs=torch.ones(micro, shape.seq),
    ).to(topology.device)
    batches = [batch] * (shape.batch // (micro * dp))
    return lambda: _ignore(train_step(engines, batches, 0, 1e-4, 0.01))


def _ignore(_: object) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def their_step(shape: Shape) -> Callable[[], None]:
    """One step of Hugging Face's GPT2LMHeadModel in fp32."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.seq,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    model: Any = GPT2LMHeadModel(config)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    tokens = torch.randint(0, shape.vocab, (shape.batch, shape.seq), device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _ignore(None)

    return step


def peak_rate(precision: str, quick: bool) -> float:
    """Best measured rate of a square matrix product, FLOP/s.

    Args:
        precision: fp32 or bf16, in which a processor without instructions for it takes a hundred times as long.
        quick: of a small one.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    device, n = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 2048)
    n = 256 if quick else n
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        _ignore(None)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def worker(pipe: Connection, kind: str, shape: Shape, precision: str, threads: int) -> None:
    """Steps (or measures the peak) each time it is asked; answers with seconds, and at the end with peak memory."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = their_step(shape) if kind == "theirs" else our_step(shape, precision, {})
    while pipe.recv() == "step":
        start = time.perf_counter()
        step()
        pipe.send(time.perf_counter() - start)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


class Side:
    """A worker process."""

    def __init__(self, kind: str, shape: Shape, precision: str, threads: int) -> None:
        context = mp.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=worker, args=(child, kind, shape, precision, threads), daemon=True)
        self.process.start()

    def step(self) -> float:
        self.pipe.send("step")
        return float(self.pipe.recv())

    def close(self) -> int:
        """Ends it; returns its peak memory in bytes."""
        self.pipe.send("end")
        memory = int(self.pipe.recv())
        self.process.join()
        return memory


def compare(shape: Shape, precision: str, threads: int, steps: int, peak: float) -> dict[str, Any]:
    """This project against Hugging Face in fp32, in turns."""
    ours, theirs = Side("ours", shape, precision, threads), Side("theirs", shape, "fp32", threads)
    pairs = [(ours.step(), theirs.step()) for _ in range(steps + 2)][2:]
    tokens = shape.batch * shape.seq
    own = statistics.median(a for a, _ in pairs)
    other = statistics.median(b for _, b in pairs)
    return {
        "shape": shape.name,
        "precision": precision,
        "tokens_per_second": tokens / own,
        "hugging_face_fp32_tokens_per_second": tokens / other,
        "ratio": statistics.median(b / a for a, b in pairs),
        "rate_over_peak": shape.flops() / own / peak,
        "memory_bytes": ours.close(),
        "hugging_face_memory_bytes": theirs.close(),
    }


def parallel_rank(rank: int, port: int, shape: Shape, parallel: dict[str, Any], steps: int, pipe: Connection) -> None:
    """One of two ranks, with one thread each."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    init_process_group(LaunchEnvironment(rank, 2, rank), "gloo", 5)
    config = run_config(shape, "fp32", parallel, 1, 2)
    step = our_step(shape, "fp32", parallel, build_topology(layout_of(config, 2), torch.device("cpu")))
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    pipe.send(statistics.median(times[2:]))
    shutdown()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor-parallel 2": {"tensor_model_parallel_size": 2},
    "pipeline 2, two micro-batches": {"pipeline_model_parallel_size": 2},
    "data-parallel 2": {},
    "data-parallel 2, sharded optimizer": {"use_distributed_optimizer": True},
}


def overhead(shape: Shape, steps: int) -> list[dict[str, Any]]:
    """Two processes of one thread against one of two threads, same global batch."""
    single = Side("ours", shape, "fp32", 2)
    alone = statistics.median([single.step() for _ in range(steps + 2)][2:])
    single.close()
    rows = []
    context = mp.get_context("forkserver")  # imports once what each rank needs
    context.set_forkserver_preload(["__main__", "torch._dynamo"])
    for number, (name, parallel) in enumerate(LAYOUTS.items()):
        port = 20000 + (os.getpid() + number * 37) % 20000
        ends = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(target=parallel_rank, args=(rank, port, shape, parallel, steps, ends[rank][1]), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for _, send in ends:
            send.close()  # so that a rank that dies is noticed
        seconds = max(float(receive.recv()) for receive, _ in ends)
        for process in ranks:
            process.join()
        rows.append({"layout": name, "shape": shape.name, "seconds": seconds, "one_process_seconds": alone})
    return rows


def table(rows: list[dict[str, Any]], layouts: list[dict[str, Any]], peaks: dict[str, float]) -> str:
    """Markdown."""
    lines = [
        f"Measured peak of a matrix product: {', '.join(f'{k} {v / 1e9:,.0f} GFLOP/s' for k, v in peaks.items())}.",
        "",
        "| shape | precision | tokens/s | Hugging Face fp32 tokens/s | ratio | of measured peak | memory | theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['shape']} | {row['precision']} | {row['tokens_per_second']:,.0f} "
            f"| {row['hugging_face_fp32_tokens_per_second']:,.0f} | {row['ratio']:.2f} | {row['rate_over_peak']:.0%} "
            f"| {row['memory_bytes'] / 2**30:.2f} GiB | {row['hugging_face_memory_bytes'] / 2**30:.2f} GiB |"
        )
    lines += [
        "",
        "| two processes x 1 thread | shape | s per step | one process x 2 threads | overhead |",
        "|---|---|---|---|---|",
    ]
    for row in layouts:
        extra = row["seconds"] / row["one_process_seconds"] - 1
        seconds = f"{row['seconds']:.3f} | {row['one_process_seconds']:.3f}"
        lines.append(f"| {row['layout']} | {row['shape']} | {seconds} | {extra:+.0%} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two steps: does it run?")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each side (default: 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side (default: all cores)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/train.json"), help="where the figures go as JSON")
    flags = parser.parse_args()
    shapes, steps = (QUICK, 2) if flags.quick else (SHAPES, flags.steps)
    torch.set_num_threads(flags.threads)
    peaks = {precision: peak_rate(precision, flags.quick) for precision in ("fp32", "bf16")}
    rows = []
    for shape in shapes:
        for precision in peaks:
            rows.append(compare(shape, precision, flags.threads, steps, peaks[precision]))
            print(f"{shape.name} {precision}: ratio {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    layouts = [] if torch.cuda.is_available() else overhead(shapes[min(1, len(shapes) - 1)], steps)
    print(table(rows, layouts, peaks))
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"peaks": peaks, "single": rows, "parallel": layouts, "shapes": [asdict(shape) for shape in shapes]}
    with atomic_write(flags.out) as stream:
        stream.write(json.dumps(content, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
