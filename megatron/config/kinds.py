"""Kinds of models, and the programs that train them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron.base.errors import UserError

ModelType = Literal["gpt", "bert", "t5", "deberta"]
"""Kinds of models."""
TaskHead = Literal["none", "classification", "regression", "choice"]
"""What a model says of a whole sample, instead of its words."""
PROGRAMS: Mapping[ModelType, str] = {
    "gpt": "pretrain_gpt.py",
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
    "deberta": "tasks/main.py",
}
"""The program that trains each kind of model."""


def kind_text(model_type: str, task_head: str = "none", task_classes: int = 0) -> str:
    """The kind of a model, with what it says of a sample: "bert", or "bert for classification of 3"."""
    of = f" of {task_classes}" if task_classes else ""
    return model_type if task_head == "none" else f"{model_type} for {task_head}{of}"


def check_kind(where: str, found: str, wanted: str, instead: str = "") -> None:
    """Checks that a checkpoint's model is of the wanted kind (else UserError, which begins with ``where``).

    ``instead`` is what can be done, where the caller knows better.
    """
    if found != wanted:
        raise UserError(f"{where} holds a model of kind {found}, not {wanted}; {instead or _instead(found, wanted)}")


def _instead(found: str, wanted: str) -> str:
    programs = {str(kind): name for kind, name in PROGRAMS.items()}
    if wanted not in programs and found in programs:
        return "begin with it by --pretrained-checkpoint"
    if " for " in found:
        return "go on with it by its --task of tasks/main.py"
    return f"go on with it by {programs.get(found, 'another version')}"
