"""Notes at the start of a run on datasets too small for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.data.build import Datasets, build_datasets
from megatron.distributed.topology import single_process
from megatron.training.announce import summary
from megatron.training.data_notes import data_notes
from tests.support.tiny import tiny_config
from tests.unit.data.cases import write

BATCH = 4


def config(eval_iters: int = 2, **data: Any) -> RunConfig:
    changes = {"validation": {"eval_iters": eval_iters}, "data": {"data_path": [], **data}}
    run = tiny_config(changes, world_size=1)
    assert run.training.global_batch_size == BATCH
    return run


def samples(folder: Path, name: str, count: int) -> str:
    """A file of ``count`` samples of 8 tokens."""
    return write(folder / name, [count * 8 + 1], 0)


def datasets(run: RunConfig, drawn: tuple[int, int, int]) -> Datasets:
    data = replace(run.data, sample_order="lazy")
    return build_datasets(data, seq_length=8, seed=1, train_valid_test_num_samples=drawn, eod_token=-1, vocab_size=None)


def test_sufficient_data_give_no_notes(tmp_path: Path) -> None:
    run = config_with_sets(tmp_path, 2)
    built = datasets(run, (61, 8, 8))
    assert data_notes(run, built) == []
    text = summary(single_process(), 99, 128, built)
    assert text.splitlines()[2] == "samples: 61 train (1.0 epochs of 61), 8 validation, 8 test"


def test_repeated_epochs_are_counted(tmp_path: Path) -> None:
    run = config(eval_iters=0, train_data_path=[samples(tmp_path, "a", 61)])
    assert data_notes(run, datasets(run, (104, 0, 0))) == ["training repeats its data: 1.7 epochs of 61 samples"]
    small, large = samples(tmp_path, "small", 20), samples(tmp_path, "large", 500)
    run = config(eval_iters=0, train_data_path=["0.3", small, "0.7", large])
    (note,) = data_notes(run, datasets(run, (200, 0, 0)))
    assert note == f"training repeats its data: 3.0 epochs of 20 samples of {small}"


def test_a_split_without_validation_is_named(tmp_path: Path) -> None:
    path = samples(tmp_path, "data", 61)
    run = config(data_path=[path], split="100,0,0")
    (note,) = data_notes(run, datasets(run, (61, 8, 8)))
    assert note.startswith("--split 100,0,0 leaves no text for validation, so nothing is evaluated; ")
    assert data_notes(config(0, data_path=[path], split="100,0,0"), datasets(run, (61, 8, 8))) == []
    alone = config(train_data_path=[path])
    (note,) = data_notes(alone, datasets(alone, (61, 8, 8)))
    assert note.startswith("there is no --valid-data-path, so nothing is evaluated; ")


def config_with_sets(folder: Path, eval_iters: int, **sizes: int) -> RunConfig:
    """Sets of these sizes, and of 61 samples where no size is named."""
    sizes = {"train": 61, "valid": 61, "test": 61} | sizes
    paths = {f"{name}_data_path": [samples(folder, name, size)] for name, size in sizes.items()}
    return config(eval_iters, **paths)


@pytest.mark.parametrize("name", ["valid", "test"])
def test_evaluations_longer_than_their_set_are_reported(tmp_path: Path, name: str) -> None:
    run = config_with_sets(tmp_path, 5, **{name: 10})
    (note,) = data_notes(run, datasets(run, (61, 20, 20)))
    assert note == (
        f"--eval-iters 5 x --global-batch-size 4 draws 20 samples, but the {'validation' if name == 'valid' else name} "
        "set has 10, so each evaluation reads it 2.0 times; give --eval-iters 2"
    )


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_sets_shorter_than_a_batch_are_reported(tmp_path: Path, name: str) -> None:
    run = config_with_sets(tmp_path, 1, **{name: 3})
    notes = data_notes(run, datasets(run, (60, 4, 4)))
    called = {"train": "training", "valid": "validation", "test": "test"}[name]
    assert notes[0].startswith(f"the {called} set has 3 samples, fewer than a global batch of 4: ")
    assert len(notes) == (2 if name == "train" else 1)
