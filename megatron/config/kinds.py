"""Kinds of models and their training programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron.base.errors import UserError

ModelType = Literal["gpt", "bert", "t5", "deberta"]
"""Kinds of models."""
TaskHead = Literal["none", "classification", "regression", "choice"]
"""Task heads: outputs for whole samples instead of tokens."""
PROGRAMS: Mapping[ModelType, str] = {
    "gpt": "pretrain_gpt.py",
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
    "deberta": "tasks/main.py",
}
"""Kind of model -> its training program."""


def kind_text(model_type: str, task_head: str = "none", task_classes: int = 0) -> str:
    """Kind of a model with its task: "bert", or "bert for classification of 3"."""
    of = f" of {task_classes}" if task_classes else ""
    return model_type if task_head == "none" else f"{model_type} for {task_head}{of}"


def check_kind(location: str, saved_kind: str, expected_kind: str, instead: str = "") -> None:
    """Check that the model of a checkpoint is of the wanted kind; raise UserError starting with ``location`` otherwise.

    ``instead`` replaces the default advice of the message.
    """
    if saved_kind != expected_kind:
        raise UserError(
            f"{location} holds a model of kind {saved_kind}, not {expected_kind}; "
            f"{instead or _instead(saved_kind, expected_kind)}"
        )


def _instead(saved_kind: str, wanted_kind: str) -> str:
    programs = {str(kind): name for kind, name in PROGRAMS.items()}
    if wanted_kind not in programs and saved_kind in programs:
        return "begin with it by --pretrained-checkpoint"
    if " for " in saved_kind:
        return "go on with it by its --task of tasks/main.py"
    return f"go on with it by {programs.get(saved_kind, 'another version')}"
