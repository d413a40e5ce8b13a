"""A clock and a reader of TensorBoard files."""

from __future__ import annotations

from pathlib import Path

import pytest


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Points of every curve in a TensorBoard folder, not in its subfolders."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }
