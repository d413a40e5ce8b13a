"""The example for two machines: its two commands, on hosts of their own with a slow link between them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lab.hosts import Lab
from tests.support.cli import REPO
from tests.support.events import read_events
from tests.support.islands import saved_tensors
from tests.support.machines import require_laboratory

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

require_laboratory()

ITERATIONS = 12
SMALL = {
    "ITERS": str(ITERATIONS), "VOCAB_SIZE": "300", "PROCESSES": "1",
    "OUTER": "outer=fixpoint,bits=4,every=5,warmup=2",
}  # fmt: skip
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --eval-iters 1 --log-interval 1 --distributed-timeout-minutes 2"
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab([20_000_000] * 2) as lab:
        yield lab


def _corpus(folder: Path, word: str) -> Path:
    folder.mkdir()
    for split, count in (("train", 40), ("heldout", 8)):
        lines = [
            json.dumps({"text": f"{word} number {n} of {count}, and {n * n} more of them. " * 4}) for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _start(lab: Lab, out: Path, number: int, corpus: Path, *flags: str) -> subprocess.Popen[str]:
    """Starts a machine's command as a person types it; without the settings of the laboratory's own runs."""
    env = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    env |= {**SMALL, "PYTHON": sys.executable, "OUT": str(out / str(number)), "CORPUS": str(corpus)}
    words = ["bash", str(REPO / "examples" / "two_machines" / "run.sh"), ("first", "second")[number], lab.address(0)]
    return subprocess.Popen(
        ["ip", "netns", "exec", lab.host(number), *words, *FLAGS.split(), *flags],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _run_both_machines(lab: Lab, out: Path, corpora: tuple[Path, Path], *flags: str) -> list[tuple[int, str]]:
    """Statuses and output of both machines' commands."""
    machines = [_start(lab, out, number, corpus, *flags) for number, corpus in enumerate(corpora)]
    try:
        outputs = [machine.communicate(timeout=120)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    return [(machine.returncode, text) for machine, text in zip(machines, outputs, strict=True)]


def test_two_machines_train_one_model(lab: Lab, tmp_path: Path) -> None:
    """They end with the same weights, and their messages cross the link. Neither name of a machine nor a variable
    tells them by which address they reach one another."""
    corpus = _corpus(tmp_path / "corpus", "apple")
    before = lab.traffic()
    results = _run_both_machines(lab, tmp_path, (corpus, corpus))
    sent = [(after - earlier).sent for after, earlier in zip(lab.traffic(), before, strict=True)]
    for status, text in results:
        assert status == 0, text
        assert re.findall(r"round of islands at iteration +(\d+) \| islands: 0, 1 ", text) == ["7", "12"]
    saved = [saved_tensors(tmp_path / str(k) / "checkpoints" / f"island_{k}", ITERATIONS, "model") for k in range(2)]
    assert saved[0]
    assert all(bool((saved[1][name] == tensor).all()) for name, tensor in saved[0].items())
    log = tmp_path / "0" / "log.island_0.jsonl"
    by_ledger = sum(event["comm"].get("outer", {}).get("wire_bytes", 0) for event in read_events(log))
    assert by_ledger > 50_000
    assert all(nbytes > by_ledger for nbytes in sent)  # the ledger counts no frames, and no rendezvous


def test_machines_with_other_data_say_so(lab: Lab, tmp_path: Path) -> None:
    corpora = (_corpus(tmp_path / "apples", "apple"), _corpus(tmp_path / "pears", "pearl"))
    for status, text in _run_both_machines(lab, tmp_path, corpora):
        assert status == 2, text
        assert re.search(r"error: islands 0 and 1 do not agree: .*(--vocab-file|--train-data-path)", text), text
