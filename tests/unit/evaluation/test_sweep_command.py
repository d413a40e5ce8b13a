"""Flags of val_check_gpt.py, including Optimus-CC's names, and the checkpoints that they select."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.config.validation import ValidationConfig
from megatron.evaluation import sweep_command
from megatron.evaluation.sweep_command import (
    OLD_NAMES,
    SweepFlags,
    check_flags,
    compare_samples,
    count_samples,
    list_iterations,
    output_path,
)
from megatron.inference.flags import parse_flags


def _parsed(words: str) -> tuple[SweepFlags, str, list[str]]:
    sections = {"sweep": SweepFlags, "data": DataConfig}
    parsed = parse_flags(words.split(), sections, "val_check_gpt.py", "", OLD_NAMES)
    sweep = parsed.sections["sweep"]
    check_flags(sweep, parsed.explicit, parsed.notes.append)
    return sweep, parsed.sections["model"].load, parsed.notes


def test_old_names_mean_the_new_ones() -> None:
    sweep, load, notes = _parsed(
        "--get_val_ppls --src_ckpt_path c --val_start_iteration 1000 --val_target_iteration 9000 "
        "--val_ckpt_interval 500 --val_ppls_save_path losses --experiment_name mine --eval-iters 4 --fp16"
    )
    assert (load, sweep.first, sweep.last, sweep.step) == ("c", 1000, 9000, 500)
    assert output_path(load, sweep) == Path("losses/mine.json")
    assert notes[0].startswith("--get-val-ppls is known but has no effect here")
    assert notes[1] == "not needed, since the checkpoint holds the model: --fp16"
    config = RunConfig(
        validation=ValidationConfig(eval_iters=100), training=TrainingConfig(micro_batch_size=1, global_batch_size=8)
    )
    assert count_samples(sweep, config, 3) == 30
    assert count_samples(_parsed("--load c")[0], config, 1) == 800


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--load c --eval-iters 2 --eval-samples 3", "--eval-samples and --eval-iters exclude each other"),
        ("--load c --output o --val_ppls_save_path p", "--output and --val-ppls-save-path exclude each other"),
        ("--load c --src_ckpt_path d", "--load and --src-ckpt-path contradict each other"),
        ("--load c --eval-iters 0", "--eval-iters is 0; it must be at least 1"),
        ("--val_ckpt_interval 2", "--load is required"),
    ],
)
def test_contradicting_flags_are_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _parsed(words)


def test_a_name_without_a_folder_is_reported() -> None:
    assert _parsed("--load c --experiment_name e")[2] == ["--experiment-name: no effect without --val-ppls-save-path"]


def test_steps_count_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_command, "complete_iterations", lambda root: [300, 250, 200, 150, 100, 50])
    assert list_iterations("c", _parsed("--load c --first 50 --step 100")[0]) == [50, 150, 250]
    assert list_iterations("c", _parsed("--load c --step 100 --last 200")[0]) == [100, 200]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_samples_other_than_those_of_the_run_are_noted(full: bool, several: bool) -> None:
    config = RunConfig(validation=ValidationConfig(full_validation=full))
    notes = compare_samples(config, DataConfig(multiple_validation_sets=several), 8)
    expected = [
        "note: the run had --full-validation; here only 8 samples are measured",
        "note: the run had --multiple-validation-sets; here the sets are measured together",
    ]
    assert notes == [line for line, differs in zip(expected, (full, several), strict=True) if differs]
