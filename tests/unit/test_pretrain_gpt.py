"""pretrain_gpt.py trains, unless Optimus-CC's flag asks for the losses of checkpoints."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from megatron.evaluation import sweep_command
from megatron.training import pretrain

SCRIPT = str(Path(__file__).resolve().parents[2] / "pretrain_gpt.py")
TRAINS = ["--num-layers 2", "--get-val-ppls false --lr 1", "--get_val_ppls=False", "--val_start_iteration 3", ""]
MEASURES = ["--get_val_ppls --src_ckpt_path c", "--lr 1 --get-val-ppls", "--GET_VAL_PPLS true", "--get-val-ppls=true"]


@pytest.mark.parametrize(
    ("words", "program"), [*((w, "train") for w in TRAINS), *((w, "measure") for w in MEASURES)], ids=str
)
def test_program_of_a_command_line(words: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("megatron.base.start.start_program", started.append)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *words.split()])
    runpy.run_path(SCRIPT, run_name="__main__")
    assert started == [pretrain.__name__ if program == "train" else sweep_command.__name__]


def test_a_configuration_file_cannot_request_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("get_val_ppls: true\n")
    assert pretrain.main(["--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --get-val-ppls")
    assert "use val_check_gpt.py" in error
