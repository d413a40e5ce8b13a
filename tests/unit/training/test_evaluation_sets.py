"""The sets of an evaluation, and sets too small for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.data.build import Dataset, build_datasets
from megatron.training.evaluation import validation_sets
from tests.support.tiny import tiny_config
from tests.unit.data.cases import write


def _sets(sizes: dict[str, int], folder: Path, **validation: Any) -> list[tuple[str, int]]:
    """Names of the sets of an evaluation of files of so many tokens, and the global batches of each."""
    paths = [write(folder / name, [tokens], 0) for name, tokens in sizes.items()]
    apart = validation.pop("apart")
    data = {
        "data_path": [],
        "train_data_path": paths,
        "valid_data_path": paths,
        "sample_order": "lazy",
        "multiple_validation_sets": apart,
    }
    config = tiny_config({"data": data, "validation": {"full_validation": True, **validation}}, world_size=1)
    valid: Dataset | None = build_datasets(
        config.data,
        seq_length=8,
        seed=1,
        train_valid_test_num_samples=[8, None, 0],
        eod_token=-1,
        vocab_size=None,
    )[1]
    return [(one.name, one.rounds) for one in validation_sets(config, valid)]


@pytest.mark.parametrize("apart", [False, True])
def test_a_set_without_a_sample_is_refused_by_name(tmp_path: Path, apart: bool) -> None:
    sizes = {"long": 37 * 8 + 1, "short": 5} if apart else {"short": 5}
    with pytest.raises(UserError) as caught:
        _sets(sizes, tmp_path, apart=apart)
    (line,) = str(caught.value).splitlines()
    named = "validation set short" if apart else f"validation set {tmp_path / 'short'}"
    assert line.startswith(f"--full-validation: the {named} has no sample of --seq-length ")
    assert _sets(sizes, tmp_path, apart=apart, eval_iters=0) == []


def test_a_blend_whose_files_are_all_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"validation set {tmp_path / 'a'}, {tmp_path / 'b'} has no sample"):
        _sets({"a": 5, "b": 6}, tmp_path, apart=False)


def test_sets_with_samples_are_read_whole(tmp_path: Path) -> None:
    sizes = {"long": 37 * 8 + 1, "short": 9}
    assert _sets(sizes, tmp_path, apart=True) == [("long", 10), ("short", 1)]
    assert _sets(sizes | {"empty": 3}, tmp_path, apart=False) == [("", 10)]
