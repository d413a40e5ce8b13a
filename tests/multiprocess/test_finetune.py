"""Command lines of fine-tuning: each task on one process, and what is refused with one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.tasks import TASKS, parse_task
from megatron.evaluation.command import asked_task, main
from tests.support.corpus import tiny_flags, write_documents
from tests.support.tasks import task_flags, write_race, write_tsv, write_vocabulary
from tests.support.train import train

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def _files(task: str, folder: Path, train: int = 8, valid: int = 6) -> tuple[list[Path], list[Path]]:
    if task == "RACE":
        return [write_race(folder / "train", train // 2)], [write_race(folder / "dev", valid // 2, seed=1)]
    return [write_tsv(folder / "train.tsv", task, train)], [write_tsv(folder / "dev.tsv", task, valid, 1)]


@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_trained_and_judged_by_its_metrics(
    task: str, vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, valid = _files(task, tmp_path)
    log = tmp_path / "log.jsonl"
    flags = task_flags(vocabulary, task.lower(), train, valid, epochs=1, log_json_file=log)
    assert main(flags) == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    (found,) = (event for event in events if event["kind"] == "validation")
    loss = "regression_loss" if task == "STS-B" else "classification_loss"
    assert found[loss] > 0
    ((name, scores),) = found["scores"].items()
    assert name == valid[0].name
    assert tuple(scores) == TASKS[task].metrics
    printed = capsys.readouterr().out
    assert f" metrics of {name} at iteration {found['iteration']} | {TASKS[task].metrics[0]}: " in printed
    assert "PPL" not in printed


def test_a_model_learns_what_its_files_say(vocabulary: Path, tmp_path: Path) -> None:
    train, valid = _files("SST-2", tmp_path, train=256, valid=40)
    log = tmp_path / "log.jsonl"
    sizes = {"epochs": 6, "micro_batch_size": 16, "global_batch_size": 16, "hidden_size": 32, "log_interval": 16}
    assert main(task_flags(vocabulary, "SST-2", train, valid, log_json_file=log, **sizes)) == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    accuracies = [event["scores"]["dev.tsv"]["accuracy"] for event in events if event["kind"] == "validation"]
    assert len(accuracies) == 6
    assert accuracies[-1] > 0.9


def _refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(flags) == 2
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("error: ")]) == 1
    assert not any("Traceback" in line for line in said)
    return next(line for line in said if line.startswith("error: "))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "SQuAD"}, "--task SQuAD: choose from RACE, MNLI"),
        ({"valid_data": None}, "not given but required for --task RTE: --valid-data"),
        ({"train_data": None}, "not given but required for --task RTE: --train-data"),
        ({"epochs": None}, "not given but required for --task RTE: --epochs"),
        ({"epochs": 0}, "--epochs 0 evaluates a checkpoint: give --load FOLDER"),
        ({"train_iters": 5}, "--train-iters: a task is trained for --epochs over --train-data"),
        ({"data_path": "x"}, "--data-path: a task reads labelled files"),
        ({"global_batch_size": 16}, "--train-data holds 8 samples, less than one global batch of 16"),
        ({"task_head": "choice"}, "--task-head: --task says it; leave it out"),
        ({"pretrained_checkpoint": "/nowhere"}, "--pretrained-checkpoint /nowhere holds no checkpoint"),
        ({"keep_checkpoints": 2}, "--keep-checkpoints needs --save FOLDER"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 9, "vocab_file": None}, "has no [MASK], [CLS] and [SEP]"),
        ({"qa_data_dev": "x"}, "--qa-data-dev x: retrieval tasks are not available"),
        ({"seq_length": 4}, "--seq-length 4 leaves no room for texts"),
    ],
)
def test_what_cannot_be_done_is_refused_with_one_line(
    changes: dict[str, object], message: str, vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, valid = _files("RTE", tmp_path)
    task = str(changes.pop("task", "RTE"))
    assert message in _refused(task_flags(vocabulary, task, train, valid, **changes), capsys)


def test_a_vocabulary_without_separators_is_refused(
    vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, valid = _files("RTE", tmp_path)
    bare = tmp_path / "bare.txt"
    bare.write_text(vocabulary.read_text().replace("[CLS]\n", ""))
    said = _refused(task_flags(bare, "RTE", train, valid), capsys)
    assert said == f"error: --vocab-file {bare}: has no [CLS], so it is no BERT vocab.txt"


def test_a_checkpoint_of_another_kind_is_refused_with_what_it_is_for(
    vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = tmp_path / "gpt"
    train(1, tiny_flags(write_documents(tmp_path / "texts", documents=10), train_iters=1, save=gpt))
    files = _files("RTE", tmp_path)
    for flag, wanted in (("pretrained_checkpoint", "bert"), ("load", "bert for classification of 2")):
        changes: dict[str, Any] = {flag: gpt}
        said = _refused(task_flags(vocabulary, "RTE", *files, **changes), capsys)
        assert f"{gpt} holds a model of kind gpt, not {wanted}; " in said
    saved = tmp_path / "saved"
    assert main(task_flags(vocabulary, "RTE", *files, epochs=1, save=saved)) == 0
    capsys.readouterr()
    mnli = _files("MNLI", tmp_path)
    kind = "holds a model of kind bert for classification of 2, not"
    said = _refused(task_flags(vocabulary, "MNLI", *mnli, load=saved), capsys)
    assert f"--load {saved} {kind} bert for classification of 3; go on with it by its --task" in said
    said = _refused(task_flags(vocabulary, "MNLI", *mnli, pretrained_checkpoint=saved), capsys)
    assert f"--pretrained-checkpoint {saved} {kind} bert; go on with it by its --task" in said
    said = _refused(["--task", "LAMBADA", "--valid-data", "x", "--load", str(saved)], capsys)
    assert "No such file" in said or "only gpt generates text" in said
    said = _refused(task_flags(vocabulary, "RTE", *files, load=saved, hidden_size=32), capsys)
    assert "--hidden-size: 32 was given but the checkpoint has 16; leave the flag out" in said


def test_what_pretraining_evaluates_is_noted_and_spellings_do_not_matter(vocabulary: Path) -> None:
    flags = task_flags(vocabulary, "sst_2", [Path("a")], [Path("b")], eval_iters=5, eval_interval=7)
    run, given, task = parse_task(flags)
    assert (given.task, task) == ("SST-2", TASKS["SST-2"])
    assert (
        "--eval-interval, --eval-iters: no effect, the whole of --valid-data is evaluated after each epoch" in run.notes
    )
    assert asked_task(["--TASK=rte", "--x"]) == "rte"
    assert asked_task(["--task"]) == ""
