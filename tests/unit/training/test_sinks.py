"""Metrics in text files, JSON lines and TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.base.errors import UserError
from megatron.config.logs import LoggingConfig
from megatron.training.curves import TensorBoardSink
from megatron.training.metrics import Evaluation, PointTraffic, StepMetrics, format_train_line
from megatron.training.records import read_records
from megatron.training.sink import Sink
from megatron.training.sinks import Sinks, TextFileSink, open_sinks
from tests.support.disk import largest_file
from tests.unit.training.support import read_curves


def loss_check(cost: float, setting: int) -> dict[str, Any]:
    """Values of a check of two points, of which a point's cost and setting change."""
    points, settings = {"dp-grad": cost, "pp-forward": 0.25}, {"dp-grad": setting, "pp-forward": 2}
    return {"expected_increase": cost + 0.25, "points": points, "settings": settings, "eased": None}


WINDOW = StepMetrics(
    iteration=20,
    losses={"lm loss": 3.5},
    global_batch_size=8,
    seq_length=64,
    loss_scale=1.0,
    grad_norm=2.0,
    consumed_samples=160,
    consumed_tokens=10240,
    learning_rate=1e-3,
    seconds_per_iteration=0.5,
    train_iters=100,
    benchmark_tflops=0.25,
    model_tflops=0.2,
    mfu=0.4,
    remaining_seconds=40.0,
    memory_bytes=10**9,
    computed_s=0.2,
    traffic={"dp-grad": PointTraffic(8192.0, 4096.0, 0.5, 0.25, 0.75, 3.0), "control": PointTraffic(8, 8, 0, 0)},
)
TUNED = dataclasses.replace(WINDOW, controllers={"dp-grad": {"entropy": -3.25, "rank_of_stage_1": 0.0}})
TIMED = dataclasses.replace(WINDOW, timers_ms={"forward-backward": [10.0, 12.0]})


def opened(
    resume: dict[str, int] | None = None,
    lines: list[str] | None = None,
    tracked_runs: dict[str, str] | None = None,
    **config: Any,
) -> Sinks:
    return Sinks(
        open_sinks(
            LoggingConfig(**config),
            dp_size=2,
            world_size=4,
            resume={"iterations": 0, "samples": 0, "tokens": 0, **(resume or {})},
            console=(list[str]() if lines is None else lines).append,
            tracked_runs=tracked_runs or {},
        )
    )


def window_at(iteration: int, loss: float = 3.5) -> StepMetrics:
    samples = 8 * iteration
    window = dataclasses.replace(WINDOW, iteration=iteration, losses={"lm loss": loss})
    return dataclasses.replace(window, consumed_samples=samples, consumed_tokens=64 * samples)


def step_at(iteration: int, value: float = 1.0) -> StepMetrics:
    return StepMetrics(
        iteration=iteration,
        losses={"lm loss": value},
        global_batch_size=8,
        seq_length=64,
        loss_scale=1.0,
        grad_norm=2.0,
        consumed_samples=iteration * 8,
        learning_rate=1e-3,
    )


def evaluation_at(iteration: int) -> Evaluation:
    return Evaluation(iteration=iteration, consumed_samples=8 * iteration, losses={"lm loss": 3.25})


