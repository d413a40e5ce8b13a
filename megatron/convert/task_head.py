"""Task heads of fine-tuned models in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.config.model import ModelConfig
from megatron.config.model_types import TaskHead


def head_fields(model: ModelConfig) -> dict[str, Any]:
    """Task-head fields of config.json; empty for a language model."""
    if model.task_head == "none":
        return {}
    if model.task_head == "choice":
        return {"num_choices": model.task_classes}  # our own field: theirs is implied by the input's shape
    labels = {str(n): f"LABEL_{n}" for n in range(model.num_outputs)}
    problem = "regression" if model.task_head == "regression" else "single_label_classification"
    return {"id2label": labels, "label2id": {v: int(k) for k, v in labels.items()}, "problem_type": problem}


def read_task_head(config: Values, architectures: Mapping[TaskHead, str]) -> dict[str, object]:
    """Model fields of a task head; empty for a pretrained model.

    Args:
        config: content of config.json.
        architectures: architectures of the model's kind, by head.

    Raises:
        UserError: when our models have no such head.
    """
    named = config.texts("architectures") if config.has("architectures") else []
    if architectures.get("choice") in named:
        if not config.has("num_choices"):
            raise UserError('num_choices is missing; write the number of choices of a sample, such as "num_choices": 4')
        return {"task_head": "choice", "task_classes": config.integer("num_choices", minimum=2)}
    if architectures["classification"] not in named:
        return {}
    classes = len(config.table("id2label", {})) or config.integer("num_labels", 2)
    if classes == 1:
        return {"task_head": "regression"}
    if config.has("problem_type"):
        problem = config.text("problem_type")
        if problem != "single_label_classification":
            raise UserError(f"problem_type {problem!r} of {classes} labels cannot be converted: a sample has one class")
    return {"task_head": "classification", "task_classes": classes}
