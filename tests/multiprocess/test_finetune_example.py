"""The fine-tuning example: from a Hugging Face folder and a text to a lower perplexity, then on from its checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.data.preprocess.vocab_command import train
from tests.support.cli import REPO

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.usefixtures("warm")]


def _start(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "GPT2": str(folder / "hf"), "TEXT": str(folder / "text.txt"), "OUT": str(folder / "out"),
        "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "LR": "3e-3",
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(REPO / "examples" / "finetune_gpt2_aqsgd.sh")],
        env={**os.environ, **variables, **settings}, capture_output=True, text=True, timeout=200, cwd=folder,
    )  # fmt: skip


def _run(folder: Path, **settings: str) -> str:
    done = _start(folder, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_it_trains_with_compressed_activations_and_goes_on(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    chain = {word: random.choice(60, 3) for word in range(60)}
    word, words = 0, list[str]()
    for _ in range(5000):
        word = int(random.choice(chain[word]))
        words.append(f"w{word}" + ("\n" if len(words) % 10 == 9 else ""))
    (tmp_path / "text.txt").write_text(" ".join(words))
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": " ".join(words)}) + "\n")
    train([tmp_path / "corpus.jsonl"], tmp_path / "hf", 330)
    size = len(json.loads((tmp_path / "hf" / "vocab.json").read_text()))
    torch.manual_seed(1)
    # As of a model with a vocabulary that was padded at its creation.
    shape: dict[str, Any] = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": size + 7}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path / "hf")
    _refused(tmp_path)
    # Paths may be relative to the caller's folder.
    text = _run(tmp_path, EPOCHS="1", GPT2="hf", TEXT="text.txt", OUT="out")
    before, after = (float(x) for x in re.findall(r"ppl: (\S+) \| adjusted", text))
    assert after < before / 3, text
    assert "pp-forward=delta" in text
    resumed = _run(tmp_path, EPOCHS="2")
    assert "loaded the checkpoint of iteration 36" in resumed
    # The second visit of the samples sends changes of four bits.
    ratios = re.findall(r"pp-forward: \S+ kB of \S+ kB \((\S+)x\)", resumed)
    assert float(ratios[-1]) > 7
    assert float(re.findall(r"ppl: (\S+) \| adjusted", resumed)[1]) < after
    (tmp_path / "other.txt").write_text("w1 w2 w3\n" * 400)
    other = _start(tmp_path, TEXT="other.txt")
    assert other.returncode
    assert "was made of other texts; name another OUT" in other.stderr


def _refused(folder: Path) -> None:
    """Unusable texts are refused in a line, and leave nothing behind for a later run."""
    (folder / "empty.txt").write_text("")
    (folder / "line.txt").write_text("w1 w2 w3")
    (folder / "latin.txt").write_bytes(b"w1 \xff")
    for name, message in (
        ("gone.txt", "No such file"), ("empty.txt", "leaves no text"), ("line.txt", "leaves no text to train on"),
        ("latin.txt", "is not UTF-8"),
    ):  # fmt: skip
        done = _start(folder, TEXT=name)
        assert done.returncode
        (error,) = [line for line in done.stderr.splitlines() if "error" in line]
        assert error.startswith("finetune_gpt2_aqsgd: error: TEXT=")
        assert message in error
        assert not list((folder / "out").iterdir())
