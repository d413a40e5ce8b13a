"""Fine-tuning on several ranks: the numbers of a single process, a pretrained model, exact resume, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from megatron.checkpoint.load import load_tensors, saved_shapes
from megatron.checkpoint.logical import shard_of_local
from megatron.checkpoint.model_state import MAIN, MODEL
from megatron.evaluation.command import main
from megatron.training import pretrain
from tests.support.cli import run_cli
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_bert_flags, write_sentences
from tests.support.spawn import run_ranks
from tests.support.tasks import task_flags, write_race, write_tsv, write_vocabulary

pytestmark = pytest.mark.multiprocess

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def _run(flags: list[str]) -> None:
    status = main(flags)
    assert status == 0, status


def _events(path: Path) -> list[dict[str, Any]]:
    """Events of the training steps and the evaluations."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    fields = ("kind", "iteration", "classification_loss", "regression_loss", "grad_norm", "scores")
    return [
        {name: event[name] for name in fields if name in event}
        for event in events
        if event["kind"] in ("train", "validation")
    ]


def _assert_alike(actual: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert [(event["kind"], event["iteration"]) for event in actual] == [
        (event["kind"], event["iteration"]) for event in expected
    ]
    for ours, theirs in zip(actual, expected, strict=True):
        for name, value in theirs.items():
            if isinstance(value, float):
                assert ours[name] == pytest.approx(value, rel=tolerance), (name, theirs["iteration"])
            elif name == "scores":
                for file, scores in value.items():
                    assert ours[name][file] == pytest.approx(scores, rel=tolerance)


SPLIT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "MNLI": (
        "MNLI",
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
        {},
    ),
    "MNLI in stages": ("MNLI", 8, {**SPLIT, "use_distributed_optimizer": True}, {}),
    "GPT": ("STS-B", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"model_type": "gpt"}),
    "RACE": ("RACE", 4, {"pipeline_model_parallel_size": 2}, {"global_batch_size": 2}),
}


@pytest.mark.parametrize("name", mark_repeats(LAYOUTS, keep=["MNLI", "GPT", "RACE"]))
def test_the_numbers_do_not_depend_on_the_layout(name: str, tmp_path: Path) -> None:
    """With dropout in the head, last batches that are not full, and a last batch that is empty for a replica."""
    task, ranks, layout, model = LAYOUTS[name]
    vocabulary = write_vocabulary(tmp_path)
    if task == "RACE":
        train, valid = [write_race(tmp_path / "train", 3)], [write_race(tmp_path / "dev", 2, questions=3, seed=1)]
        train[0].joinpath("0.txt").unlink()
    else:
        train = [write_tsv(tmp_path / "train.tsv", task, 9)]
        valid = [write_tsv(tmp_path / f"dev{number}.tsv", task, 6, number) for number in (1, 2)]
    common = {"fp64": True, "keep_last": True, "global_batch_size": 8, "lr_warmup_fraction": 0.2, **DROPOUT, **model}
    logs = [tmp_path / "one.jsonl", tmp_path / "split.jsonl"]
    for world_size, log, changes in ((1, logs[0], {}), (ranks, logs[1], layout)):
        flags = task_flags(vocabulary, task, train, valid, log_json_file=log, **common, **changes)
        run_ranks(world_size, _run, flags, timeout=240, init=False)
    single, split = map(_events, logs)
    steps = 2
    assert [event["iteration"] for event in single if event["kind"] == "validation"] == [steps, 2 * steps]
    assert len([event for event in single if event["kind"] == "train"]) == 2 * steps
    _assert_alike(split, single, 1e-10)


def _tensors(root: Path, prefix: str = MODEL) -> dict[str, Tensor]:
    """The model of the last checkpoint, or other tensors with names of a prefix."""
    iteration = int((root / "latest_checkpointed_iteration.txt").read_text())
    tensors = {
        name: torch.empty(shape, dtype=kind) for name, (shape, kind) in saved_shapes(root, iteration, prefix).items()
    }
    shards = {name: shard_of_local(x, (0,) * x.dim(), tuple(x.shape)) for name, x in tensors.items()}
    load_tensors(root, iteration, shards, allow_unexpected=lambda name: True)
    return {name.removeprefix(prefix): x for name, x in tensors.items()}


def _pretrain(flags: list[str]) -> None:
    assert pretrain.main(flags, "bert") == 0


