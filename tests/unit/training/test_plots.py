"""The picture of a run."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.training import plots
from megatron.training.plots import (
    ENDINGS,
    curve_style,
    label_iterations,
    new_figure,
    plot_loss_curve,
    save_figure,
    time_unit,
)
from tests.support.disk import largest_file

pytest.importorskip("matplotlib")


def write_run(path: Path, floor: float, iterations: int = 100) -> Path:
    with path.open("w") as file:
        for i in range(10, iterations + 1, 10):
            loss = floor + 6 * math.exp(-i / 30)
            event = {"kind": "train", "iteration": i, "lm_loss": loss, "consumed_tokens": i * 8192}
            file.write(json.dumps(event | {"global_batch_size": 8}) + "\n")
            if i % 50 == 0:
                file.write(json.dumps({"kind": "validation", "iteration": i, "lm_loss": loss + 0.1}) + "\n")
        file.write(json.dumps({"kind": "test", "iteration": iterations, "lm_loss": floor + 0.3}) + "\n")
    return path


def test_a_picture_is_drawn_and_nothing_else_is_left(tmp_path: Path) -> None:
    from matplotlib.image import imread

    run = write_run(tmp_path / "a.jsonl", floor=3.0)
    out = plot_loss_curve([run], tmp_path / "out" / "loss.png", reference_lines={"unigram entropy": 6.9})
    image = imread(out)
    assert image.shape[:2] == (720, 1200)
    assert image.std() > 0.05
    assert [path.name for path in out.parent.iterdir()] == ["loss.png"]


def test_the_reference_line_is_in_the_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a.jsonl", floor=3.0)
    without = plot_loss_curve([run], tmp_path / "1.png").read_bytes()
    again = plot_loss_curve([run], tmp_path / "2.png").read_bytes()
    with_line = plot_loss_curve([run], tmp_path / "3.png", reference_lines={"x": 6.0}).read_bytes()
    assert without == again != with_line


def test_several_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, floor) for name, floor in (("a.jsonl", 3.0), ("b.jsonl", 3.5))]
    assert plot_loss_curve(runs, tmp_path / "loss.png").stat().st_size > 1000


def test_a_file_without_training_events_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"kind": "validation", "iteration": 1, "lm_loss": 2.0}\n')
    with pytest.raises(UserError, match="no training events"):
        plot_loss_curve([empty], tmp_path / "loss.png")
    with pytest.raises(UserError, match="cannot be read"):
        plot_loss_curve([tmp_path / "absent.jsonl"], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a.jsonl", floor=3.0)
    whole = plot_loss_curve([run], tmp_path / "1.png").read_bytes()
    events = [json.loads(line) for line in run.read_text().splitlines()]
    for event in events:
        if event["iteration"] == 50:
            event["lm_loss"] = None
    run.write_text("".join(json.dumps(event) + "\n" for event in events))
    gap = plot_loss_curve([run], tmp_path / "2.png").read_bytes()
    run.write_text("".join(json.dumps(event) + "\n" for event in events if event["iteration"] != 50))
    assert whole != gap != plot_loss_curve([run], tmp_path / "3.png").read_bytes()


def test_a_record_that_is_not_one_is_named(tmp_path: Path) -> None:
    run = tmp_path / "a.jsonl"
    run.write_text('{"kind": "train", "iteration": 1, "lm_loss": 2.0}\n{"kind": "train", "lm_loss": 2.0}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: iteration is missing"):
        plot_loss_curve([run], tmp_path / "loss.png")


def test_the_ending_says_the_format(tmp_path: Path) -> None:
    assert set(ENDINGS) <= new_figure(1, 1).canvas.get_supported_filetypes().keys()
    assert save_figure(new_figure(1, 1), tmp_path / "a.SVG").read_bytes().startswith(b"<?xml")
    assert save_figure(new_figure(1, 1), tmp_path / "a").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match=r"a\.xyz: no picture ends so; use \.png, \.pdf"):
        plot_loss_curve([tmp_path / "absent.jsonl"], tmp_path / "a.xyz")
    assert not (tmp_path / "a.xyz").exists()


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with largest_file(100), pytest.raises(UserError, match=r"full.png: File too large; name a file elsewhere"):
        save_figure(new_figure(1, 1), tmp_path / "full.png")
    assert not list(tmp_path.iterdir())


def test_the_validation_at_the_end_is_no_point_of_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of other samples, and stands at the same iteration where the run ends on an interval."""
    run = write_run(tmp_path / "a.jsonl", floor=3.0)
    with run.open("a") as file:
        file.write(json.dumps({"kind": "validation", "iteration": 100, "lm_loss": 9.0, "samples": 64}) + "\n")
    figures: list[Any] = []

    def keep(figure: Any, path: Path) -> Path:
        figures.append(figure)
        return path

    monkeypatch.setattr(plots, "save_figure", keep)
    plot_loss_curve([run], tmp_path / "loss.png")
    curves = {line.get_label(): list(line.get_xdata()) for line in figures[0].axes[0].get_lines()}
    (validation,) = (xs for label, xs in curves.items() if label.startswith("validation: "))
    assert validation == [50, 100]
    assert curves["validation at the end: 9.00"] == [100]
    ticks = figures[0].axes[0].get_xticks()
    assert all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize("last", [2, 3, 7, 20, 999])
def test_iterations_on_an_axis_are_whole(last: int) -> None:
    axes = new_figure(3.0, 2.0).add_subplot()
    axes.plot([1, last], [0.0, 1.0])
    label_iterations(axes)
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert axes.get_xlabel() == "iteration"


def test_curves_are_told_apart() -> None:
    styles = [curve_style(number) for number in range(28)]
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == 28
    for one, other in pairwise(styles):
        assert one["color"] != other["color"]
        assert one["linestyle"] != other["linestyle"]


@pytest.mark.parametrize(("seconds", "unit"), [(5, "seconds"), (300, "minutes"), (7300, "hours"), (9e5, "days")])
def test_times_are_in_the_unit_that_fits(seconds: float, unit: str) -> None:
    name, length = time_unit(seconds / 3600)
    assert name == unit
    assert 2 < seconds / 3600 / length < 121
