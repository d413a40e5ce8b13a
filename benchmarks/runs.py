"""Whole training runs: their text, their flags, and their logs; finished runs are not repeated."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import REPO
from megatron.config.islands import island_file
from megatron.training.records import read_records

VOCAB_SIZE = 1024


def run(command: list[str], log: Path, threads: int = 1) -> None:
    """Run a command of this project, with its output in a file.

    Raises:
        SystemExit: when it fails, with the end of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        result = subprocess.run([sys.executable, *command], cwd=REPO, stdout=file, stderr=subprocess.STDOUT, env=env)
    if result.returncode:
        sys.exit(f"error: {' '.join(command[:3])} failed; see {log}\n{log.read_text()[-2000:]}")


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Write this process's output, and that of its children, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with open(path, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            for descriptor, before in zip((1, 2), kept, strict=True):
                os.dup2(before, descriptor)
                os.close(before)


def prepare(out: Path, train_bytes: int, heldout_bytes: int | None = None) -> None:
    """Write corpus, vocabulary and token files, unless they exist.

    Args:
        out: folder of these files.
        train_bytes: size of the training text.
        heldout_bytes: size of the held-out text, of short documents; None for all held-out text.
    """
    data, logs = out / "data", out / "logs"
    if (data / "done").exists():
        return
    run(["tools/quickstart/make_corpus.py", "--output-dir", str(out / "corpus")], logs / "corpus.log")
    source = out / "corpus" / "train.jsonl"
    vocabulary = ["--vocab-size", str(VOCAB_SIZE), "--output-dir", str(out / "vocabulary")]
    run(["tools/train_vocab.py", "--input", str(source), *vocabulary], logs / "vocabulary.log")
    data.mkdir(parents=True, exist_ok=True)
    longest_heldout = None if heldout_bytes is None else heldout_bytes // 4
    for split, size, longest in (("train", train_bytes, None), ("heldout", heldout_bytes, longest_heldout)):
        text = data / f"{split}.jsonl"
        _copy_documents(out / "corpus" / text.name, text, size, longest)
        tokenize(out, text, split)
    (data / "done").touch()


def tokenize(out: Path, text: Path, split: str) -> None:
    """Write the token files of a text with the vocabulary of a folder."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    files = ["--input", str(text), "--output-prefix", str(out / "data" / split)]
    run(["tools/preprocess_data.py", *files, *_tokenizer_flags(out), "--append-eod"], out / "logs" / f"{split}.log")


def _copy_documents(source: Path, target: Path, size: int | None, longest: int | None) -> None:
    """Copy documents of at most ``longest`` characters until ``size`` characters are copied; None: no limit."""
    copied = 0
    with open(source, encoding="utf-8") as lines, open(target, "w", encoding="utf-8") as file:
        for line in lines:
            if (size is None or copied < size) and (longest is None or len(line) <= longest):
                file.write(line)
                copied += len(line)


def _tokenizer_flags(out: Path) -> list[str]:
    vocab = out / "vocabulary"
    files = ["--vocab-file", str(vocab / "vocab.json"), "--merge-file", str(vocab / "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files]


def flags(values: Mapping[str, Any], specs: Sequence[str], out: Path, log: Path) -> list[str]:
    """Flags of a run on the prepared text in ``out``; True is the value of a switch."""
    words = [text for name, value in values.items() for text in (f"--{name}", *([] if value is True else [str(value)]))]
    words += [word for spec in specs for word in ("--compress", spec)]
    for split, name in (("train", "train"), ("valid", "heldout"), ("test", "heldout")):
        words.append(f"--{split}-data-path={out / 'data' / name}_text_document")
    return [*words, *_tokenizer_flags(out), "--log-json-file", str(log)]


def has_ended(log: Path) -> bool:
    """Return whether a run's log is complete."""
    return log.exists() and any(event.get("kind") == "test" for event in read_records(log))


def train(
    words: Sequence[str], name: str, log: Path, output: Path, ranks: int, nodes: int = 1, islands: int = 1
) -> None:
    """Run a training from the beginning, with one thread per rank.

    With islands, ``log`` is the first island's. Each of the simulated nodes has a launcher.
    """
    print(f"{name} ...", flush=True)
    log.unlink(missing_ok=True)
    commands = [[*launcher, "pretrain_gpt.py", *words] for launcher in _launchers(ranks, nodes, islands)]
    outputs = [output, *(output.with_suffix(f".{node}.log") for node in range(1, nodes))]
    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(run, commands, outputs))
    if islands > 1:
        Path(island_file(str(log), 0)).replace(log)
        for island in range(1, islands):
            Path(island_file(str(log), island)).unlink()


def _launchers(ranks: int, nodes: int, islands: int) -> list[list[str]]:
    """Return the launcher's words before the program, for each node."""
    if islands > 1:
        return [["tools/launch.py", "--islands", str(islands), "--nproc-per-node", str(ranks)]]
    launcher = ["tools/launch.py", f"--nproc-per-node={ranks // nodes}"]
    if nodes == 1:
        return [launcher]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # a free port
        port = listener.getsockname()[1]
    rendezvous = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [[*launcher, *rendezvous, "--node-rank", str(node)] for node in range(nodes)]


def final_loss(events: Sequence[Mapping[str, Any]]) -> float:
    """Validation loss at the end of training."""
    return float(next(event["lm_loss"] for event in reversed(events) if event.get("kind") == "test"))


def slug(case: str) -> str:
    """Return the name of a case in file names."""
    return "".join(c if c.isalnum() or c in ".+-" else "_" for c in case)
