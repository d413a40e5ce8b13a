"""Curves in MLflow, with a stand-in and with the package itself."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.training.sinks import Sinks
from tests.unit.training.test_sinks import WINDOW, check_only_curves_are_lost, evaluation_at, opened, step_at


class MlflowException(Exception):
    """An error of the stand-in."""


class FakeClient:
    """A stand-in for a client of MLflow, which stores all values."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.trouble = ""

    def get_experiment_by_name(self, name: str) -> Any:
        if self.trouble:
            raise MlflowException(self.trouble)
        exists = name in self.experiments
        return types.SimpleNamespace(experiment_id=self.experiments[name]) if exists else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment_id: str) -> Any:
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {"experiment": experiment_id, "metrics": {}, "params": {}, "status": "RUNNING"}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def get_run(self, run_id: str) -> Any:
        if run_id not in self.runs:
            raise MlflowException("no such run")
        info = types.SimpleNamespace(run_id=run_id, experiment_id=self.runs[run_id]["experiment"])
        return types.SimpleNamespace(info=info)

    def update_run(self, run_id: str, status: str) -> None:
        if run_id not in self.runs:
            raise MlflowException("no such run")
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if self.trouble:
            raise MlflowException(self.trouble)
        assert len(params) <= 100
        for name, value, _, step in metrics:
            self.runs[run_id]["metrics"].setdefault(name, []).append((step, value))
        for name, value in params:
            assert name not in self.runs[run_id]["params"], "parameters never change"
            self.runs[run_id]["params"][name] = value

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["status"] = "FINISHED"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client, mlflow = FakeClient(), types.ModuleType("mlflow")
    entities, exceptions = types.ModuleType("mlflow.entities"), types.ModuleType("mlflow.exceptions")
    vars(mlflow).update(MlflowClient=lambda: client)
    vars(entities).update(Metric=lambda *values: values, Param=lambda *values: values)
    vars(exceptions).update(MlflowException=MlflowException)
    for module in (mlflow, entities, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return client


def _play(sinks: Sinks, iteration: int) -> dict[str, str]:
    config = {"model": {f"field_{number}": number for number in range(150)}, "data": {"data_path": ["a"]}}
    sinks.event("config", iteration, config=config, size={"parameters": 7})
    sinks.event("gradients", iteration, density=0.1)
    sinks.step(step_at(iteration))
    sinks.window(WINDOW)
    sinks.evaluation(evaluation_at(iteration))
    runs = sinks.tracked_runs
    sinks.close()
    return runs


def test_mlflow_gets_the_curves_of_tensorboard_and_continues_a_run(client: FakeClient) -> None:
    runs = _play(opened(mlflow_experiment="mine"), 20)
    assert runs == {"mlflow": "run0"}
    run = client.runs["run0"]
    assert run["experiment"] == client.experiments["mine"]
    assert run["metrics"]["lm loss"] == [(20, 1.0)]
    assert run["metrics"]["learning-rate"] == [(20, 1e-3)]
    assert run["metrics"]["TFLOPs per gpu estimated"] == [(20, WINDOW.benchmark_tflops)]
    assert run["metrics"]["bytes per iteration/dp-grad"] == [(20, 4096.0)]
    assert (run["params"]["config.model.field_149"], run["params"]["size.parameters"]) == ("149", "7")
    assert run["status"] == "FINISHED"
    assert _play(opened(mlflow_experiment="mine", tracked_runs=runs), 40) == runs
    assert run["metrics"]["lm loss"] == [(20, 1.0), (40, 1.0)]
    new_runs = _play(opened(mlflow_experiment="mine", tracked_runs={"mlflow": "gone"}), 40)
    assert new_runs == {"mlflow": "run1"}
    assert client.runs["run1"]["experiment"] == run["experiment"]


def test_a_run_of_another_experiment_is_not_continued(client: FakeClient) -> None:
    runs = _play(opened(mlflow_experiment="mine"), 20)
    other_runs = _play(opened(mlflow_experiment="theirs", tracked_runs=runs), 40)
    assert other_runs == {"mlflow": "run1"}
    assert client.runs["run1"]["experiment"] == client.experiments["theirs"] != client.experiments["mine"]
    assert client.runs["run0"]["metrics"]["lm loss"] == [(20, 1.0)]
    assert _play(opened(mlflow_experiment="mine", tracked_runs=runs), 40) == runs


def test_an_mlflow_error_ends_the_curves_alone(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    check_only_curves_are_lost(client, "--mlflow-experiment", capsys)


def test_mlflow_that_cannot_start_is_refused(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.trouble = "nobody answers"
    with pytest.raises(UserError, match=r"^--mlflow-experiment mine: nobody answers; set MLFLOW_TRACKING_URI"):
        opened(mlflow_experiment="mine")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"^--mlflow-experiment needs the mlflow package: pip install mlflow-skinny"):
        opened(mlflow_experiment="mine")


@pytest.mark.parametrize(
    "error", [MlflowException("no registry at 'ftp://a'\nmore"), ValueError("no store"), KeyError("x")]
)
def test_a_client_that_cannot_be_built_is_refused(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse() -> None:
        raise error

    vars(sys.modules["mlflow"]).update(MlflowClient=refuse)
    with pytest.raises(
        UserError, match=r"^--mlflow-experiment mine: .*; set MLFLOW_TRACKING_URI to a server$"
    ) as caught:
        opened(mlflow_experiment="mine")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_package_writes_a_run_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    runs = _play(opened(mlflow_experiment="mine"), 20)
    assert _play(opened(mlflow_experiment="mine", tracked_runs=runs), 40) == runs
    assert _play(opened(mlflow_experiment="theirs", tracked_runs=runs), 60) != runs
    client = mlflow.MlflowClient()
    run = client.get_run(runs["mlflow"])
    assert run.info.status == "FINISHED"
    assert run.data.params["config.model.field_149"] == "149"
    assert [point.step for point in client.get_metric_history(runs["mlflow"], "lm loss")] == [20, 40]
