"""Seconds of an iteration of the whole program, by its log, beside a plain training script around Hugging Face's GPT-2.

The script runs the model as it is (eager), or compiled by torch.compile.

All read the same tokens from a file, log the loss of every iteration, and run in a process of their own. As a command
this module is that script.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import REPO
from benchmarks.train_sides import Shape, peer_training
from benchmarks.turns import in_turns
from megatron.data.indexed import IndexedWriter

WARM_UP = 2
"""Iterations that are not counted; torch compiles in the first one."""

_ELAPSED = re.compile(r"elapsed time per iteration \(s\):\s*([\d.]+)")


def write_text(prefix: Path, vocab: int, tokens: int) -> None:
    """Writes random tokens as a .bin/.idx pair, and as a plain array for the script."""
    drawn = np.random.default_rng(0).integers(0, vocab, tokens)
    with IndexedWriter(prefix) as writer:
        writer.add_document(drawn)
        writer.finalize()
    np.save(prefix.with_suffix(".npy"), drawn)


def our_command(prefix: Path, shape: Shape) -> list[str]:
    """The command of the program on these tokens, without its last word, the number of iterations."""
    words = (
        f"pretrain_gpt.py --num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads} "
        f"--seq-length {shape.seq} --max-position-embeddings {shape.seq} --micro-batch-size {shape.batch} "
        f"--global-batch-size {shape.samples} --lr 1e-4 --lr-decay-style constant --clip-grad 1 --attention-dropout 0 "
        f"--hidden-dropout 0 --eval-iters 0 --log-interval 1 --tokenizer-type NullTokenizer --split 100,0,0 "
        f"--vocab-size {shape.vocab - 1} --make-vocab-size-divisible-by 1"
    ).split()
    return [*words, "--data-path", str(prefix), "--train-iters"]


def their_command(prefix: Path, shape: Shape, form: str) -> list[str]:
    """The command of the script around a model that is eager or compiled, likewise."""
    sizes = [str(number) for number in (shape.layers, shape.hidden, shape.seq, shape.batch, shape.vocab)]
    return ["-m", "benchmarks.program", form, str(prefix.with_suffix(".npy")), *sizes]


def seconds(command: list[str], iterations: int, threads: int) -> float:
    """Median seconds of an iteration after the warm-up, by the program's log.

    Raises:
        SystemExit: when the program fails, with its output.
    """
    command = [sys.executable, *command, str(WARM_UP + iterations)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    found = [float(number) for number in _ELAPSED.findall(done.stdout)]
    if done.returncode or len(found) != WARM_UP + iterations:
        sys.exit(f"error: {' '.join(command)} failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return statistics.median(found[WARM_UP:])


def compare_programs(shape: Shape, threads: int, iterations: int, runs: int, compiled: bool) -> dict[str, Any]:
    """Measures the whole program against the eager script, and perhaps the compiled one, in fp32, in turns."""
    forms = ["eager", "compiled"] if compiled else ["eager"]
    with tempfile.TemporaryDirectory() as folder:
        prefix, tokens = Path(folder) / "text", shape.samples * shape.seq
        write_text(prefix, shape.vocab - 1, (iterations + 2 * WARM_UP) * tokens + 2)
        commands = [our_command(prefix, shape), *(their_command(prefix, shape, form) for form in forms)]
        turns = in_turns(*(partial(seconds, command, iterations, threads) for command in commands), turns=runs)
    row = {
        "shape": shape.name,
        "tokens_per_second": tokens / turns.median(),
        "hugging_face_tokens_per_second": tokens / turns.median(1),
        "ratio": turns.ratio(),
    }
    if compiled:
        row |= {"compiled_tokens_per_second": tokens / turns.median(2), "compiled_ratio": turns.ratio(2)}
    return row


def _batches(path: Path, shape: Shape) -> Iterator[Tensor]:
    tokens = torch.from_numpy(np.load(path)).long()
    samples = tokens[: len(tokens) // shape.seq * shape.seq].view(-1, shape.seq)
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=shape.batch, shuffle=True)  # type: ignore[arg-type]
    return iter(loader)


def main() -> None:
    """Runs the script: eager or compiled, path of the tokens, five sizes, iterations."""
    form, path = sys.argv[1:3]
    layers, hidden, seq, batch, vocab, iterations = (int(word) for word in sys.argv[3:])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape = Shape(layers, hidden, seq, batch, vocab)
    train = peer_training("hugging-face", shape, "fp32", "cpu", compiled=form == "compiled")
    batches = _batches(Path(path), shape)
    for number in range(iterations):
        start = time.perf_counter()
        tokens_bs = next(batches)
        loss = float(train(tokens_bs, tokens_bs))
        elapsed = time.perf_counter() - start
        line = f"iteration {number + 1} | elapsed time per iteration (s): {elapsed:.4f} | lm loss: {loss:.6f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
