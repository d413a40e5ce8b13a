"""Task metrics, computed by scikit-learn and SciPy."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.user_text import short_names
from megatron.config.tasks import Metric, Task
from megatron.data.tasks.examples import ExampleFile


def check_packages() -> None:
    """Check that the packages of the metrics are installed (else UserError)."""
    modules = {"scikit-learn": "sklearn", "scipy": "scipy"}
    missing = [name for name, module in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f"task metrics need {' and '.join(missing)}: pip install 'megatron-cc[tasks]'")


def _score(metric: Metric, labels_n: Any, predictions_n: Any) -> float:
    from scipy import stats
    from sklearn import metrics

    if metric == "accuracy":
        return float(metrics.accuracy_score(labels_n, predictions_n))
    if metric == "F1":
        return float(metrics.f1_score(labels_n, predictions_n, zero_division=0.0))
    if metric == "Matthews":
        return float(metrics.matthews_corrcoef(labels_n, predictions_n))
    correlation = stats.pearsonr if metric == "Pearson" else stats.spearmanr
    return float(correlation(labels_n, predictions_n).statistic) if len(labels_n) > 1 else math.nan


def compute_metrics(task: Task, files: Sequence[ExampleFile], outputs_nc: Tensor) -> dict[str, dict[str, float]]:
    """Compute the metrics of each file.

    Args:
        task: the task.
        files: validation files.
        outputs_nc: task-head outputs of each sequence of all files, in order; extra rows are ignored.
    """
    each = task.classes if task.head == "choice" else 1
    labels = [example.label for file in files for example in file.examples]
    outputs = outputs_nc[: len(labels) * each].numpy()
    predictions_n = outputs[:, 0] if task.head == "regression" else outputs.reshape(len(labels), -1).argmax(axis=1)
    result: dict[str, dict[str, float]] = {}
    begin = 0
    for name, file in zip(short_names([file.path for file in files]), files, strict=True):
        end = begin + len(file.examples)
        file_labels, file_predictions = np.asarray(labels[begin:end]), predictions_n[begin:end]
        with warnings.catch_warnings():
            # The correlation with a constant is nan; suppress SciPy's warning about it.
            warnings.simplefilter("ignore")
            result[name] = {str(metric): _score(metric, file_labels, file_predictions) for metric in task.metrics}
        begin = end
    return result
