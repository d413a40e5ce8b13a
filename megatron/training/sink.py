"""Base class of a run's metric sinks, and helpers for several sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.training.metrics import Evaluation, StepMetrics


class Sink:
    """A sink of metrics. Every method does nothing unless a sink overrides it."""

    name = "a log"
    tracker: str | None = None
    """Name of the service that keeps the sink's run, if one does."""
    run_id: str | None = None
    """The service's name of the run."""

    def line(self, text: str) -> None:
        """Write whole lines of text, for people."""

    def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Write a record of any kind (``config``, ``gradients``, ...)."""

    def step(self, metrics: StepMetrics) -> None:
        """Write a step's metrics."""

    def window(self, metrics: StepMetrics) -> None:
        """Write the metrics of a log interval."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation."""

    def close(self) -> None:
        """Flush and close."""


def slowest(metrics: StepMetrics) -> dict[str, float]:
    """Milliseconds of each timer on the slowest rank."""
    return {name: max(times) for name, times in metrics.timers_ms.items()}


def drop_missing(values: Mapping[str, float | None]) -> dict[str, float]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
