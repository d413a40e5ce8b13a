"""Training speed of one process beside Hugging Face's GPT-2, and the overhead of each kind of parallelism.

    make bench-train                    the whole table (about 15 minutes on two cores)
    make bench-train ARGS="--quick"     a smoke run on tiny shapes

Each side runs in its own process, which steps when it is told to: the sides take turns, so both see the same state
of the machine, and the ratio is taken pair by pair. Equal work on both sides: shapes, vocabulary, dropout 0, AdamW
(torch's fused one), clipping, number of threads. Rates are medians over the steps after a warm-up. The whole program,
pretrain_gpt.py by its log, is measured beside a plain script around Hugging Face's model in the same way, run by run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import socket
import statistics
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import compare_programs
from benchmarks.train_sides import Shape, Step, peer_step
from megatron.base.atomic import atomic_write
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.topology.launch import LaunchEnvironment, init_process_group, shutdown
from megatron.topology.topology import Topology, build_topology, single_process
from megatron.training.assembly import build_engines, layout_of
from megatron.training.step import train_step

SHAPES = [
    Shape(4, 256, 256, 8),
    Shape(8, 512, 512, 4),
    Shape(12, 768, 1024, 1),
    Shape(4, 256, 256, 1),
    Shape(6, 512, 512, 2, vocab=50304),
]
PROGRAMS = [Shape(4, 256, 256, 8, vocab=50304), Shape(6, 512, 512, 2, vocab=50304)]
QUICK = [Shape(2, 128, 32, 2, vocab=128)]


def run_config(
    shape: Shape, precision: str, parallel: dict[str, Any], micro: int, world: int, divisor: int = 1
) -> RunConfig:
    """The resolved configuration of a training with as many samples per step as the shape has.

    Args:
        shape: shape of the model.
        precision: fp32 or bf16.
        parallel: values of the ``parallel`` section.
        micro: samples per micro-batch.
        world: number of ranks.
        divisor: number that the padded vocabulary is divisible by.
    """
    form: dict[str, Any] = {}
    if shape.llama:
        form = {
            "ffn_hidden_size": shape.ffn,
            "num_query_groups": shape.groups,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
        }
    cuda = parallel.get("distributed_backend") == "nccl"
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
                "make_vocab_size_divisible_by": divisor,
                **form,
            },
            "training": {"micro_batch_size": micro, "global_batch_size": shape.samples, "train_iters": 1},
            "optimizer": {"lr": 1e-4, "clip_grad": 1.0},
            "tokenizer": {"vocab_size": shape.vocab},
            "parallel": {"distributed_backend": "gloo", **parallel},
            "precision": {} if precision == "fp32" else {precision: True},
        }
    ).resolve(world, cuda_available=cuda)


def our_step(config: RunConfig, topology: Topology, vocab: int) -> Step:
    """A step of the trainer, the whole global batch over the ranks of the topology."""
    engines = build_engines(config, topology, vocab)
    micro, seq = config.training.micro_batch_size, config.model.seq_length
    tokens = torch.randint(0, vocab, (micro, seq + 1))
    batch = Batch(
        sample_ids_b=torch.arange(micro),
        draw_ids_b=torch.arange(micro),
        tokens_bs=tokens[:, :-1].contiguous(),
        labels_bs=tokens[:, 1:].contiguous(),
        loss_mask_bs=torch.ones(micro, seq),
    ).to(topology.device)
    assert config.training.global_batch_size is not None
    batches = [batch] * (config.training.global_batch_size // (micro * topology.layout.dp))
    return lambda: train_step(engines, batches, 0, 1e-4, 0.01)


def alone_step(shape: Shape, precision: str, device: str, divisor: int = 1) -> Step:
    """The trainer's step on one process."""
    backend = "nccl" if device == "cuda" else "gloo"
    config = run_config(shape, precision, {"distributed_backend": backend}, shape.batch, 1, divisor)
    return our_step(config, single_process(device), shape.vocab)


def synchronize(device: str) -> None:
    """Waits for a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_rate(precision: str, quick: bool, device: str) -> float:
    """Measures the best rate of a square matrix product, FLOP/s.

    Args:
        precision: fp32 or bf16, in which a processor without instructions for it takes a hundred times as long.
        quick: whether to use a small model.
        device: torch's name of the device.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    n = 256 if quick else 8192 if device == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


@dataclass(frozen=True)
class SideOf:
    """A side of a comparison: what it runs.

    Args:
        kind: ours, nanogpt or hugging-face.
        shape: shape of the model.
        precision: fp32 or bf16.
        threads: number of threads on a CPU.
        device: torch's name of the device.
        compiled: whether torch.compile compiles a peer's model.
        divisor: number that our padded vocabulary is divisible by.
    """

    kind: str
    shape: Shape
    precision: str
    threads: int
    device: str = "cpu"
    compiled: bool = False
    divisor: int = 1

    def build(self) -> Step:
        """Builds the step, on this process."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        if self.kind == "ours":
            return alone_step(self.shape, self.precision, self.device, self.divisor)
        return peer_step(self.kind, self.shape, self.precision, self.device, self.compiled)

    def peak_bytes(self) -> int:
        """Peak memory of this process."""
        if self.device == "cuda":
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(pipe: Connection, side: SideOf) -> None:
    """Takes as many steps as it is asked for, until it reads None; answers with seconds of one, or to 0 with its peak
    memory. Errors are answered as text."""
    try:
        step = side.build()
        while (count := pipe.recv()) is not None:
            synchronize(side.device)
            start = time.perf_counter()
            for _ in range(count):
                step()
            synchronize(side.device)
            pipe.send((time.perf_counter() - start) / count if count else side.peak_bytes())
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


class SideError(Exception):
    """Raised when a side has failed; one line.

    Args:
        kind: kind of the side.
        why: the reason.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


