"""Warnings of a run that goes on with other samples than its checkpoint was trained on."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.changed_samples import sample_warnings
from tests.support.tiny import tiny_config

ORDER = "the run goes on at sample 1,200 of an order that it has not followed so far; samples that it has seen may"
STAND = "the 1,200 consumed samples stand, but losses before and after cannot be compared"


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("data", {"data_path": ["0.5", "a", "0.5", "b"]}, [f"--data-path 0.5 a 0.5 b; {{}} other documents, {ORDER}"]),
        ("data", {"split": "9,1,0"}, [f"--split 9,1,0; {{}} 969,30,1: {ORDER}"]),
        ("data", {"dataloader_type": "cyclic"}, [f"--dataloader-type cyclic; {{}} --dataloader-type single: {ORDER}"]),
        ("data", {"dataloader_type": "single"}, []),
        ("data", {"eod_mask_loss": True}, [f"--eod-mask-loss; {{}} no --eod-mask-loss: {STAND}"]),
        (
            "data",
            {"eod_mask_loss": True, "reset_attention_mask": True},
            ["--reset-attention-mask;", "--eod-mask-loss;"],
        ),
        ("data", {"num_workers": 7}, []),
        ("training", {"seed": 8}, [f"--seed 8; {{}} --seed 7: {ORDER}"]),
        ("model", {"seq_length": 8}, ["--seq-length 8; {} the consumed samples had 16 tokens each"]),
    ],
)
def test_each_flag_that_changes_the_samples_has_a_line(section: str, changes: dict[str, Any], words: list[str]) -> None:
    saved = tiny_config({}, 1).to_dict()
    lines = sample_warnings(tiny_config({section: changes}, 1), saved, 1200)
    assert len(lines) == len(words), lines
    for line, expected in zip(lines, words, strict=True):
        for part in expected.split("{}"):
            assert part.strip() in line
        assert line.startswith("warning: this run has --")
        assert "its checkpoint was saved with" in line


def test_what_an_older_checkpoint_lacks_is_not_compared() -> None:
    assert sample_warnings(tiny_config({"training": {"seed": 8}}, 1), {"data": {}, "model": {}}, 1200) == []


def test_a_checkpoint_of_the_earlier_cyclic_order_is_warned_of() -> None:
    """Its passes were shuffled together; its configuration lacks flags that have come soon after."""
    cyclic = tiny_config({"data": {"dataloader_type": "cyclic"}}, 1)
    today = cyclic.to_dict()
    earlier = {**today, "training": {name: x for name, x in today["training"].items() if name != "max_skipped_steps"}}
    assert sample_warnings(cyclic, today, 1200) == []
    (line,) = sample_warnings(cyclic, earlier, 1200)
    assert line.startswith("warning: this run has --dataloader-type cyclic, which shuffles each pass by itself; ")
    assert f"its checkpoint was saved with an earlier version's, which shuffled all passes together: {ORDER}" in line
    single = tiny_config({}, 1)
    assert sample_warnings(single, {**earlier, "data": single.to_dict()["data"]}, 1200) == []
    (line,) = sample_warnings(single, earlier, 1200)
    assert "--dataloader-type single; its checkpoint was saved with --dataloader-type cyclic" in line
