"""Validation sets, also some that are too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.data.build import build_datasets
from megatron.training.evaluation import validation_sets
from tests.support.tiny import tiny_config
from tests.unit.data.cases import write


def _sets(sizes: dict[str, int], folder: Path, **validation: Any) -> list[tuple[str, int]]:
    """Name and global batches of each validation set, for files with these numbers of tokens."""
    paths = [write(folder / name, [tokens], 0) for name, tokens in sizes.items()]
    separate = validation.pop("separate")
    data = {
        "data_path": [],
        "train_data_path": paths,
        "valid_data_path": paths,
        "sample_order": "lazy",
        "multiple_validation_sets": separate,
    }
    config = tiny_config({"data": data, "validation": {"full_validation": True, **validation}}, world_size=1)
    counts = [8, None, 0]
    _, valid, _ = build_datasets(
        config.data, seq_length=8, seed=1, train_valid_test_num_samples=counts, eod_token=-1, vocab_size=None
    )
    return [(validation_set.name, validation_set.num_batches) for validation_set in validation_sets(config, valid)]


@pytest.mark.parametrize("separate", [False, True])
def test_a_set_without_a_sample_is_refused(tmp_path: Path, separate: bool) -> None:
    sizes = {"long": 37 * 8 + 1, "short": 5} if separate else {"short": 5}
    with pytest.raises(UserError) as caught:
        _sets(sizes, tmp_path, separate=separate)
    (line,) = str(caught.value).splitlines()
    named = "validation set short" if separate else f"validation set {tmp_path / 'short'}"
    assert line.startswith(f"--full-validation: the {named} has no sample of --seq-length ")
    assert _sets(sizes, tmp_path, separate=separate, eval_iters=0) == []


def test_a_blend_of_short_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"validation set {tmp_path / 'a'}, {tmp_path / 'b'} has no sample"):
        _sets({"a": 5, "b": 6}, tmp_path, separate=False)


def test_full_validation_reads_each_set_once(tmp_path: Path) -> None:
    sizes = {"long": 37 * 8 + 1, "short": 9}
    assert _sets(sizes, tmp_path, separate=True) == [("long", 10), ("short", 1)]
    assert _sets(sizes | {"empty": 3}, tmp_path, separate=False) == [("", 10)]
