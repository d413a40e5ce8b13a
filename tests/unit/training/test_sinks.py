"""Metrics in text files, JSON lines and TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.config.logs import LoggingConfig
from megatron.training.curves import TensorBoardSink
from megatron.training.metrics import Evaluation, PointTraffic, StepMetrics, format_train_line
from megatron.training.records import read_records
from megatron.training.sink import Sink
from megatron.training.sinks import Sinks, open_sinks
from tests.support.disk import largest_file

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
    console = (list[str]() if lines is None else lines).append
    logging = LoggingConfig(**config)
    return Sinks(
        open_sinks(logging, dp_size=2, world_size=4, resume=resume, console=console, tracked_runs=tracked_runs)
    )


def window_at(iteration: int, loss: float = 3.5) -> StepMetrics:
    samples = 8 * iteration
    made = dataclasses.replace(WINDOW, iteration=iteration, losses={"lm loss": loss})
    return dataclasses.replace(made, consumed_samples=samples, consumed_tokens=64 * samples)


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


def test_lines_go_to_the_console_and_are_appended_to_the_file(tmp_path: Path) -> None:
    path, lines = tmp_path / "deep" / "log.txt", list[str]()
    for _ in range(2):
        sinks = opened(lines=lines, log_txt_file=str(path))
        sinks.line("hello")
        sinks.window(WINDOW)
        sinks.close()
    assert lines == ["hello", format_train_line(WINDOW)] * 2
    assert path.read_text().splitlines() == lines


def test_the_console_is_the_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    Sinks(open_sinks(LoggingConfig())).line("hello")
    assert capsys.readouterr().out == "hello\n"


def test_a_training_event_holds_the_honest_figures(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sinks = opened(log_json_file=str(path))
    sinks.window(TIMED)
    sinks.evaluation(evaluation_at(20))
    sinks.event("checkpoint", 20, path="iter_0000020", seconds=0.1)
    # Each line is in the file as soon as it is written, before any close.
    train, validation, checkpoint = (json.loads(line) for line in path.read_text().splitlines())
    assert train.pop("time") > 0
    assert train == {
        "kind": "train",
        "iteration": 20,
        "consumed_samples": 160,
        "consumed_tokens": 10240,
        "lm_loss": 3.5,
        "learning_rate": 1e-3,
        "global_batch_size": 8,
        "loss_scale": 1.0,
        "grad_norm": 2.0,
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "seconds_per_iteration": 0.5,
        "samples_per_second": 16.0,
        "tokens_per_second": 1024.0,
        "benchmark_tflops": 0.25,
        "remaining_seconds": 40.0,
        "model_tflops": 0.2,
        "mfu": 0.4,
        "computed_s": 0.2,
        "memory_bytes": 10**9,
        "comm": {
            "dp-grad": {
                "raw_bytes": 8192.0,
                "wire_bytes": 4096.0,
                "coded_s": 0.5,
                "waited_s": 0.25,
                "residual": 0.75,
                "staleness": 3.0,
            },
            "control": {"raw_bytes": 8, "wire_bytes": 8, "coded_s": 0, "waited_s": 0},
        },
        "timers_ms": {"forward-backward": 12.0},
    }
    assert (validation["kind"], validation["lm_loss"], validation["samples"]) == ("validation", 3.25, None)
    assert "sets" not in validation
    assert (checkpoint["kind"], checkpoint["path"]) == ("checkpoint", "iter_0000020")


def test_numbers_that_json_cannot_say_become_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sinks = opened(log_json_file=str(path))
    sinks.event("note", 1, values=[math.nan, 1.0], nested={"x": -math.inf})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    event = json.loads(path.read_text(), parse_constant=refuse)
    assert (event["values"], event["nested"]) == ([None, 1.0], {"x": None})


def test_events_of_lost_work_are_left_out_after_a_resume(tmp_path: Path) -> None:
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


def test_records_check_what_is_asked_of_them(tmp_path: Path) -> None:
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


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve of a TensorBoard folder (not its subfolders), by TensorBoard's own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


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
    several, one = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert (several["kind"], several["lm_loss"]) == ("validation", 3.25)
    assert several["sets"] == {"news": {"lm_loss": 2.0}, "code": {"lm_loss": 4.5}}
    assert "sets" not in one
    curves = read_curves(tmp_path)
    assert curves["lm loss validation"] == [(20, 3.25), (30, 3.25)]
    assert (curves["lm loss validation/news"], curves["lm loss validation/code"]) == ([(20, 2.0)], [(20, 4.5)])


def test_tensorboard_tags(tmp_path: Path) -> None:
    sinks = opened(
        tensorboard_dir=str(tmp_path),
        log_timers_to_tensorboard=True,
        log_batch_size_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
    )
    sinks.step(step_at(20))
    sinks.window(TIMED)
    sinks.evaluation(evaluation_at(20))
    sinks.close()
    curves = read_curves(tmp_path)
    assert {tag: points for tag, points in curves.items() if len(points) != 1} == {}
    values = {tag: points[0][1] for tag, points in curves.items()}
    assert values == pytest.approx(
        {
            "lm loss": 1.0,
            "learning-rate": 1e-3,
            "batch-size": 8,
            "loss-scale": 1.0,
            "grad-norm": 2.0,
            "iteration-time": 0.5,
            "samples per second": 16.0,
            "samples per second per replica": 8.0,
            "tokens per second": 1024.0,
            "tokens per second per replica": 512.0,
            "TFLOPs per gpu (estimated)": 0.25,
            "model TFLOPs per device": 0.2,
            "mem-max-allocated-bytes": 1e9,
            "bytes per iteration/dp-grad": 4096,
            "compression ratio/dp-grad": 2.0,
            "seconds coding/dp-grad": 0.5,
            "seconds waited/dp-grad": 0.25,
            "residual over gradient/dp-grad": 0.75,
            "residual age in steps/dp-grad": 3.0,
            "bytes per iteration/control": 8.0,
            "compression ratio/control": 1.0,
            "seconds coding/control": 0.0,
            "MFU": 0.4,
            "seconds computing": 0.2,
            "seconds waited/control": 0.0,
            "forward-backward-time": 12.0,
            "lm loss validation": 3.25,
            "lm loss validation ppl": math.exp(3.25),
        }
    )
    assert read_curves(tmp_path / "samples")["lm loss vs samples"] == [(160, 1.0)]
    assert read_curves(tmp_path / "samples")["lm loss validation vs samples"] == [(160, 3.25)]
    assert read_curves(tmp_path / "tokens")["iteration-time vs tokens"] == [(10240, 0.5)]


def test_tensorboard_options_are_followed(tmp_path: Path) -> None:
    sinks = opened(
        tensorboard_dir=str(tmp_path),
        tensorboard_log_interval=2,
        log_learning_rate_to_tensorboard=False,
        log_loss_scale_to_tensorboard=False,
    )
    for iteration in range(1, 7):
        sinks.step(step_at(iteration))
    sinks.window(TIMED)
    sinks.evaluation(evaluation_at(6))
    sinks.close()
    curves = read_curves(tmp_path)
    assert [step for step, _ in curves["lm loss"]] == [2, 4, 6]
    absent = {
        "learning-rate",
        "loss-scale",
        "batch-size",
        "forward-backward-time",
        "lm loss validation ppl",
    }
    assert absent.isdisjoint(curves)


def test_a_resumed_run_replaces_the_lost_points_on_every_axis(tmp_path: Path) -> None:
    sinks = opened(tensorboard_dir=str(tmp_path))
    for iteration in range(1, 8):
        sinks.step(step_at(iteration, 1.0))
    sinks.close()
    time.sleep(1.0)  # files are read in the order of the seconds in their names
    sinks = opened(resume={"iterations": 4, "samples": 32, "tokens": 2048}, tensorboard_dir=str(tmp_path))
    for iteration in range(5, 10):
        sinks.step(step_at(iteration, 2.0))
    sinks.close()
    want = [(i, 1.0 if i <= 4 else 2.0) for i in range(1, 10)]
    assert read_curves(tmp_path)["lm loss"] == want
    assert read_curves(tmp_path / "samples")["lm loss vs samples"] == [(8 * i, v) for i, v in want]


def test_a_sink_that_fails_is_closed_and_dropped_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(Sink):
        name = "disk.jsonl"

        def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            closed.append(self.name)

    closed: list[str] = []
    seen: list[int] = []

    class Good(Sink):
        def event(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
            seen.append(iteration)

    sinks = Sinks([Full(), Good()])
    sinks.event("note", 1)
    sinks.event("note", 2)
    assert seen == [1, 2]
    assert closed == ["disk.jsonl"]
    (warning,) = capsys.readouterr().err.splitlines()
    assert "disk.jsonl" in warning
    assert "No space left" in warning


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--log_txt_file", "log_txt_file"),
        ("--log-json-file", "log_json_file"),
        ("--tensorboard-dir", "tensorboard_dir"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path, flag: str, setting: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    settings: dict[str, Any] = {setting: str(tmp_path / "file" / "inside")}
    with pytest.raises(UserError, match=flag):
        open_sinks(LoggingConfig(**settings))


def test_tensorboard_on_a_full_disk_is_dropped_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its writer has a thread of its own, which meets the error and would print a trace."""
    hook = threading.excepthook
    with largest_file(2000):
        sinks = Sinks([TensorBoardSink(tmp_path, LoggingConfig())])
        for iteration in range(1, 100):
            sinks.step(step_at(iteration))
        sinks.close()
    warning = capfd.readouterr().err
    assert re.fullmatch(r"warning: TensorBoard's events in .* cannot be written any more, left out: .*\n", warning)
    assert threading.excepthook is hook


