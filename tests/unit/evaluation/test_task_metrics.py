"""Scores of tasks by file, against scikit-learn and SciPy on the same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from megatron.base.user_text import short_names
from megatron.config.tasks import TASKS
from megatron.data.tasks.examples import Example, ExampleFile
from megatron.evaluation.task_metrics import compute_metrics


def _files(labels: list[list[Any]]) -> list[ExampleFile]:
    return [
        ExampleFile(f"glue/{number}/dev.tsv", [Example((("a", None),), label) for label in of_file])
        for number, of_file in enumerate(labels)
    ]


@pytest.mark.parametrize("task", ["MNLI", "QQP", "CoLA"])
def test_classes(task: str) -> None:
    torch.manual_seed(1)
    classes = TASKS[task].classes
    labels = [torch.randint(classes, (size,)).tolist() for size in (7, 12)]
    outputs = torch.randn(24, classes, dtype=torch.float64)  # the last five rows only fill a batch
    predictions = outputs.argmax(dim=1).tolist()
    by_file = compute_metrics(TASKS[task], _files(labels), outputs)
    assert list(by_file) == ["0/dev.tsv", "1/dev.tsv"]
    for (name, values), truth, guess in zip(by_file.items(), labels, (predictions[:7], predictions[7:19]), strict=True):
        expected = {"accuracy": accuracy_score(truth, guess)}
        if task == "QQP":
            expected["F1"] = f1_score(truth, guess)
        if task == "CoLA":
            expected["Matthews"] = matthews_corrcoef(truth, guess)
        assert values == pytest.approx(expected), name


def test_numbers() -> None:
    torch.manual_seed(2)
    labels, outputs = torch.rand(9).tolist(), torch.randn(12, 1, dtype=torch.float64)
    (values,) = compute_metrics(TASKS["STS-B"], _files([labels]), outputs).values()
    guess = outputs[:9, 0].tolist()
    assert values["Pearson"] == pytest.approx(pearsonr(labels, guess).statistic)
    assert values["Spearman"] == pytest.approx(spearmanr(labels, guess).statistic)
    (values,) = compute_metrics(TASKS["STS-B"], _files([labels]), torch.ones(12, 1, dtype=torch.float64)).values()
    assert math.isnan(values["Pearson"])


def test_choices() -> None:
    outputs = torch.tensor([[0.0], [3.0], [1.0], [2.0], [5.0], [4.0], [0.0], [0.0]], dtype=torch.float64)
    (values,) = compute_metrics(TASKS["RACE"], _files([[1, 1]]), outputs).values()
    assert values == {"accuracy": 0.5}


def test_files_are_named_by_the_shortest_unique_suffix() -> None:
    assert short_names(["MNLI/dev_matched.tsv", "MNLI/dev_mismatched.tsv"]) == ["dev_matched.tsv", "dev_mismatched.tsv"]
    assert short_names(["RACE/dev/high", "RACE/test/high"]) == ["dev/high", "test/high"]
    assert short_names(["a", "a"]) == ["a (1)", "a (2)"]
