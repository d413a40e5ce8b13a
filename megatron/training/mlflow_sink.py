"""Curves of a run in MLflow (``--mlflow-experiment``), which is configured by its own variables."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.base.errors import UserError, first_line
from megatron.config.logs import LoggingConfig
from megatron.training.curves import CurveSink

_FORBIDDEN = re.compile(r"[^\w\-./ ]")
"""Characters that MLflow does not allow in names."""
_MAX_BATCH = 100
"""Maximum number of parameters per call."""
_MAX_VALUE_LENGTH = 250


class MlflowSink(CurveSink):
    """Curves for a run of an MLflow experiment, with the configuration as its parameters.

    Args:
        experiment: name of the experiment, which is created if missing.
        config, dp_size, world_size: the arguments of ``CurveSink``.
        run_id: the run to resume, if the experiment still has it.
    """

    tracker = "mlflow"

    def __init__(
        self, experiment: str, config: LoggingConfig, *, dp_size: int, world_size: int, run_id: str | None
    ) -> None:
        super().__init__(config, dp_size=dp_size, world_size=world_size)
        self.name = f"the run in --mlflow-experiment {experiment}"
        try:
            import mlflow
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise UserError(
                "--mlflow-experiment needs the mlflow package: pip install mlflow-skinny, or drop the flag"
            ) from error
        self._metric, self._param = Metric, Param
        self._errors = (MlflowException, OSError, ValueError)
        self._logs_params = True
        try:
            # The constructor's exceptions depend on the store in MLFLOW_TRACKING_URI: they may be of any type.
            self._client = mlflow.MlflowClient()
            existing = self._client.get_experiment_by_name(experiment)
            experiment_id = str(
                self._client.create_experiment(experiment) if existing is None else existing.experiment_id
            )
            self.run_id = self._resume(run_id, experiment_id) or str(self._client.create_run(experiment_id).info.run_id)
        except Exception as error:
            raise UserError(
                f"--mlflow-experiment {experiment}: {first_line(error)}; set MLFLOW_TRACKING_URI to a server"
            ) from error

    def _resume(self, run_id: str | None, experiment_id: str) -> str | None:
        """Resume a run; None if it does not exist, or belongs to another experiment."""
        if run_id is None:
            return None
        try:
            if self._client.get_run(run_id).info.experiment_id != experiment_id:
                return None
            self._client.update_run(run_id, status="RUNNING")
        except self._errors:
            return None
        self._logs_params = False  # parameters never change
        return run_id

    def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        super().event(kind, iteration, values)
        if kind == "config" and self._logs_params:
            params = [self._param(name, str(value)[:_MAX_VALUE_LENGTH]) for name, value in _flatten("", values)]
            for begin in range(0, len(params), _MAX_BATCH):
                self._log(params=params[begin : begin + _MAX_BATCH])

    def _curves(self, iteration: int, values: Mapping[str, float], **positions: int) -> None:
        timestamp_ms = int(time.time() * 1000)
        points = {**values, **positions}
        metrics = [self._metric(_clean_name(tag), value, timestamp_ms, iteration) for tag, value in points.items()]
        self._log(metrics=metrics)

    def _log(self, **batch: Any) -> None:
        self._try(lambda: self._client.log_batch(self.run_id, **batch))

    def close(self) -> None:
        self._try(lambda: self._client.set_terminated(self.run_id))

    def _try(self, call: Callable[[], Any]) -> None:
        """Turn the service's errors into OSError, which costs the run only this sink."""
        try:
            call()
        except self._errors as error:
            raise OSError(first_line(error)) from error


def _clean_name(tag: str) -> str:
    return _FORBIDDEN.sub("", tag)


def _flatten(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flatten nested tables into values with dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}{name}.", value)
        else:
            yield prefix + _clean_name(str(name)), value
