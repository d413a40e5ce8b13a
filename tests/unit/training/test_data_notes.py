"""What a run says at its start of data that are small for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.data.build import Datasets, build_datasets
from megatron.training.data_notes import data_notes, epochs_of_run
from tests.support.tiny import tiny_config
from tests.unit.data.cases import write

BATCH = 4


def config(eval_iters: int = 2, **data: Any) -> RunConfig:
    changes = {"validation": {"eval_iters": eval_iters}, "data": {"data_path": [], **data}}
    made = tiny_config(changes, world_size=1)
    assert made.training.global_batch_size == BATCH
    return made


def samples(folder: Path, name: str, count: int) -> str:
    """A file of so many samples of 8 tokens."""
    return write(folder / name, [count * 8 + 1], 0)


def datasets(run: RunConfig, drawn: tuple[int, int, int]) -> Datasets:
    return build_datasets(
        replace(run.data, sample_order="lazy"),
        seq_length=8,
        seed=1,
        train_valid_test_num_samples=drawn,
        eod_token=-1,
        vocab_size=None,
    )


def test_nothing_is_said_of_data_that_suffice(tmp_path: Path) -> None:
    paths: dict[str, Any] = {f"{name}_data_path": [samples(tmp_path, name, 61)] for name in ("train", "valid", "test")}
    run = config(**paths)
    built = datasets(run, (61, 8, 8))
    assert data_notes(run, built) == []
    assert built[0] is not None
    assert epochs_of_run(built[0]) == "1.0 epochs of 61"


def test_epochs_that_repeat_are_counted(tmp_path: Path) -> None:
    run = config(eval_iters=0, train_data_path=[samples(tmp_path, "a", 61)])
    assert data_notes(run, datasets(run, (104, 0, 0))) == ["training repeats its data: 1.7 epochs of 61 samples"]


def test_the_data_sets_of_a_blend_that_repeat_are_named(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["valid", "test"])
def test_more_evaluation_samples_than_there_are(tmp_path: Path, name: str) -> None:
    sizes = {"train": 61, "valid": 61, "test": 61} | {name: 10}
    run = config(eval_iters=5, **{f"{part}_data_path": [samples(tmp_path, part, n)] for part, n in sizes.items()})
    (note,) = data_notes(run, datasets(run, (61, 20, 20)))
    assert note == (
        f"--eval-iters 5 x --global-batch-size 4 draws 20 samples, but the {'validation' if name == 'valid' else name} "
        "set has 10, so each evaluation reads it 2.0 times; give --eval-iters 2"
    )


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_sets_shorter_than_a_batch(tmp_path: Path, name: str) -> None:
    sizes = {"train": 61, "valid": 61, "test": 61} | {name: 3}
    run = config(eval_iters=1, **{f"{part}_data_path": [samples(tmp_path, part, n)] for part, n in sizes.items()})
    notes = data_notes(run, datasets(run, (60, 4, 4)))
    called = {"train": "training", "valid": "validation", "test": "test"}[name]
    assert notes[0].startswith(f"the {called} set has 3 samples, fewer than a global batch of 4: ")
    assert len(notes) == (2 if name == "train" else 1)
