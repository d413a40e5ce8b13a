"""The example of DeBERTa and GPT-2 over slow links: from a Hugging Face folder and GLUE's files to scores after each
epoch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import REPO
from tests.support.combinations import mark_repeats
from tests.support.deberta import write_deberta
from tests.support.gpt2 import write_gpt2
from tests.support.tasks import write_tsv

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.usefixtures("warm")]


def _run(folder: Path, **settings: str) -> str:
    variables = {"MODEL": "hf", "DATA": "data", "OUT": "out", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(REPO / "examples" / "finetune_deberta_aqsgd.sh")],
        env={**os.environ, **variables, **settings}, capture_output=True, text=True, timeout=200, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "length", "epochs", "learns", "remembered"),
    mark_repeats(
        [
            # Numbers of 32 positions, of two bytes.
            pytest.param("deberta", 16, 6, True, "128 samples of 1.02 kB: 131 kB of memory", id="deberta"),
            pytest.param("gpt", 32, 2, False, "128 samples of 2.05 kB: 262 kB of memory", id="gpt, two epochs"),
            pytest.param("gpt", 32, 8, True, "128 samples of 2.05 kB: 262 kB of memory", id="gpt"),
        ],
        keep=["deberta", "gpt, two epochs"],  # too few for GPT-2 to learn, enough for the script and its messages
    ),
)
def test_it_learns_with_compressed_activations(
    kind: str, length: int, epochs: int, learns: bool, remembered: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    write_deberta(tmp_path / "hf") if kind == "deberta" else write_gpt2(tmp_path / "hf")
    write_tsv(tmp_path / "data" / "train.tsv", "CoLA", 128)
    write_tsv(tmp_path / "data" / "dev.tsv", "CoLA", 21, 1)
    sizes = {"EPOCHS": str(epochs), "BATCH": "8", "MICRO_BATCH": "2", "SEQ_LENGTH": str(length)}
    text = _run(tmp_path, KIND=kind, LR="3e-3", FLAGS="--check-replicas 8", **sizes)
    scores = re.findall(r"metrics of dev.tsv at iteration (\d+) \| Matthews: (\S+) \|", text)
    assert len(scores) == epochs, text
    if learns:
        assert float(scores[-1][1]) > 0.5, text
    # Said before the first iteration.
    note = f"each end of a boundary will remember {remembered}"
    assert note in text
    assert text.index(note) < text.index(" iteration ")
    # The second visit of the samples sends changes of three bits.
    ratios = re.findall(r"pp-forward: \S+ kB of \S+ kB \((\S+)x\)", text)
    assert float(ratios[-1]) > 8 > 3 > float(ratios[0])


def test_each_kind_has_its_own_learning_rate(tmp_path: Path) -> None:
    for kind, rate in (("deberta", "2.5e-6"), ("gpt", "5e-5")):
        assert f" --lr {rate} " in _run(tmp_path, KIND=kind, PYTHON="echo")
    assert " --lr 1e-3 " in _run(tmp_path, KIND="gpt", PYTHON="echo", LR="1e-3")