class FakeWandb(types.ModuleType):
    """A stand-in for the package wandb, which keeps what it is given."""

    class Error(Exception):
        pass

    def __init__(self, trouble: str = "") -> None:
        super().__init__("wandb")
        self.trouble = trouble
        self.given: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str | None] = {}
        self.last_step = -1
        self.finished = False
        self.config = self  # of the run
        self.id = ""

    def init(self, **given: Any) -> FakeWandb:
        if self.trouble:
            raise FakeWandb.Error(self.trouble)
        self.given = given
        self.id = given.get("id", "new1")
        return self

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.settings |= values

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        """As the package does, drops the points of a step before the last one, which a run that goes on has, too."""
        if self.trouble:
            raise FakeWandb.Error(self.trouble)
        step = self.last_step + 1 if step is None else step
        if step >= self.last_step:
            self.last_step = step
            self.rows.append(values)

    def curve(self, name: str) -> list[tuple[float, float]]:
        """The points of a curve over the axis that is defined for all."""
        axis = self.axes["*"]
        assert axis is not None
        return [(row[axis], row[name]) for row in self.rows if name in row]

    def finish(self) -> None:
        self.finished = True


def test_weights_and_biases_get_the_curves_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = tmp_path / "files"
    sinks = opened(
        wandb_project="mine", wandb_exp_name="first", wandb_save_dir=str(folder), log_validation_ppl_to_tensorboard=True
    )
    assert fake.given == {"project": "mine", "name": "first", "dir": str(folder)}
    assert folder.is_dir()
    sinks.event("config", 0, config={"model": {"num_layers": 4}}, size={})
    sinks.event("gradients", 0, density=0.1)
    sinks.step(step_at(20))
    sinks.window(WINDOW)
    sinks.evaluation(evaluation_at(20))
    sinks.close()
    assert fake.settings == {"config": {"model": {"num_layers": 4}}, "size": {}}
    at = {name: value for row in fake.rows for name, value in row.items()}
    assert {row["iteration"] for row in fake.rows} == {20}
    assert (at["lm loss"], at["grad-norm"], at["learning-rate"], at["samples"]) == (1.0, 2.0, 1e-3, 160)
    assert at["tokens per second"] == WINDOW.tokens_per_second
    assert at["bytes per iteration/dp-grad"] == 4096.0
    assert at["lm loss validation ppl"] == pytest.approx(math.exp(3.25))
    assert "world-size" not in at
    assert fake.finished


