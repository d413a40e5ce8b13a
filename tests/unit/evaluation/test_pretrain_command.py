"""pretrain_gpt.py trains, unless Optimus-CC's flag asks for the losses of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.evaluation import pretrain_command, sweep_command
from megatron.training import pretrain

TRAINS = ["--num-layers 2", "--get-val-ppls false --lr 1", "--get_val_ppls=False", "--val_start_iteration 3", ""]
MEASURES = ["--get_val_ppls --src_ckpt_path c", "--lr 1 --get-val-ppls", "--GET_VAL_PPLS true", "--get-val-ppls=true"]


@pytest.mark.parametrize(
    ("words", "program"), [*((w, "train") for w in TRAINS), *((w, "measure") for w in MEASURES)], ids=str
)
def test_what_runs(words: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str]]] = []

    def program_of(name: str) -> Callable[[list[str]], int]:
        def run(argv: list[str]) -> int:
            ran.append((name, argv))
            return 3

        return run

    monkeypatch.setattr(pretrain, "main", program_of("train"))
    monkeypatch.setattr(sweep_command, "main", program_of("measure"))
    assert pretrain_command.main(words.split()) == 3
    assert ran == [(program, words.split())]


def test_in_a_file_it_cannot_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("get_val_ppls: true\n")
    assert pretrain_command.main(["--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --get-val-ppls")
    assert "use val_check_gpt.py" in error
