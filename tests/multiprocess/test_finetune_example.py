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

from tests.support.cli import REPO
from tools.quickstart.train_bpe import train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def _run(folder: Path, **settings: str) -> str:
    variables = {
        "GPT2": str(folder / "hf"), "TEXT": str(folder / "text.txt"), "OUT": str(folder / "out"),
        "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "LR": "3e-3",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(REPO / "examples" / "finetune_gpt2_aqsgd.sh")],
        env={**os.environ, **variables, **settings}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
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
    train(tmp_path / "corpus.jsonl", tmp_path / "hf", 330)
    size = len(json.loads((tmp_path / "hf" / "vocab.json").read_text()))
    torch.manual_seed(1)
    shape: dict[str, Any] = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": size}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path / "hf")
    text = _run(tmp_path, EPOCHS="1")
    before, after = (float(x) for x in re.findall(r"ppl: (\S+) \| adjusted", text))
    assert after < before / 3, text
    assert "pp-forward=delta" in text
    more = _run(tmp_path, EPOCHS="2")
    assert "loaded the checkpoint of iteration 36" in more
    # The second visit of the samples sends changes of four bits.
    ratios = re.findall(r"pp-forward: \S+ kB of \S+ kB \((\S+)x\)", more)
    assert float(ratios[-1]) > 7
    assert float(re.findall(r"ppl: (\S+) \| adjusted", more)[1]) < after