def test_weights_and_biases_go_on_with_the_run_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user's own variable names another."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert opened(wandb_project="mine").tracked_runs == {"wandb": "new1"}
    runs = {"wandb": "old7"}
    assert opened(wandb_project="mine", tracked_runs=runs).tracked_runs == runs
    assert (fake.given["id"], fake.given["resume"]) == ("old7", "allow")
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    opened(wandb_project="mine", tracked_runs=runs)
    assert "id" not in fake.given


def test_weights_and_biases_keep_the_points_of_a_run_that_goes_back_to_an_earlier_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first, last, value in ((1, 6, 1.0), (4, 7, 2.0)):
        sinks = opened(wandb_project="mine", tracked_runs={"wandb": "old7"})
        for iteration in range(first, last + 1):
            sinks.step(step_at(iteration, value))
        sinks.close()
    before, after = [(i, 1.0) for i in range(1, 7)], [(i, 2.0) for i in range(4, 8)]
    assert fake.curve("lm loss") == before + after


def test_trouble_of_weights_and_biases_costs_the_curves_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    lines = list[str]()
    sinks = opened(lines=lines, wandb_project="mine")
    fake.trouble = "no connection"
    for iteration in (1, 2):
        sinks.step(step_at(iteration))
    sinks.line("goes on")
    warning = "warning: the run in --wandb-project mine cannot be written any more, left out: no connection\n"
    assert capsys.readouterr().err == warning
    assert lines == ["goes on"]
    assert fake.finished


def test_weights_and_biases_that_do_not_start_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("No API key configured.\nUse `wandb login`"))
    with pytest.raises(
        UserError, match=r"^--wandb-project mine: No API key configured\.; log in .*WANDB_MODE=offline$"
    ):
        opened(wandb_project="mine")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    with pytest.raises(UserError, match=r"^--wandb-project mine: .*file"):
        opened(wandb_project="mine", wandb_save_dir=str(tmp_path / "file" / "inside"))


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")], ids=["missing", "a folder of its runs"])
def test_without_the_package_weights_and_biases_are_refused(
    module: types.ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run leaves a folder wandb behind, which Python takes for a package when it starts there."""
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(
        UserError, match=r"^--wandb-project needs the wandb package: pip install wandb, or drop the flag"
    ):
        opened(wandb_project="mine")


def test_the_package_of_weights_and_biases_writes_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb.sdk", reason="the package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sinks = opened(wandb_project="mine", wandb_exp_name="first", wandb_save_dir=str(tmp_path))
    sinks.event("config", 0, config={"model": {"num_layers": 4}}, size={})
    losses = {1: 5.03125, 3: 4.03125, 2: 6.03125}
    for iteration, loss in losses.items():
        sinks.step(step_at(iteration, loss))
    sinks.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = run.read_bytes()
    assert b"lm loss" in content
    assert [str(loss).encode() in content for loss in losses.values()] == [True] * 3, "iteration 2 comes after 3"


def test_growing_sequences_are_in_every_place(tmp_path: Path) -> None:
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
