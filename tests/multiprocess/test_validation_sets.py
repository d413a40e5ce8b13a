"""Validation sets that are read whole, apart, again and again, or before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.data.build import build_datasets
from tests.support.corpus import VOCAB_SIZE, tiny_flags, write_documents
from tests.support.train import train
from tests.unit.data.cases import flags

pytestmark = pytest.mark.multiprocess

SMALL, LARGE = "small", "large"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_documents(folder / "train")
    write_documents(folder / SMALL, documents=3, seed=1)
    write_documents(folder / LARGE, documents=5, seed=2)
    return folder


def run(folder: Path, log: Path, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """The events of a run that is evaluated every second of 4 iterations."""
    values: dict[str, Any] = {
        "data_path": None,
        "split": None,
        "train_data_path": folder / "train",
        "valid_data_path": f"{folder / SMALL} {folder / LARGE}",
        "train_iters": 4,
        "eval_interval": 2,
        "eval_iters": 2,
        "fp64": True,
        "log_json_file": log,
        **changes,
    }
    words = [word for flag in tiny_flags(folder / "train", **values) for word in flag.split(" ")]
    train(ranks, words)
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]]


def losses(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(event["iteration"], event["lm_loss"]) for event in events if event["kind"] == "validation"]


def samples_of(path: Path) -> int:
    """Samples of 16 tokens in a file, by the data set's own count."""
    data = flags(train_data_path=[str(path)], sample_order="lazy")
    train_set, _, _ = build_datasets(
        data,
        seq_length=16,
        seed=1,
        train_valid_test_num_samples=[None, 0, 0],
        eod_token=VOCAB_SIZE,
        vocab_size=None,
    )
    assert train_set is not None
    return len(train_set)


def test_sets_are_read_whole_and_apart_on_any_layout(folder: Path, tmp_path: Path) -> None:
    """Each loss is that of the set alone, read sample by sample; two replicas that share the samples agree."""
    flags: dict[str, Any] = {"multiple_validation_sets": True, "full_validation": True, "eval_at_start": True}
    events = run(folder, tmp_path / "apart.jsonl", **flags)
    evaluations = [event for event in events if event["kind"] == "validation"]
    assert [event["iteration"] for event in evaluations] == [0, 2, 4, 4]
    for event in evaluations:
        assert list(event["sets"]) == [SMALL, LARGE]
        means = [values["lm_loss"] for values in event["sets"].values()]
        assert event["lm_loss"] == pytest.approx(sum(means) / 2, abs=1e-12)
    sizes = {name: samples_of(folder / name) for name in (SMALL, LARGE)}
    assert all(count % 4 for count in sizes.values())  # batches of four have to be filled up
    assert evaluations[-1]["samples"] == sum(sizes.values())
    assert [event["epoch"] for event in events if event["kind"] == "train"][-1] == 16 / samples_of(folder / "train")
    for name, count in sizes.items():
        alone: dict[str, Any] = {
            "valid_data_path": folder / name,
            "eval_iters": count,
            "global_batch_size": 1,
            "train_iters": 1,
        }
        losses_alone = losses(run(folder, tmp_path / f"{name}.jsonl", eval_at_start=True, **alone))
        assert losses_alone[0][0] == 0
        assert losses_alone[0][1] == pytest.approx(evaluations[0]["sets"][name]["lm_loss"], abs=1e-12)
    shared = run(folder, tmp_path / "shared.jsonl", ranks=2, **flags)
    for mine, theirs in zip(evaluations, (record for record in shared if record["kind"] == "validation"), strict=True):
        for name in sizes:
            assert mine["sets"][name]["lm_loss"] == pytest.approx(theirs["sets"][name]["lm_loss"], abs=1e-10)


def test_a_fixed_subset_is_the_first_samples_and_resumes(folder: Path, tmp_path: Path) -> None:
    """Without training (a learning rate of 0) each evaluation gives the same loss; the moving set does not."""
    still: dict[str, Any] = {"lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0, "train_iters": 6}
    fixed = losses(run(folder, tmp_path / "fixed.jsonl", fixed_validation=True, eval_at_start=True, **still))
    moving = losses(run(folder, tmp_path / "moving.jsonl", eval_at_start=True, **still))
    assert [iteration for iteration, _ in fixed] == [0, 2, 4, 6, 6]
    assert len({loss for _, loss in fixed}) == 1
    assert len({loss for _, loss in moving}) > 1
    assert moving[:2] == [(0, fixed[0][1]), (2, fixed[0][1])]


@pytest.mark.parametrize("fixed", [True, False])
def test_a_resumed_run_is_evaluated_like_an_uninterrupted_one(folder: Path, tmp_path: Path, fixed: bool) -> None:
    flags: dict[str, Any] = {"fixed_validation": fixed or None, "multiple_validation_sets": True, "train_iters": 6}
    expected = losses(run(folder, tmp_path / "whole.jsonl", eval_at_start=True, **flags))
    saved = tmp_path / "saved"
    run(folder, tmp_path / "parts.jsonl", eval_at_start=True, save=saved, exit_interval=3, **flags)
    resumed = losses(run(folder, tmp_path / "parts.jsonl", eval_at_start=True, load=saved, **flags))
    assert resumed == expected


def test_mock_data_need_no_files_and_are_alike_on_any_layout(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"data_path": None, "mock_data": True, "fp64": True, "train_iters": 3, "vocab_size": 60}
    logs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    train(1, tiny_flags(tmp_path, **flags, log_json_file=logs[0]))
    train(2, tiny_flags(tmp_path, **flags, log_json_file=logs[1], tensor_model_parallel_size=2))
    single, two = (
        [event["lm_loss"] for event in map(json.loads, log.read_text().split("\n")[:-1]) if "lm_loss" in event]
        for log in logs
    )
    assert len(single) == 5  # three iterations, validation and test
    assert single == pytest.approx(two, abs=1e-10)