class Side:
    """The worker process of a side. Every request to it raises a SideError when it has failed or is gone."""

    def __init__(self, side: SideOf) -> None:
        # A forkserver imports once what all sides need; a process that is to use CUDA starts from nothing.
        context: Any = mp.get_context("spawn" if side.device == "cuda" else "forkserver")
        if side.device != "cuda":
            context.set_forkserver_preload(["benchmarks.train"])
        self.kind = side.kind
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=worker, args=(child, side), daemon=True)
        self.process.start()
        child.close()  # so that a worker that dies is noticed

    def begin(self, count: int = 1) -> None:
        """Asks it to take steps."""
        with suppress(BrokenPipeError, ConnectionResetError):  # its answer says more
            self.pipe.send(count)

    def end(self) -> float:
        """Waits for its answer."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise SideError(self.kind, f"the process ended with status {self.process.exitcode}") from None
        if isinstance(answer, str):
            raise SideError(self.kind, answer)
        return float(answer)

    def step(self, count: int = 1) -> float:
        """Takes some steps; returns the seconds of one."""
        self.begin(count)
        return self.end()

    def peak_bytes(self) -> int:
        """Its peak memory."""
        return int(self.step(0))

    def close(self) -> int:
        """Ends it; returns its peak memory in bytes."""
        memory = self.peak_bytes()
        self.pipe.send(None)
        self.process.join()
        return memory

    def kill(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.join()


def compare(shape: Shape, precision: str, threads: int, steps: int, peak: float, device: str) -> dict[str, Any]:
    """Measures this project against Hugging Face in fp32, in turns."""
    ours = Side(SideOf("ours", shape, precision, threads, device))
    theirs = Side(SideOf("hugging-face", shape, "fp32", threads, device))
    pairs = [(ours.step(), theirs.step()) for _ in range(steps + 2)][2:]
    tokens = shape.samples * shape.seq
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
    """Runs one of two ranks, with one thread each."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    init_process_group(LaunchEnvironment(rank, 2, rank), "gloo", 5)
    pipeline = "pipeline_model_parallel_size" in parallel
    replicas = 1 if pipeline or "tensor_model_parallel_size" in parallel else 2
    micro = max(1, shape.batch // (replicas * (2 if pipeline else 1)))
    config = run_config(shape, "fp32", parallel, micro, 2)
    step = our_step(config, build_topology(layout_of(config, 2), torch.device("cpu")), shape.vocab)
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


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def overhead(shape: Shape, steps: int) -> list[dict[str, Any]]:
    """Measures two processes of one thread against one of two threads, with the same global batch."""
    single = Side(SideOf("ours", shape, "fp32", 2))
    alone = statistics.median([single.step() for _ in range(steps + 2)][2:])
    single.close()
    rows = []
    context = mp.get_context("forkserver")  # imports once what each rank needs
    context.set_forkserver_preload(["__main__", "torch._dynamo"])
    for name, parallel in LAYOUTS.items():
        port = free_port()
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


def table(
    rows: list[dict[str, Any]], programs: list[dict[str, Any]], layouts: list[dict[str, Any]], peaks: dict[str, float]
) -> str:
    """The results as Markdown."""
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
    lines += ["", "| whole program, fp32 | tokens/s | Hugging Face tokens/s | ratio |", "|---|---|---|---|"]
    for row in programs:
        rates = f"{row['tokens_per_second']:,.0f} | {row['hugging_face_tokens_per_second']:,.0f}"
        lines.append(f"| {row['shape']} | {rates} | {row['ratio']:.2f} |")
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
    parser.add_argument("--only", choices=("steps", "programs", "layouts"), help="this part of the table alone")
    parser.add_argument("--out", type=Path, default=Path("bench_out/train.json"), help="where the figures go as JSON")
    flags = parser.parse_args()
    shapes, programs, steps = (QUICK, QUICK, 2) if flags.quick else (SHAPES, PROGRAMS, flags.steps)
    wanted = {flags.only} if flags.only else {"steps", "programs", "layouts"}
    torch.set_num_threads(flags.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        wanted -= {"programs", "layouts"}  # the script and two ranks of a thread each are a CPU's
    peaks = {precision: peak_rate(precision, flags.quick, device) for precision in ("fp32", "bf16")}
    rows, whole = [], []
    for shape in shapes if "steps" in wanted else ():
        for precision in peaks:
            rows.append(compare(shape, precision, flags.threads, steps, peaks[precision], device))
            print(f"{shape.name} {precision}: ratio {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    for shape in programs if "programs" in wanted else ():
        whole.append(compare_programs(shape, flags.threads, steps, 1 if flags.quick else 3))
        print(f"{shape.name} whole program: ratio {whole[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    layouts = overhead(shapes[min(1, len(shapes) - 1)], steps) if "layouts" in wanted else []
    print(table(rows, whole, layouts, peaks))
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"peaks": peaks, "single": rows, "programs": whole, "parallel": layouts}
    content["shapes"] = [asdict(shape) for shape in shapes]
    with atomic_write(flags.out) as stream:
        stream.write(json.dumps(content, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
