"""Parsing of the planner's ``--expert-imbalance``, the load of the fullest expert."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.base.errors import UserError
from megatron.base.value_type import ValueType
from megatron.config.model import ModelConfig


def parse_imbalance(text: str, model: ModelConfig) -> float:
    """Parse ``--expert-imbalance``: a number, or a log that contains it.

    Raises:
        UserError: when it is neither, or out of range.
    """
    flag = "--expert-imbalance"
    if not model.has_experts:
        if text != "1":
            raise UserError(f"{flag} {text}: no layer has experts (num_experts); leave it out")
        return 1.0
    if Path(text).is_file():
        lines = Path(text).read_text(encoding="utf-8", errors="replace").split("\n")
        for line in reversed(lines):  # the most recent counts
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a line that the run is still writing
            if isinstance(event, dict) and isinstance(event.get("expert_imbalance"), int | float):
                imbalance = float(event["expert_imbalance"])
                break
        else:
            raise UserError(
                f"{flag} {text}: no line has expert_imbalance; give the --log-json-file of a run with experts"
            )
    else:
        imbalance = ValueType(element=float).from_text(text, f"{flag} (not a file)")
    most = min(model.expert_layers.values()) / model.moe_router_topk
    if not 1 <= imbalance <= most:
        raise UserError(
            f"{flag} {imbalance:g}: must lie between 1 and {most:g}, where all tokens go to the same experts"
        )
    return imbalance