def check_only_curves_are_lost(service: Any, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of a tracking service gives a single warning, and the other sinks continue."""
    lines, config = list[str](), dict[str, Any]({flag.strip("-").replace("-", "_"): "mine"})
    sinks = opened(lines=lines, **config)
    service.trouble = "no connection"
    for iteration in (1, 2):
        sinks.step(step_at(iteration))
    sinks.line("goes on")
    warning = f"warning: the run in {flag} mine cannot be written any more, left out: no connection\n"
    assert capsys.readouterr().err == warning
    assert lines == ["goes on"]


def test_lines_go_to_the_console_and_are_appended_to_the_file(tmp_path: Path) -> None:
    path, lines = tmp_path / "deep" / "log.txt", list[str]()
    for _ in range(2):
        sinks = opened(lines=lines, log_txt_file=str(path))
        sinks.line("hello")
        sinks.window(WINDOW)
        sinks.close()
    assert lines == ["hello", format_train_line(WINDOW)] * 2
    assert path.read_text().splitlines() == lines


def test_json_lines_are_written_at_once(tmp_path: Path) -> None:
    """With residuals for points with error feedback, and the slowest rank's timers."""
    path = tmp_path / "log.jsonl"
    sinks = opened(log_json_file=str(path))
    sinks.window(TIMED)
    sinks.event("checkpoint", 20, path="iter_0000020", seconds=0.1)
    train, checkpoint = (json.loads(line) for line in path.read_text().splitlines())
    traffic = {"raw_bytes": 8192.0, "wire_bytes": 4096.0, "coded_s": 0.5, "waited_s": 0.25}
    control = {"raw_bytes": 8, "wire_bytes": 8, "coded_s": 0, "waited_s": 0}
    assert train["comm"] == {"dp-grad": {**traffic, "residual": 0.75, "staleness": 3.0}, "control": control}
    assert (train["kind"], train["mfu"], train["timers_ms"]) == ("train", 0.4, {"forward-backward": 12.0})
    assert (checkpoint["kind"], checkpoint["path"]) == ("checkpoint", "iter_0000020")


def test_infinite_numbers_become_null_in_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sinks = opened(log_json_file=str(path))
    sinks.event("note", 1, values=[math.nan, 1.0], nested={"x": -math.inf})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    event = json.loads(path.read_text(), parse_constant=refuse)
    assert (event["values"], event["nested"]) == ([None, 1.0], {"x": None})


def test_a_reader_leaves_out_events_of_lost_work(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sinks = opened(log_json_file=str(path))
    for iteration in (10, 20, 30):
        sinks.window(window_at(iteration, loss=1.0))
    sinks.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "iterat')  # killed in the middle of a write
    sinks = opened(resume={"iterations": 15}, log_json_file=str(path))
    for iteration in (20, 30):
        sinks.window(window_at(iteration, loss=2.0))
    sinks.close()
    events = read_records(path)
    assert [(e["kind"], e["iteration"], e.get("lm_loss")) for e in events] == [
        ("train", 10, 1.0),
        ("resume", 15, None),
        ("train", 20, 2.0),
        ("train", 30, 2.0),
    ]


def test_records_check_their_values(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(
        '\ufeff{"kind": "train", "iteration": 1, "lm_loss": null, "list": [1, null]}\n\n{"torn\n'
        '{"kind": "train", "iteration": 2.5, "lm_loss": "x", "list": 3, "comm": {"dp-grad": {"raw_bytes": {}}}}\n',
        encoding="utf-8",
    )
    first, second = read_records(path)
    assert first.iteration() == 1
    assert math.isnan(first.number("lm_loss"))
    assert first.number("grad_norm", 7.0) == 7.0
    assert [str(x) for x in first.numbers("list")] == ["1", "nan"]
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: first.number("grad_norm"), "1: grad_norm is missing"),
        (lambda: second.iteration(), "4: iteration: 2.5 is not an integer"),
        (lambda: second.number("lm_loss"), "4: lm_loss: 'x' is not a number"),
        (lambda: second.numbers("list"), "4: list: expected a list, not 3"),
        (lambda: second.groups("list"), "4: list: expected names and values, not 3"),
        (
            lambda: second.groups("comm")["dp-grad"].number("raw_bytes"),
            "4: comm dp-grad: raw_bytes: expected a number, not names and values",
        ),
    ]
    for ask, message in wrong:
        with pytest.raises(UserError, match=re.escape(f"{path}:{message}; correct or delete the line")):
            ask()


def test_loads_of_experts_are_logged(tmp_path: Path) -> None:
    """The largest over the mean of its layer on the console, all tokens in the file, a curve for each layer."""
    path, lines = tmp_path / "log.jsonl", list[str]()
    loads = {1: (6.0, 2.0, 0.0, 0.0), 3: (5.0, 3.0)}
    sinks = opened(lines=lines, log_json_file=str(path), tensorboard_dir=str(tmp_path))
    sinks.step(dataclasses.replace(step_at(20), expert_loads=loads))
    sinks.window(dataclasses.replace(WINDOW, expert_loads=loads))
    sinks.close()
    assert "expert load max/mean: 3.000 |" in lines[0]
    (event,) = (json.loads(line) for line in path.read_text().splitlines())
    assert event["expert_loads"] == {"2": [6.0, 2.0, 0.0, 0.0], "4": [5.0, 3.0]}
    assert event["expert_imbalance"] == 3.0
    curves = read_curves(tmp_path)
    assert curves["expert load max over mean/layer 2"] == [(20, 3.0)]
    assert curves["expert load max over mean/layer 4"] == [(20, 1.25)]
    assert "expert" not in format_train_line(WINDOW)


def test_several_validation_sets_are_in_the_json_lines_and_the_curves(tmp_path: Path) -> None:
    sinks = opened(log_json_file=str(tmp_path / "log.jsonl"), tensorboard_dir=str(tmp_path))
    sets = {"news": {"lm loss": 2.0}, "code": {"lm loss": 4.5}}
    sinks.evaluation(dataclasses.replace(evaluation_at(20), sets=sets))
    sinks.evaluation(evaluation_at(30))
    sinks.close()
    several, single = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert (several["kind"], several["lm_loss"]) == ("validation", 3.25)
    assert several["sets"] == {"news": {"lm_loss": 2.0}, "code": {"lm_loss": 4.5}}
    assert "sets" not in single
    curves = read_curves(tmp_path)
    assert curves["lm loss validation"] == [(20, 3.25), (30, 3.25)]
    assert (curves["lm loss validation/news"], curves["lm loss validation/code"]) == ([(20, 2.0)], [(20, 4.5)])


def test_tensorboard_curves_of_replicas_and_residuals(tmp_path: Path) -> None:
    sinks = opened(tensorboard_dir=str(tmp_path), log_timers_to_tensorboard=True)
    sinks.window(TIMED)
    sinks.close()
    curves = read_curves(tmp_path)
    expected = {
        "samples per second": 16.0,
        "samples per second per replica": 8.0,
        "tokens per second": 1024.0,
        "tokens per second per replica": 512.0,
        "seconds waited/dp-grad": 0.25,
        "residual over gradient/dp-grad": 0.75,
        "residual age in steps/dp-grad": 3.0,
        "bytes per iteration/control": 8.0,
        "compression ratio/control": 1.0,
        "forward-backward-time": 12.0,
    }
    assert {tag: curves[tag] for tag in expected} == {tag: [(20, value)] for tag, value in expected.items()}
    assert "residual over gradient/control" not in curves


def test_tensorboard_has_the_checks_of_chosen_compressors(tmp_path: Path) -> None:
    sinks = opened(tensorboard_dir=str(tmp_path))
    for iteration, cost, setting in ((100, 0.75, 1), (200, 0.125, 0)):
        sinks.event("loss_check", iteration, **loss_check(cost, setting))
    sinks.close()
    assert read_curves(tmp_path) == {
        "expected loss increase in percent": [(100, 1.0), (200, 0.375)],
        "expected loss increase in percent/dp-grad": [(100, 0.75), (200, 0.125)],
        "expected loss increase in percent/pp-forward": [(100, 0.25), (200, 0.25)],
        "compressor setting/dp-grad": [(100, 1.0), (200, 0.0)],
        "compressor setting/pp-forward": [(100, 2.0), (200, 2.0)],
    }


def test_tensorboard_has_the_steps_of_its_interval(tmp_path: Path) -> None:
    sinks = opened(tensorboard_dir=str(tmp_path), tensorboard_log_interval=2)
    for iteration in range(1, 7):
        sinks.step(step_at(iteration))
    sinks.close()
    assert [iteration for iteration, _ in read_curves(tmp_path)["lm loss"]] == [2, 4, 6]


def test_a_resumed_run_replaces_lost_points_on_every_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = opened(tensorboard_dir=str(tmp_path))
    for iteration in range(1, 8):
        sinks.step(step_at(iteration, 1.0))
    sinks.close()
    later = time.time() + 1.0  # files are read in the order of the seconds in their names
    monkeypatch.setattr(time, "time", lambda: later)
    sinks = opened(resume={"iterations": 4, "samples": 32, "tokens": 2048}, tensorboard_dir=str(tmp_path))
    for iteration in range(5, 10):
        sinks.step(step_at(iteration, 2.0))
    sinks.close()
    expected = [(i, 1.0 if i <= 4 else 2.0) for i in range(1, 10)]
    assert read_curves(tmp_path)["lm loss"] == expected
    assert read_curves(tmp_path / "samples")["lm loss vs samples"] == [(8 * i, value) for i, value in expected]


def test_a_failed_sink_is_closed_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(Sink):
        name = "disk.jsonl"

        def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            closed.append(self.name)

    closed: list[str] = []
    iterations: list[int] = []

    class Good(Sink):
        def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
            iterations.append(iteration)

    sinks = Sinks([Full(), Good()])
    sinks.event("note", 1)
    sinks.event("note", 2)
    assert iterations == [1, 2]
    assert closed == ["disk.jsonl"]
    (warning,) = capsys.readouterr().err.splitlines()
    assert "disk.jsonl" in warning
    assert "No space left" in warning


@pytest.mark.parametrize("flag", ["--log_txt_file", "--log-json-file", "--tensorboard-dir"])
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    settings: dict[str, Any] = {flag.strip("-").replace("-", "_"): str(tmp_path / "file" / "inside")}
    with pytest.raises(UserError, match=flag):
        opened(**settings)


def test_tensorboard_on_a_full_disk_is_dropped_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The error occurs in the writer's thread, which would print a traceback."""
    hook = threading.excepthook
    with largest_file(2000):
        sinks = opened(tensorboard_dir=str(tmp_path))
        for iteration in range(1, 100):
            sinks.step(step_at(iteration))
        sinks.close()
    warning = capfd.readouterr().err
    assert re.fullmatch(r"warning: TensorBoard's events in .* cannot be written any more, left out: .*\n", warning)
    assert threading.excepthook is hook


def test_growing_sequence_lengths_are_in_every_sink(tmp_path: Path) -> None:
    lines: list[str] = []
    path = tmp_path / "log.jsonl"
    sinks = opened(lines=lines, log_json_file=str(path), tensorboard_dir=str(tmp_path / "curves"))
    sinks.step(dataclasses.replace(step_at(1), curriculum_seqlen=40))
    sinks.window(dataclasses.replace(WINDOW, curriculum_seqlen=40, seq_length=40))
    sinks.close()
    assert lines[0].endswith("| curriculum seqlen:    40 |")
    assert json.loads(path.read_text())["curriculum_seqlen"] == 40
    assert read_curves(tmp_path / "curves")["curriculum_seqlen"] == [(1, 40.0)]


def test_figures_of_controllers_are_in_the_json_lines_and_the_curves(tmp_path: Path) -> None:
    path, folder = tmp_path / "log.jsonl", tmp_path / "curves"
    sinks = opened(log_json_file=str(path), tensorboard_dir=str(folder))
    sinks.window(TUNED)
    sinks.close()
    (train,) = (json.loads(line) for line in path.read_text().splitlines())
    assert train["controllers"] == {"dp-grad": {"entropy": -3.25, "rank_of_stage_1": 0.0}}
    curves = read_curves(folder)
    assert curves["entropy/dp-grad"] == [(20, -3.25)]
    assert curves["rank of stage 1/dp-grad"] == [(20, 0.0)]


def test_sinks_that_were_opened_before_a_failure_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(TextFileSink, "close", lambda self: closed.append("text file"))
    monkeypatch.setattr(TensorBoardSink, "__init__", fail := mock.Mock(side_effect=UserError("no package")))
    with pytest.raises(UserError, match="no package"):
        opened(log_txt_file=str(tmp_path / "log.txt"), tensorboard_dir=str(tmp_path / "tb"))
    assert fail.called
    assert closed == ["text file"]
