"""Command lines of fine-tuning: each task on a single process, and refusals in a single line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.config.tasks import TASKS, build_task_run, parse_task
from megatron.evaluation.command import main, requested_task
from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
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
    (validation,) = read_events(log, "validation")
    loss = "regression_loss" if task == "STS-B" else "classification_loss"
    assert validation[loss] > 0
    ((name, scores),) = validation["scores"].items()
    assert name == valid[0].name
    assert tuple(scores) == TASKS[task].metrics
    printed = capsys.readouterr().out
    assert f" metrics of {name} at iteration {validation['iteration']} | {TASKS[task].metrics[0]}: " in printed
    assert "PPL" not in printed


def test_a_model_learns_the_labels_of_its_files(vocabulary: Path, tmp_path: Path) -> None:
    train, valid = _files("SST-2", tmp_path, train=256, valid=40)
    log = tmp_path / "log.jsonl"
    sizes = {"epochs": 6, "micro_batch_size": 16, "global_batch_size": 16, "hidden_size": 32, "log_interval": 16}
    assert main(task_flags(vocabulary, "SST-2", train, valid, log_json_file=log, **sizes)) == 0
    accuracies = [event["scores"]["dev.tsv"]["accuracy"] for event in read_events(log, "validation")]
    assert len(accuracies) == 6
    assert accuracies[-1] > 0.9


def _refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(flags) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len([line for line in errors if line.startswith("error: ")]) == 1
    assert not any("Traceback" in line for line in errors)
    return next(line for line in errors if line.startswith("error: "))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "SQuAD"}, "--task SQuAD: choose from RACE, MNLI"),
        ({"valid_data": None}, "not given but required for --task RTE: --valid-data"),
        ({"train_data": None}, "not given but required for --task RTE: --train-data"),
        ({"epochs": None}, "not given but required for --task RTE: --epochs"),
        ({"epochs": 0}, "--epochs 0 evaluates a checkpoint: give --load FOLDER"),
        ({"train_iters": 5}, "--train-iters: a task is trained for --epochs over --train-data"),
        ({"data_path": "x"}, "--data-path: a task reads labeled files"),
        ({"global_batch_size": 16}, "--train-data holds 8 samples, less than one global batch of 16"),
        ({"model_type": "t5"}, "--model-type t5: tasks/main.py fine-tunes encoders and GPT; give --model-type bert"),
        ({"task_head": "choice"}, "--task-head: --task determines it; leave it out"),
        ({"pretrained_checkpoint": "/nowhere"}, "--pretrained-checkpoint /nowhere holds no checkpoint"),
        ({"keep_checkpoints": 2}, "--keep-checkpoints needs --save FOLDER"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 9, "vocab_file": None}, "has no [MASK], [CLS] and [SEP]"),
        ({"qa_data_dev": "x"}, "--qa-data-dev x: retrieval tasks are not available"),
        ({"seq_length": 4}, "--seq-length 4 leaves no room for texts"),
        ({"epochs": -1}, "--epochs"),
        ({"micro_batch_size": 0, "global_batch_size": None}, "--micro-batch-size"),
        ({"global_batch_size": 0}, "--global-batch-size"),
        ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size"),
        ({"full_validation": True}, "--full-validation: a task reads all of --valid-data in each evaluation"),
        ({"lr_warmup_samples": 4}, "--lr-warmup-samples: a task is counted in iterations; give --lr-warmup-iters"),
        ({"lr_decay_samples": 4}, "--lr-decay-samples: a task is counted in iterations; give --lr-decay-iters"),
    ],
)
def test_impossible_requests_are_refused_with_one_line(
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
    error = _refused(task_flags(bare, "RTE", train, valid), capsys)
    assert error == f"error: --vocab-file {bare}: has no [CLS], so it is not a BERT vocab.txt"


def test_a_checkpoint_of_another_kind_is_refused_with_its_purpose(
    vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = tmp_path / "gpt"
    train(1, tiny_flags(write_documents(tmp_path / "texts", documents=10), train_iters=1, save=gpt))
    files = _files("RTE", tmp_path)
    for flag, expected in (("pretrained_checkpoint", "bert"), ("load", "bert for classification of 2")):
        changes: dict[str, Any] = {flag: gpt}
        error = _refused(task_flags(vocabulary, "RTE", *files, **changes), capsys)
        assert f"{gpt} holds a model of type gpt, not {expected}; give --model-type gpt" in error
    experts, documents = tmp_path / "experts", tmp_path / "texts"
    train(1, tiny_flags(documents, train_iters=1, save=experts, num_experts=2))
    error = _refused(task_flags(vocabulary, "RTE", *files, model_type="gpt", pretrained_checkpoint=experts), capsys)
    assert f"--pretrained-checkpoint {experts} holds a model with experts, which tasks do not support; name" in error
    saved = tmp_path / "saved"
    assert main(task_flags(vocabulary, "RTE", *files, epochs=1, save=saved)) == 0
    capsys.readouterr()
    mnli = _files("MNLI", tmp_path)
    kind = "holds a model of type bert for classification of 2, not"
    error = _refused(task_flags(vocabulary, "MNLI", *mnli, load=saved), capsys)
    assert f"--load {saved} {kind} bert for classification of 3; continue with its --task" in error
    error = _refused(task_flags(vocabulary, "MNLI", *mnli, pretrained_checkpoint=saved), capsys)
    assert f"--pretrained-checkpoint {saved} {kind} bert; continue with its --task" in error
    texts = tmp_path / "lambada.jsonl"
    texts.write_text('{"text": "w1 w2"}\n')
    error = _refused(["--task", "LAMBADA", "--valid-data", str(texts), "--load", str(saved)], capsys)
    assert error.endswith("bert for classification of 2, and only gpt generates text")
    error = _refused(task_flags(vocabulary, "RTE", *files, load=saved, hidden_size=32), capsys)
    assert "--hidden-size: 32 was given but the checkpoint has 16; leave the flag out" in error


def test_epochs_of_recurring_samples_are_as_long_as_their_order(vocabulary: Path, tmp_path: Path) -> None:
    """Of 35 samples 34 fill two lanes: six batches of five an epoch, not seven."""
    files = _files("SST-2", tmp_path, train=35)
    log = tmp_path / "log.jsonl"
    changes: dict[str, Any] = {"global_batch_size": 5, "sample_order": "fixed", "log_json_file": log}
    assert main(task_flags(vocabulary, "SST-2", *files, **changes)) == 0
    assert [event["iteration"] for event in read_events(log, "validation")] == [6, 12]


def test_a_run_resumes_with_its_batches_and_epochs(
    vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, valid = _files("RTE", tmp_path)
    saved = tmp_path / "saved"

    def flags(**changes: object) -> list[str]:
        return task_flags(vocabulary, "RTE", train, valid, **{"save": saved, "load": saved, **changes})

    assert main(flags(epochs=1)) == 0
    error = _refused(flags(global_batch_size=8), capsys)
    assert "continues with global batches of 4 samples, but this run has 8: give --global-batch-size 4, or" in error
    train = [write_tsv(tmp_path / "more.tsv", "RTE", 12)]
    error = _refused(flags(), capsys)
    assert "continues with epochs of 2 iterations, but this run has 3: give the same --train-data," in error
    train = [tmp_path / "train.tsv"]
    assert main(flags(epochs=1)) == 0
    assert "the run is at iteration 2 of 2; raise --epochs to go on" in capsys.readouterr().out
    assert main(flags(save=tmp_path / "anew", finetune=True, global_batch_size=8)) == 0
    assert main(flags(override_opt_param_scheduler=True)) == 0
    assert " metrics of dev.tsv at iteration 4 | " in capsys.readouterr().out


def test_flags_of_the_training_run_may_stay_in_an_evaluation(vocabulary: Path, tmp_path: Path) -> None:
    files = _files("RTE", tmp_path)
    saved = tmp_path / "saved"
    assert main(task_flags(vocabulary, "RTE", *files, save=saved, lr_warmup_iters=3)) == 0
    assert main(task_flags(vocabulary, "RTE", *files, epochs=0, load=saved, lr_warmup_iters=3)) == 0
    log = tmp_path / "log.jsonl"
    evaluating: dict[str, Any] = {"epochs": 0, "load": saved, "lr": None, "min_lr": 1e-3, "log_json_file": log}
    assert main(task_flags(vocabulary, "RTE", *files, **evaluating)) == 0
    (validation,) = read_events(log, "validation")
    assert validation["samples"] == 6  # two more fill the second batch of four


def test_a_bert_without_its_binary_head_has_no_token_types(vocabulary: Path) -> None:
    flags = task_flags(vocabulary, "RTE", [Path("a")], [Path("b")], bert_no_binary_head=True)
    run, flags_of_model, _ = parse_task(flags)
    run.config = build_task_run(run, flags_of_model, 1, (8, 6))
    assert run.resolve(1).model.num_tokentypes == 0
    assert not [note for note in run.notes if "binary-head" in note]


def test_flags_of_pretraining_are_noted_in_any_spelling(vocabulary: Path) -> None:
    flags = task_flags(vocabulary, "sst_2", [Path("a")], [Path("b")], eval_iters=5, eval_interval=7)
    run, flags_of_model, task = parse_task(flags)
    assert (flags_of_model.task, task) == ("SST-2", TASKS["SST-2"])
    assert (
        "--eval-interval, --eval-iters: no effect, the whole of --valid-data is evaluated after each epoch" in run.notes
    )
    assert requested_task(["--TASK=rte", "--x"]) == "rte"
    assert requested_task(["--task"]) == ""


@pytest.mark.parametrize("text", ["task: rte\n", "task:\n  task: RTE\n  epochs: 2\n"])
def test_the_task_may_be_in_a_file(text: str, vocabulary: Path, tmp_path: Path) -> None:
    files, log = _files("RTE", tmp_path), tmp_path / "log.jsonl"
    (tmp_path / "run.yaml").write_text(text)
    words = task_flags(vocabulary, "RTE", *files, log_json_file=log)
    for flag in ("--task", "--epochs") if "epochs" in text else ("--task",):
        position = words.index(flag)
        del words[position : position + 2]
    for config in (["--config", str(tmp_path / "run.yaml")], [f"--CONFIG={tmp_path / 'run.yaml'}"]):
        log.unlink(missing_ok=True)
        assert main([*config, *words]) == 0
        assert "dev.tsv" in log.read_text()
    assert requested_task(["--config", str(tmp_path / "run.yaml"), "--task", "MNLI"]) == "MNLI"
    assert requested_task(["--config", str(tmp_path / "nowhere.yaml")]) == ""
    (tmp_path / "run.yaml").write_text("- task\n")
    assert requested_task(["--config", str(tmp_path / "run.yaml")]) == ""
