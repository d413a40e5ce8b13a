"""Curves in Weights & Biases, with a stand-in and with the package itself."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from tests.unit.training.test_sinks import (
    WINDOW,
    check_only_curves_are_lost,
    evaluation_at,
    loss_check,
    opened,
    step_at,
)


class FakeWandb(types.ModuleType):
    """A stand-in for the package wandb, which stores all values."""

    class Error(Exception):
        pass

    def __init__(self, trouble: str = "") -> None:
        super().__init__("wandb")
        self.trouble = trouble
        self.options: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str | None] = {}
        self.last_step = -1
        self.finished = False
        self.config = self  # of the run
        self.id = ""

    def init(self, **options: Any) -> FakeWandb:
        if self.trouble:
            raise FakeWandb.Error(self.trouble)
        self.options = options
        self.id = options.get("id", "new1")
        return self

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.settings |= values

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        """Drops points before the last step, also after a resume, as the package does."""
        if self.trouble:
            raise FakeWandb.Error(self.trouble)
        step = self.last_step + 1 if step is None else step
        if step >= self.last_step:
            self.last_step = step
            self.rows.append(values)

    def curve(self, name: str) -> list[tuple[float, float]]:
        """The points of a curve over the common axis."""
        axis = self.axes["*"]
        assert axis is not None
        return [(row[axis], row[name]) for row in self.rows if name in row]

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_curves_of_tensorboard(fake: FakeWandb, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    sinks = opened(
        wandb_project="mine", wandb_exp_name="first", wandb_save_dir=str(folder), log_validation_ppl_to_tensorboard=True
    )
    assert fake.options == {"project": "mine", "name": "first", "dir": str(folder)}
    assert folder.is_dir()
    sinks.event("config", 0, config={"model": {"num_layers": 4}}, size={})
    sinks.event("gradients", 0, density=0.1)
    sinks.event("loss_check", 20, **loss_check(0.75, 1))
    sinks.step(step_at(20))
    sinks.window(WINDOW)
    sinks.evaluation(evaluation_at(20))
    sinks.close()
    assert fake.settings == {"config": {"model": {"num_layers": 4}}, "size": {}}
    values = {name: value for row in fake.rows for name, value in row.items()}
    assert {row["iteration"] for row in fake.rows} == {20}
    assert [values[name] for name in ("lm loss", "grad-norm", "learning-rate", "samples")] == [1.0, 2.0, 1e-3, 160]
    names = ("expected loss increase in percent/dp-grad", "compressor setting/dp-grad")
    assert [values[name] for name in names] == [0.75, 1]
    assert values["tokens per second"] == WINDOW.tokens_per_second
    assert values["bytes per iteration/dp-grad"] == 4096.0
    assert values["lm loss validation ppl"] == pytest.approx(math.exp(3.25))
    assert "world-size" not in values
    assert fake.finished


def test_wandb_continues_the_run_of_a_checkpoint(fake: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user's variable names another run."""
    assert opened(wandb_project="mine").tracked_runs == {"wandb": "new1"}
    runs = {"wandb": "old7"}
    assert opened(wandb_project="mine", tracked_runs=runs).tracked_runs == runs
    assert (fake.options["id"], fake.options["resume"]) == ("old7", "allow")
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    opened(wandb_project="mine", tracked_runs=runs)
    assert "id" not in fake.options


def test_wandb_keeps_all_points_after_a_return_to_an_earlier_checkpoint(fake: FakeWandb) -> None:
    for first, last, value in ((1, 6, 1.0), (4, 7, 2.0)):
        sinks = opened(wandb_project="mine", tracked_runs={"wandb": "old7"})
        for iteration in range(first, last + 1):
            sinks.step(step_at(iteration, value))
        sinks.close()
    before, after = [(i, 1.0) for i in range(1, 7)], [(i, 2.0) for i in range(4, 8)]
    assert fake.curve("lm loss") == before + after


def test_a_wandb_error_ends_the_curves_alone(fake: FakeWandb, capsys: pytest.CaptureFixture[str]) -> None:
    check_only_curves_are_lost(fake, "--wandb-project", capsys)
    assert fake.finished


def test_wandb_that_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("No API key configured.\nUse `wandb login`"))
    with pytest.raises(
        UserError, match=r"^--wandb-project mine: No API key configured\.; log in .*WANDB_MODE=offline$"
    ):
        opened(wandb_project="mine")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    with pytest.raises(UserError, match=r"^--wandb-project mine: .*file"):
        opened(wandb_project="mine", wandb_save_dir=str(tmp_path / "file" / "inside"))


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")], ids=["missing", "a folder of runs"])
def test_wandb_without_the_package_is_refused(module: types.ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run leaves a folder ``wandb``, which Python takes for a package when it starts in its parent."""
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(
        UserError, match=r"^--wandb-project needs the wandb package: pip install wandb, or drop the flag"
    ):
        opened(wandb_project="mine")


def test_the_package_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