def test_from_a_pretrained_model_to_an_evaluation_on_another_layout(tmp_path: Path) -> None:
    data = write_sentences(tmp_path / "tiny")
    pretrained, saved, still = tmp_path / "pretrained", tmp_path / "saved", tmp_path / "still"
    two = {"pipeline_model_parallel_size": 2}
    run_ranks(2, _pretrain, tiny_bert_flags(data, train_iters=2, save=pretrained, **two), init=False, timeout=240)
    train, valid = write_tsv(tmp_path / "train.tsv", "MRPC", 12), write_tsv(tmp_path / "dev.tsv", "MRPC", 7, 1)

    def flags(**changes: object) -> list[str]:
        # The shape is the checkpoint's.
        shape = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"))
        flags_of_run = {**shape, "pretrained_checkpoint": pretrained, **DROPOUT, **changes}
        return task_flags(data[1], "MRPC", [train], [valid], **flags_of_run)

    run_ranks(2, _run, flags(epochs=1, lr=1e-30, weight_decay=0, save=still, **two), init=False, timeout=240)
    before, after = _tensors(pretrained), _tensors(still)
    assert torch.equal(after.pop("classification_head.pooler.weight"), before["binary_head.pooler.weight"])
    assert torch.equal(after.pop("classification_head.pooler.bias"), before["binary_head.pooler.bias"])
    assert tuple(after.pop("classification_head.classifier.weight").shape) == (2, 16)
    after.pop("classification_head.classifier.bias")
    assert {name for name in before if not name.startswith(("lm_head", "binary_head"))} == set(after)
    assert all(torch.equal(x, before[name]) for name, x in after.items())

    logs = {name: tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "evaluated")}
    for changes in (
        {"log_json_file": logs["whole"], "tensorboard_dir": tmp_path / "curves"},
        {"log_json_file": logs["parts"], "save": saved, "exit_interval": 4},
        {"log_json_file": logs["parts"], "save": saved, "load": saved, "pretrained_checkpoint": None},
    ):
        run_ranks(2, _run, flags(**changes), init=False, timeout=240)
    events = _events(logs["whole"])
    assert [event["iteration"] for event in events if event["kind"] == "validation"] == [3, 6]
    assert _events(logs["parts"]) == events
    read = EventAccumulator(str(tmp_path / "curves"))
    read.Reload()
    scores = [event["scores"]["dev.tsv"]["F1"] for event in events if "scores" in event]
    assert [point.value for point in read.Scalars("F1 validation/dev.tsv")] == pytest.approx(scores)
    evaluating = {"epochs": 0, "train_data": None, "load": saved, "lr": None, "log_json_file": logs["evaluated"]}
    split = {"tensor_model_parallel_size": 2}
    run_ranks(2, _run, flags(**evaluating, **split, pretrained_checkpoint=None), init=False, timeout=240)
    (evaluated,) = _events(logs["evaluated"])
    assert evaluated["iteration"] == 6
    _assert_alike([evaluated], events[-1:], 1e-5)


def test_unreadable_input_ends_every_rank_with_one_line(tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path)
    train, valid = write_tsv(tmp_path / "train.tsv", "RTE", 8), write_tsv(tmp_path / "dev.tsv", "RTE", 8)
    with valid.open("a") as file:
        file.write("8\tw1\tw2\tmaybe\n")
    done = run_cli(2, ["tasks/main.py", *task_flags(vocabulary, "RTE", [train], [valid])])
    assert done.returncode == 2
    message = f"error: --valid-data {valid}, line 10: the label 'maybe' is not one of entailment, not_entailment"
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("sharded", mark_repeats([False, True], keep=[True]))
def test_a_run_begins_with_the_fp32_values_of_a_pretrained_model(sharded: bool, tmp_path: Path) -> None:
    data, pretrained = write_sentences(tmp_path / "tiny"), tmp_path / "pretrained"
    layout = {"use_distributed_optimizer": sharded or None}
    run_ranks(2, _pretrain, tiny_bert_flags(data, train_iters=2, save=pretrained, bf16=True), init=False, timeout=240)
    train, valid = write_tsv(tmp_path / "train.tsv", "MRPC", 12), write_tsv(tmp_path / "dev.tsv", "MRPC", 7, 1)
    shape = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"))
    still = {**shape, **layout, "pretrained_checkpoint": pretrained, "epochs": 1, "lr": 1e-30, "weight_decay": 0}
    before, rounded = _tensors(pretrained, MAIN), _tensors(pretrained)
    assert not torch.equal(before["final_layernorm.weight"], rounded["final_layernorm.weight"].float())
    for precision, prefix in ((None, MODEL), (True, MAIN)):
        saved = tmp_path / f"saved-{prefix}"
        flags = task_flags(data[1], "MRPC", [train], [valid], **still, bf16=precision, save=saved)
        run_ranks(2, _run, flags, init=False, timeout=240)
        after = _tensors(saved, prefix)
        assert torch.equal(after.pop("classification_head.pooler.weight"), before["binary_head.pooler.weight"])
        after = {name: x for name, x in after.items() if not name.startswith("classification_head")}
        assert {name for name in before if not name.startswith(("lm_head", "binary_head"))} == set(after)
        assert all(torch.equal(x, before[name]) for name, x in after.items()), prefix
        if precision:
            assert torch.equal(_tensors(saved)["final_layernorm.weight"], rounded["final_layernorm.weight"])


@pytest.mark.parametrize("without_optimizer", [False, True])
def test_finetune_begins_with_the_fp32_values_of_a_checkpoint(without_optimizer: bool, tmp_path: Path) -> None:
    """Where the checkpoint has them: not if it was saved without its optimizer."""
    data, first = write_sentences(tmp_path / "tiny"), tmp_path / "first"
    saving = {"save": first, "bf16": True, "no_save_optim": without_optimizer or None}
    assert pretrain.main(tiny_bert_flags(data, train_iters=2, **saving), "bert") == 0
    expected = _tensors(first)
    if not without_optimizer:
        assert any(not torch.equal(x, expected[name].float()) for name, x in _tensors(first, MAIN).items())
        expected = _tensors(first, MAIN)
    assert set(expected) == set(_tensors(first))
    for precision, prefix in ((None, MODEL), (True, MAIN)):
        saved = tmp_path / f"saved-{prefix}"
        still = {"load": first, "finetune": True, "lr": 1e-30, "weight_decay": 0, "save": saved, "bf16": precision}
        assert pretrain.main(tiny_bert_flags(data, train_iters=1, **still), "bert") == 0
        after = _tensors(saved, prefix)
        assert set(after) == set(expected)
        assert all(torch.equal(x, expected[name].float()) for name, x in after.items()), prefix
