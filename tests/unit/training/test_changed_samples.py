"""Warnings of a resumed run whose samples differ from those of its checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.changed_samples import sample_warnings
from tests.support.tiny import tiny_config

ORDER = "the run goes on at sample 1,200 of an order that it has not followed so far; samples that it has seen may"
INCOMPARABLE = "the 1,200 consumed samples stand, but losses before and after cannot be compared"


@pytest.mark.parametrize(
    ("section", "changes", "fragments"),
    [
        ("data", {"data_path": ["0.5", "a", "0.5", "b"]}, [f"--data-path 0.5 a 0.5 b; {{}} other documents, {ORDER}"]),
        ("data", {"split": "9,1,0"}, [f"--split 9,1,0; {{}} 969,30,1: {ORDER}"]),
        ("data", {"dataloader_type": "cyclic"}, [f"--dataloader-type cyclic; {{}} --dataloader-type single: {ORDER}"]),
        ("data", {"dataloader_type": "single"}, []),
        ("data", {"eod_mask_loss": True}, [f"--eod-mask-loss; {{}} no --eod-mask-loss: {INCOMPARABLE}"]),
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
def test_each_changed_flag_has_a_line(section: str, changes: dict[str, Any], fragments: list[str]) -> None:
    saved = tiny_config({}, 1).to_dict()
    lines = sample_warnings(tiny_config({section: changes}, 1), saved, 1200)
    assert len(lines) == len(fragments), lines
    for line, expected in zip(lines, fragments, strict=True):
        for fragment in expected.split("{}"):
            assert fragment.strip() in line
        assert line.startswith("warning: this run has --")
        assert "its checkpoint was saved with" in line


def test_fields_missing_from_an_older_checkpoint_are_not_compared() -> None:
    assert sample_warnings(tiny_config({"training": {"seed": 8}}, 1), {"data": {}, "model": {}}, 1200) == []


def test_a_checkpoint_with_the_earlier_cyclic_order_gives_a_warning() -> None:
    """Earlier versions shuffled all passes together; their configurations lack later flags."""
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
