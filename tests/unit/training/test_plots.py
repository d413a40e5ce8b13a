"""Plots of training runs."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.base.figures import ENDINGS, curve_style, label_iterations, new_figure, save_figure, time_unit
from megatron.training import plots
from megatron.training.plots import plot_loss_curve
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


def drawn_curves(runs: list[Path], monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """Lines of a plot by label."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    plot_loss_curve(runs, "unused.png", **options)
    return {line.get_label(): line for line in figures[0].axes[0].get_lines()}


def test_a_picture_is_drawn_without_leftover_files(tmp_path: Path) -> None:
    from matplotlib.image import imread

    run = write_run(tmp_path / "a.jsonl", floor=3.0)
    out = plot_loss_curve([run], tmp_path / "out" / "loss.png", reference_lines={"unigram entropy": 6.9})
    image = imread(out)
    assert image.shape[:2] == (720, 1200)
    assert image.std() > 0.05
    assert [path.name for path in out.parent.iterdir()] == ["loss.png"]


def test_several_runs_with_a_reference_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / name, floor) for name, floor in (("a.jsonl", 3.0), ("b.jsonl", 3.5))]
    curves = drawn_curves(runs, monkeypatch, reference_lines={"entropy": 6.0})
    (label,) = (label for label in curves if label.startswith("entropy"))
    assert set(curves[label].get_ydata()) == {6.0}
    losses = [curves[f"{name}, training"].get_ydata()[0] for name in ("a", "b")]
    assert losses[1] - losses[0] == pytest.approx(0.5)


@pytest.mark.parametrize("growing", ["", "global_batch_size", "curriculum_seqlen"])
def test_tokens_have_an_axis_if_all_iterations_have_as_many(
    growing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = tmp_path / "a.jsonl", 0
    with path.open("w") as file:
        for iteration in (1, 2, 3):
            sizes = {"global_batch_size": 8, "curriculum_seqlen": 64}
            if growing and iteration == 1:
                sizes[growing] //= 2
            tokens += sizes["global_batch_size"] * sizes["curriculum_seqlen"]
            event = {"kind": "train", "iteration": iteration, "lm_loss": 3.0, "consumed_tokens": tokens}
            file.write(json.dumps({**event, **sizes}) + "\n")
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    plot_loss_curve([path], "unused.png")
    assert bool(figures[0].axes[0].child_axes) == (not growing)


def test_the_same_runs_give_the_same_picture(tmp_path: Path) -> None:
    """To the byte, also with a gap inside a curve."""
    runs = [write_run(tmp_path / name, floor) for name, floor in (("a.jsonl", 3.0), ("b.jsonl", 3.5))]
    with runs[0].open("a") as file:
        for iteration, loss in ((110, None), (120, 3.0)):
            file.write(json.dumps({"kind": "train", "iteration": iteration, "lm_loss": loss}) + "\n")
    first, second = (plot_loss_curve(runs, tmp_path / name).read_bytes() for name in ("1.png", "2.png"))
    assert first == second


def test_a_file_without_training_events_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"kind": "validation", "iteration": 1, "lm_loss": 2.0}\n')
    with pytest.raises(UserError, match="no training events"):
        plot_loss_curve([empty], tmp_path / "loss.png")
    with pytest.raises(UserError, match="cannot be read"):
        plot_loss_curve([tmp_path / "absent.jsonl"], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a.jsonl", floor=3.0)
    with run.open("a") as file:
        file.write(json.dumps({"kind": "train", "iteration": 110, "lm_loss": None}) + "\n")
    curve = drawn_curves([run], monkeypatch)["training"]
    assert [x for x, y in zip(curve.get_xdata(), curve.get_ydata(), strict=True) if math.isnan(y)] == [110]


def test_an_invalid_record_is_named(tmp_path: Path) -> None:
    run = tmp_path / "a.jsonl"
    run.write_text('{"kind": "train", "iteration": 1, "lm_loss": 2.0}\n{"kind": "train", "lm_loss": 2.0}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: iteration is missing"):
        plot_loss_curve([run], tmp_path / "loss.png")


def test_the_extension_chooses_the_format(tmp_path: Path) -> None:
    assert set(ENDINGS) <= new_figure(1, 1).canvas.get_supported_filetypes().keys()
    assert save_figure(new_figure(1, 1), tmp_path / "a.SVG").read_bytes().startswith(b"<?xml")
    assert save_figure(new_figure(1, 1), tmp_path / "a").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match=r"a\.xyz: not a picture format; use \.png, \.pdf"):
        plot_loss_curve([tmp_path / "absent.jsonl"], tmp_path / "a.xyz")
    assert not (tmp_path / "a.xyz").exists()


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with largest_file(100), pytest.raises(UserError, match=r"full.png: File too large; name a file elsewhere"):
        save_figure(new_figure(1, 1), tmp_path / "full.png")
    assert not list(tmp_path.iterdir())


def test_the_final_validation_is_apart_from_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has other samples, perhaps at the iteration of a point of the curve."""
    run = write_run(tmp_path / "a.jsonl", floor=3.0)
    with run.open("a") as file:
        file.write(json.dumps({"kind": "validation", "iteration": 100, "lm_loss": 9.0, "samples": 64}) + "\n")
    curves = drawn_curves([run], monkeypatch)
    (validation,) = (line for label, line in curves.items() if label.startswith("validation: "))
    assert list(validation.get_xdata()) == [50, 100]
    assert list(curves["validation at the end: 9.00"].get_xdata()) == [100]
    assert all(tick == int(tick) for tick in validation.axes.get_xticks())


@pytest.mark.parametrize("last", [2, 3, 7, 20, 999])
def test_iterations_on_an_axis_are_whole(last: int) -> None:
    axes = new_figure(3.0, 2.0).add_subplot()
    axes.plot([1, last], [0.0, 1.0])
    label_iterations(axes)
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert axes.get_xlabel() == "iteration"


def test_neighboring_curves_differ_in_color_and_dashes() -> None:
    styles = [curve_style(number) for number in range(28)]
    assert len({(style["color"], str(style["linestyle"])) for style in styles}) == 28
    for style, following in pairwise(styles):
        assert style["color"] != following["color"]
        assert style["linestyle"] != following["linestyle"]


@pytest.mark.parametrize(("seconds", "unit"), [(5, "seconds"), (300, "minutes"), (7300, "hours"), (9e5, "days")])
def test_times_are_in_the_unit_that_fits(seconds: float, unit: str) -> None:
    name, length = time_unit(seconds / 3600)
    assert name == unit
    assert 2 < seconds / 3600 / length < 121
