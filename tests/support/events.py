"""What runs write to --log-json-file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_events(log: Path, kind: str = "train", *, may_be_cut: bool = False) -> list[dict[str, Any]]:
    """The events of a kind.

    Args:
        log: the file.
        kind: the kind.
        may_be_cut: whether the last line may be incomplete, which is then ignored: the run goes on, or was killed.
    """
    lines = log.read_text().splitlines()
    events = [json.loads(line) for line in lines if not may_be_cut or line.endswith("}")]
    return [event for event in events if event["kind"] == kind]


def read_losses(log: Path) -> dict[int, tuple[float, float | None]]:
    """Loss and gradient norm (None when skipped) of each iteration; a later line of an iteration wins."""
    return {event["iteration"]: (event.get("lm_loss", 0.0), event.get("grad_norm")) for event in read_events(log)}
