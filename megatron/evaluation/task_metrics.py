"""Task metrics, computed by scikit-learn and SciPy."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.user_text import short_names
from megatron.config.tasks import Metric, Task
from megatron.data.tasks.examples import ExampleFile


def check_packages() -> None:
    """Check that the packages of the metrics are installed (else UserError)."""
    missing = [name for name, module in (("scikit-learn", "sklearn"), ("scipy", "scipy")) if not _is_installed(module)]
    if missing:
        raise UserError(f"tasks are judged by {' and '.join(missing)}: pip install 'megatron-cc[tasks]'")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _accuracy(labels_n: Any, predictions_n: Any) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels_n, predictions_n))


def _f1(labels_n: Any, predictions_n: Any) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels_n, predictions_n, zero_division=0.0))


def _matthews(labels_n: Any, predictions_n: Any) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels_n, predictions_n))


def _pearson(labels_n: Any, predictions_n: Any) -> float:
    from scipy.stats import pearsonr

    return float(pearsonr(labels_n, predictions_n).statistic) if len(labels_n) > 1 else math.nan


def _spearman(labels_n: Any, predictions_n: Any) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(labels_n, predictions_n).statistic) if len(labels_n) > 1 else math.nan


_METRICS: Mapping[Metric, Callable[[Any, Any], float]] = {
    "accuracy": _accuracy,
    "F1": _f1,
    "Matthews": _matthews,
    "Pearson": _pearson,
    "Spearman": _spearman,
}


def scores(task: Task, files: Sequence[ExampleFile], outputs_nc: Tensor) -> dict[str, dict[str, float]]:
    """Metrics of each file.

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
        of_file = np.asarray(labels[begin:end]), predictions_n[begin:end]
        with warnings.catch_warnings():
            # The correlation with a constant is nan; suppress SciPy's warning about it.
            warnings.simplefilter("ignore")
            result[name] = {str(metric): _METRICS[metric](*of_file) for metric in task.metrics}
        begin = end
    return result
