"""What runs write to --log-json-file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_events(log: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The events of a kind."""
    return [event for event in map(json.loads, log.read_text().splitlines()) if event["kind"] == kind]


def read_losses(log: Path) -> dict[int, tuple[float, float | None]]:
    """Loss and gradient norm (None when skipped) of each iteration; a later line of an iteration wins."""
    return {event["iteration"]: (event.get("lm_loss", 0.0), event.get("grad_norm")) for event in read_events(log)}
