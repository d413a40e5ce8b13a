"""Types of models and their training programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron.base.errors import UserError

ModelType = Literal["gpt", "bert", "t5", "deberta"]
"""Types of models."""
TaskHead = Literal["none", "classification", "regression", "choice"]
"""Task heads: outputs for whole samples instead of tokens."""
PROGRAMS: Mapping[ModelType, str] = {
    "gpt": "pretrain_gpt.py",
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
    "deberta": "tasks/main.py",
}
"""Type of model -> its training program."""


def describe_model_type(model_type: str, task_head: str = "none", task_classes: int = 0) -> str:
    """Type of a model with its task: "bert", or "bert for classification of 3"."""
    classes = f" of {task_classes}" if task_classes else ""
    return model_type if task_head == "none" else f"{model_type} for {task_head}{classes}"


def check_model_type(location: str, saved_type: str, expected_type: str, advice: str = "") -> None:
    """Check that a checkpoint's model is of the expected type; raise UserError starting with ``location`` otherwise.

    ``advice`` replaces the default ending of the message.
    """
    if saved_type == expected_type:
        return
    programs = {str(kind): name for kind, name in PROGRAMS.items()}
    if not advice:
        if expected_type not in programs and saved_type in programs:
            advice = "start from it with --pretrained-checkpoint"
        elif " for " in saved_type:
            advice = "continue with its --task of tasks/main.py"
        else:
            advice = f"continue with {programs.get(saved_type, 'another version')}"
    raise UserError(f"{location} holds a model of type {saved_type}, not {expected_type}; {advice}")
