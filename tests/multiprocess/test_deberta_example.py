"""The example of DeBERTa over slow links: from a Hugging Face folder and GLUE's files to scores after each epoch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import REPO
from tests.support.deberta import write_deberta
from tests.support.tasks import write_tsv

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.timeout(300)
def test_it_learns_with_compressed_activations(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_deberta(tmp_path / "hf")
    write_tsv(tmp_path / "data" / "train.tsv", "CoLA", 128)
    write_tsv(tmp_path / "data" / "dev.tsv", "CoLA", 21, 1)
    variables = {
        "MODEL": "hf", "DATA": "data", "OUT": "out", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "LR": "3e-3",
        "EPOCHS": "6", "BATCH": "8", "MICRO_BATCH": "2", "SEQ_LENGTH": "16", "FLAGS": "--check-replicas 8",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(REPO / "examples" / "finetune_deberta_aqsgd.sh")],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    scores = re.findall(r"metrics of dev.tsv at iteration (\d+) \| Matthews: (\S+) \|", text)
    assert len(scores) == 6, text
    assert float(scores[-1][1]) > 0.5, text
    # 16 numbers of 32 positions, of two bytes; said before the first iteration.
    said = "each end of a boundary will remember 128 samples of 1.02 kB: 131 kB of memory"
    assert said in text
    assert text.index(said) < text.index(" iteration ")
    # The second visit of the samples sends changes of three bits.
    ratios = re.findall(r"pp-forward: \S+ kB of \S+ kB \((\S+)x\)", text)
    assert float(ratios[-1]) > 8 > 3 > float(ratios[0])
