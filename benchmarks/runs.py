"""Whole training runs of a benchmark: their text, their flags, and their logs, by which finished runs are kept."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import REPO
from megatron.config.islands import file_of
from megatron.training.records import read_records

VOCAB_SIZE = 1024


def run(command: list[str], log: Path, threads: int = 1) -> None:
    """Runs a command of this project, its output in a file.

    Raises:
        SystemExit: when it fails, with the end of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([sys.executable, *command], cwd=REPO, stdout=file, stderr=subprocess.STDOUT, env=env)
    if done.returncode:
        sys.exit(f"error: {' '.join(command[:3])} failed; see {log}\n{log.read_text()[-2000:]}")


def prepare(out: Path, train_bytes: int, heldout_bytes: int | None = None) -> None:
    """Writes corpus, vocabulary and token files, unless they are there.

    Args:
        out: folder for all of it.
        train_bytes: text to train on.
        heldout_bytes: held-out text, of short documents; None for all that there is.
    """
    data, logs = out / "data", out / "logs"
    if (data / "done").exists():
        return
    run(["tools/quickstart/make_corpus.py", "--output-dir", str(out / "corpus")], logs / "corpus.log")
    source = out / "corpus" / "train.jsonl"
    vocabulary = ["--vocab-size", str(VOCAB_SIZE), "--output-dir", str(out / "vocabulary")]
    run(["tools/train_vocab.py", "--input", str(source), *vocabulary], logs / "vocabulary.log")
    data.mkdir(parents=True, exist_ok=True)
    short = None if heldout_bytes is None else heldout_bytes // 4
    for part, most, longest in (("train", train_bytes, None), ("heldout", heldout_bytes, short)):
        text = data / f"{part}.jsonl"
        _take(out / "corpus" / text.name, text, most, longest)
        files = ["--input", str(text), "--output-prefix", str(data / part)]
        run(["tools/preprocess_data.py", *files, *_tokenizer_flags(out), "--append-eod"], logs / f"{part}.log")
    (data / "done").touch()


def _take(source: Path, target: Path, most: int | None, longest: int | None) -> None:
    """Copies documents, but those that are longer than the longest, until so many characters are taken; None: all."""
    taken = 0
    with open(source, encoding="utf-8") as lines, open(target, "w", encoding="utf-8") as file:
        for line in lines:
            if (most is None or taken < most) and (longest is None or len(line) <= longest):
                file.write(line)
                taken += len(line)


def _tokenizer_flags(out: Path) -> list[str]:
    vocab = out / "vocabulary"
    files = ["--vocab-file", str(vocab / "vocab.json"), "--merge-file", str(vocab / "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files]


def flags(values: Mapping[str, Any], specs: Sequence[str], out: Path, log: Path) -> list[str]:
    """Flags of a run on the prepared text.

    Args:
        values: values of its flags, by name; True for a switch.
        specs: specs of compressors.
        out: folder of the text.
        log: file of its records.
    """
    words = [text for name, value in values.items() for text in (f"--{name}", *([] if value is True else [str(value)]))]
    words += [word for spec in specs for word in ("--compress", spec)]
    for part, name in (("train", "train"), ("valid", "heldout"), ("test", "heldout")):
        words.append(f"--{part}-data-path={out / 'data' / name}_text_document")
    return [*words, *_tokenizer_flags(out), "--log-json-file", str(log)]


def has_ended(log: Path) -> bool:
    """Whether a run's log is complete."""
    return log.exists() and any(event.get("kind") == "test" for event in read_records(log))


def train(
    words: Sequence[str],
    name: str,
    log: Path,
    output: Path,
    ranks: int = 1,
    threads: int = 1,
    nodes: int = 1,
    islands: int = 1,
) -> None:
    """Runs a training, unless its log is complete.

    Args:
        words: its flags.
        name: its name in messages.
        log: file of its records; of the first island's, where there are several.
        output: file of its output.
        ranks: number of processes.
        threads: number of threads of each.
        nodes: nodes that the ranks believe to be on, a launcher for each.
        islands: islands that share the ranks.
    """
    if has_ended(log):
        return
    print(f"{name} ...", flush=True)
    if "--load" not in words:
        log.unlink(missing_ok=True)
    commands = [[*launcher, "pretrain_gpt.py", *words] for launcher in _launchers(ranks, nodes, islands)]
    outputs = [output, *(output.with_suffix(f".{node}.log") for node in range(1, nodes))]
    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(partial(run, threads=threads), commands, outputs))
    if islands > 1:
        Path(file_of(str(log), 0)).replace(log)
        for island in range(1, islands):
            Path(file_of(str(log), island)).unlink()


def _launchers(ranks: int, nodes: int, islands: int) -> list[list[str]]:
    """The words before a program's that start its ranks, for each node."""
    if ranks == 1:
        return [[]]
    if islands > 1:
        return [["tools/launch.py", "--islands", str(islands), "--nproc-per-node", str(ranks)]]
    launcher = ["tools/launch.py", f"--nproc-per-node={ranks // nodes}"]
    if nodes == 1:
        return [launcher]
    place = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [[*launcher, *place, "--node-rank", str(node)] for node in range(nodes)]


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def final_loss(events: Sequence[Mapping[str, Any]]) -> float:
    """Validation loss at the end of training."""
    return float(next(event["lm_loss"] for event in reversed(events) if event.get("kind") == "test"))


def slug(case: str) -> str:
    """The name of a case in file names."""
    return "".join(c if c.isalnum() or c in ".+-" else "_" for c in case)
