"""Curves of several runs, from JSON lines and from text logs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loss_curves
from benchmarks.loss_curves import default_smooth, main, smooth_losses
from benchmarks.loss_logs import LossPoint, interpolate, read_run


def _json_log(path: Path, seconds: float, gain: float, steps: int = 20) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    events = []
    for iteration in range(1, steps + 1):
        loss = 10.0 - gain * iteration
        figures = {"consumed_tokens": iteration * 100, "lm_loss": loss, "seconds_per_iteration": seconds}
        events.append({"kind": "train", "iteration": iteration, **figures})
        if iteration % 5 == 0:
            events.append({"kind": "validation", "iteration": iteration, "lm_loss": loss + 0.5})
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"kind": "tra')
    return path


def _text_log(path: Path) -> Path:
    """Iterations 1 to 6, and again from 5 after a restart."""
    lines = []
    for iteration, loss in [(i, 9.0 - i) for i in range(1, 7)] + [(i, 8.5 - i) for i in range(5, 9)]:
        lines.append(
            f" iteration {iteration:8d}/     500 | consumed samples: {iteration * 4:12d} | "
            "elapsed time per iteration (ms): 2000.0 | learning rate: 1.000E-04 | global batch size:     4 | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 |"
        )
        if iteration == 4:
            lines.append(" validation loss at iteration 4 | lm loss value: 5.500000E+00 | lm loss PPL: 2.4E+02 | ")
    path.write_text("\n".join(lines))
    return path


def test_json_lines_and_text_logs_are_read_alike(tmp_path: Path) -> None:
    run = read_run(f"dense={_json_log(tmp_path / 'a.jsonl', 3.0, 0.1)}", None)
    assert (run.name, len(run.train), [p.iteration for p in run.valid]) == ("dense", 20, [5, 10, 15, 20])
    second = run.valid[1]
    assert (second.iteration, second.tokens) == (10, 1000)
    assert second.loss == pytest.approx(9.5)
    assert second.hours == pytest.approx(30 / 3600)
    text = read_run(str(_text_log(tmp_path / "b.txt")), 128)
    assert [(p.iteration, p.loss) for p in text.train][-5:] == [(4, 5.0), (5, 3.5), (6, 2.5), (7, 1.5), (8, 0.5)]
    assert text.train[-1].hours == pytest.approx(16 / 3600)
    assert text.train[0].tokens == 4 * 128
    (only,) = text.valid
    assert (only.iteration, only.loss, only.tokens) == (4, 5.5, 4 * 4 * 128)
    assert only.hours == pytest.approx(8 / 3600)


def test_a_restart_after_a_validation_replaces_the_later_lines(tmp_path: Path) -> None:
    lines = _text_log(tmp_path / "a.txt").read_text().splitlines()
    validation = " validation loss at iteration 6 | lm loss value: 3.0E+00 | lm loss PPL: 2.4E+02 | "
    restart = next(number for number, line in enumerate(lines) if number > 6 and " 5/ " in line)
    (tmp_path / "b.txt").write_text("\n".join([*lines[:restart], validation, *lines[restart:]]))
    run = read_run(str(tmp_path / "b.txt"), 128)
    assert [point.iteration for point in run.train] == list(range(1, 9))
    assert [point.iteration for point in run.valid] == [4]


def test_time_to_a_loss_beside_the_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The compressed run learns half as much an iteration, in a quarter of the time."""
    dense = _json_log(tmp_path / "dense" / "log.jsonl", 4.0, 0.2)
    fast = _json_log(tmp_path / "fast" / "log.jsonl", 1.0, 0.1, steps=40)
    out = tmp_path / "new" / "loss.png"
    assert main([str(dense), str(fast), "--baseline", "dense", "-o", str(out), "--smooth", "3"]) == 0
    printed = capsys.readouterr().out
    assert (
        "| run | iterations | training loss | validation loss | seconds | 6.5000 after | seconds | times dense |"
        in printed
    )
    assert "| dense | 20 | 6.2000 | 6.5000 | 80 | 20 | 80 | 1.00 |" in printed
    assert "| fast | 40 | 6.1000 | 6.5000 | 40 | 40 | 40 | 2.00 |" in printed
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_a_short_run_is_smoothed_over_a_tenth_of_it_and_drawn_beside_its_log(tmp_path: Path) -> None:
    short = read_run(str(_json_log(tmp_path / "short" / "log.jsonl", 4.0, 0.2, steps=40)), None)
    long = read_run(str(_json_log(tmp_path / "long" / "log.jsonl", 4.0, 0.2, steps=400)), None)
    assert (default_smooth([short]), default_smooth([long]), default_smooth([short, long])) == (3, 10, 3)
    assert main([f"a={tmp_path / 'short' / 'log.jsonl'}", f"b={tmp_path / 'long' / 'log.jsonl'}"]) == 0
    assert (tmp_path / "short" / "loss.png").is_file()


def test_means_and_lines_between_points() -> None:
    points = [LossPoint(i, float(i)) for i in range(5)]
    assert smooth_losses(points, 1) == [0, 1, 2, 3, 4]
    assert smooth_losses(points, 3) == [0, 0.5, 1, 2, 3]
    gap = [LossPoint(i, loss) for i, loss in enumerate([1.0, math.nan, 4.0, 6.0, 8.0])]
    assert [str(mean) for mean in smooth_losses(gap, 2)] == ["1.0", "nan", "4.0", "5.0", "7.0"]
    assert interpolate([0, 2], [1, 3], 1.0) == 2.0
    assert interpolate([0, 2], [1, 3], 2.5) is None
    assert interpolate([1], [7], 1) == 7
    assert interpolate([0, 2, 4], [1, math.nan, 5], 0.0) == 1
    assert interpolate([0, 2, 4], [1, math.nan, 5], 4.0) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: No such file"),
        (["{empty}"], "no training losses; give a file of --log-json-file"),
        (["{text}"], "the text log lacks tokens; add --seq-length"),
        (["{json}", "--x", "days"], "--x days: choose from iterations, tokens, hours"),
        (["{json}", "--baseline", "none"], "--baseline none: the runs are"),
        (["{json}", "{json}"], "two runs are named"),
        (["{json}", "--smooth", "0"], "--smooth 0: must be at least 1"),
        (["={json}"], "no name before the ="),
        (["name="], "name=: no file after the ="),
        (["runs/lr=1/missing.jsonl"], "runs/lr=1/missing.jsonl: No such file"),
    ],
)
def test_invalid_runs_are_refused_in_a_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("nothing here\n")
    places = {
        "json": _json_log(tmp_path / "a.jsonl", 1.0, 0.1),
        "text": _text_log(tmp_path / "b.txt"),
        "empty": tmp_path / "empty.txt",
    }
    assert main([word.format(**places) for word in words] + ["-o", str(tmp_path / "out.png")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out.png").exists()


def _train_line(iteration: int, loss: str | None, skipped: int = 0) -> str:
    """A training line; a loss that is None is left out of it, as the log does with a nan."""
    loss_field = "" if loss is None else f" lm loss: {loss} |"
    return (
        f" iteration {iteration:8d}/     500 | consumed samples: {iteration * 4:12d} | "
        f"elapsed time per iteration (s): 2.0000 | global batch size:     4 |{loss_field} loss scale: 1.0 | "
        f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
    )


def _losses(word: str) -> list[str]:
    return [f"{point.iteration}:{point.loss:g}" for point in read_run(word, None).train]


@pytest.mark.parametrize("third", ["nan", "NAN", None])
@pytest.mark.filterwarnings("error")
def test_losses_that_are_not_finite_are_reported(
    third: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [_train_line(i, loss) for i, loss in enumerate(("5.0E+00", "4.0E+00", third, "INF", "3.0E+00"), 1)]
    lines.insert(4, " validation loss at iteration 4 | lm loss value: NAN | lm loss PPL: NAN | ")
    log = tmp_path / "a.txt"
    log.write_text("\n".join([*lines, _train_line(6, None)[:90], _train_line(6, "2.0E+00")[:110]]))
    assert _losses(str(log)) == ["1:5", "2:4", "3:nan", "4:nan", "5:3"]
    assert (
        main([str(log), "--x", "iterations", "--baseline", "a", "--smooth", "10", "-o", str(tmp_path / "a.png")]) == 0
    )
    printed = capsys.readouterr().out
    assert "a: training losses that are not finite: 2, the first at iteration 3\n" in printed
    assert "a: validation losses that are not finite: 1, the first at iteration 4\n" in printed
    assert "| a | 5 | 4.0000 | nan | 10 |\n" in printed
    log.write_text("\n".join([*lines, _train_line(3, third)]))
    assert _losses(str(log)) == ["1:5", "2:4", "3:nan"]


def test_windows_without_a_step_have_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss scale that starts too high skips steps: nothing diverged."""
    lines = [_train_line(10, None, 1), _train_line(20, "4.0E+00", 9), _train_line(30, None, 10), _train_line(40, "3.0")]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    assert _losses(str(tmp_path / "a.txt")) == ["20:4", "40:3"]
    assert main([str(tmp_path / "a.txt"), "--x", "hours", "--smooth", "10", "-o", str(tmp_path / "a.png")]) == 0
    assert "not finite" not in capsys.readouterr().out


@pytest.mark.parametrize("start", ["", "\n", "  \r\n", "\ufeff", "\ufeff\n"])
@pytest.mark.filterwarnings("error")
def test_nulls_of_a_json_log_are_gaps(start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever an editor put before the first line."""
    for name, losses in (("some", [5.0, None, 3.0]), ("all", [None, None, None])):
        events = [{"kind": "train", "iteration": i, "lm_loss": loss} for i, loss in enumerate(losses, 1)]
        events.append({"kind": "train", "iteration": 4})
        log = tmp_path / f"{name}.jsonl"
        log.write_text(start + "".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
        assert main([str(log), "--x", "iterations", "--smooth", "10", "-o", str(tmp_path / "a.png")]) == 0
    assert _losses(str(tmp_path / "some.jsonl")) == ["1:5", "2:nan", "3:3"]
    printed = capsys.readouterr().out
    assert "some: training losses that are not finite: 1, the first at iteration 2\n" in printed
    assert "all: training losses that are not finite: 3, the first at iteration 1\n" in printed


def test_a_path_may_hold_an_equals_sign(tmp_path: Path) -> None:
    log = _json_log(tmp_path / "lr=1e-4" / "log.jsonl", 1.0, 0.1)
    assert read_run(str(log), None).name == "lr=1e-4"
    assert read_run(f"low={log}", None).name == "low"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"kind": "train", "iteration": 2, "lm_loss": "5"}, "lm_loss: '5' is not a number"),
        ({"kind": "train", "lm_loss": 5.0}, "iteration is missing"),
        ({"kind": "train", "iteration": "2", "lm_loss": 5.0}, "iteration: '2' is not an integer"),
        ({"kind": "resume", "iteration": "1"}, "iteration: '1' is not an integer"),
        ({"kind": "validation", "iteration": None, "lm_loss": 5.0}, "iteration is missing"),
        ({"kind": "train", "iteration": 2, "lm_loss": 5.0, "consumed_tokens": []}, "consumed_tokens: expected a num"),
        ({"kind": "train", "iteration": 2, "lm_loss": 5.0, "seconds_per_iteration": True}, "true is not a number"),
        (" iteration 2/ 9 | consumed samples: 4 | elapsed time per iteration (s): 1 | lm loss: 1.2.3 |", "loss 1.2.3"),
        (" iteration 2/ 9 | consumed samples: 4 | elapsed time per iteration (s): 1..2 | lm loss: 1.2 |", "1..2"),
        (" validation loss at iteration 2 | lm loss value: high | ", "loss high is not a number"),
    ],
)
def test_an_invalid_record_is_reported_with_its_line(
    event: dict[str, Any] | str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "a.log"
    if isinstance(event, str):
        log.write_text(f"{_train_line(1, '5.0')}\n{event}\n")
    else:
        log.write_text('{"kind": "train", "iteration": 1, "lm_loss": 6.0}\n' + json.dumps(event) + "\n")
    assert main([str(log), "--x", "iterations", "-o", str(tmp_path / "a.png")]) == 2
    error = capsys.readouterr().err
    assert "a.log:2: " in error
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_file_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["missing.jsonl", "-o", str(tmp_path / "a.xyz")]) == 2
    assert "a.xyz: not a picture format; use .png, .pdf, .svg" in capsys.readouterr().err


def _lines(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> list[dict[str, list[float]]]:
    """The drawn values of each panel, by color and by line, hollow or filled markers."""
    figures: list[Any] = []
    monkeypatch.setattr(loss_curves, "save_figure", lambda figure, path: figures.append(figure))
    assert main(words) == 0
    panels = []
    for panel in figures[0].axes:
        values: dict[str, list[float]] = {}
        for line in panel.get_lines():
            if line.get_linestyle() == "None":
                kind = "hollow" if line.get_markerfacecolor() == "white" else "filled"
            else:
                kind = "line"
            values.setdefault(f"{line.get_color()} {kind}", []).extend(float(y) for y in line.get_ydata())
        panels.append(values)
    return panels


def _ends_on_an_evaluation(path: Path, change: float, form: str) -> Path:
    """20 iterations, evaluated every 10 and, on other samples, at the end."""
    train = [(i, 6.0 - 0.1 * i + change) for i in (5, 10, 15, 20)]
    evaluated = {10: [(5.5, "")], 20: [(4.5, ""), (4.8, "validation"), (4.9, "test")]}
    rows = []
    for i, loss in train:
        rows.append(
            json.dumps({"kind": "train", "iteration": i, "lm_loss": loss, "seconds_per_iteration": 1.0})
            if form == "json"
            else _train_line(i, f"{loss:.4f}")
        )
        for value, draw in evaluated.get(i, []):
            if form == "json":
                event = {"kind": draw or "validation", "iteration": i, "lm_loss": value + change}
                rows.append(json.dumps({**event, "samples": 640 if draw else None}))
            else:
                end = f" on 640-sample draw from {draw} set" if draw else ""
                rows.append(
                    f" validation loss at iteration {i}{end} | lm loss value: {value + change:.6E} | lm loss PPL: 1 | "
                )
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("form", ["json", "text"])
def test_evaluations_are_compared_on_the_same_samples(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends on an interval has two validation losses there, of other samples; a test loss is none."""
    words = [f"dense={_ends_on_an_evaluation(tmp_path / 'a', 0.0, form)}"]
    words += [f"mine={_ends_on_an_evaluation(tmp_path / 'b', 0.0041, form)}"]
    above, below = _lines(monkeypatch, [*words, "--baseline", "dense", "--x", "iterations", "--smooth", "10"])
    changes = [value for curve in below.values() for value in curve if value != 0.0]
    assert len(changes) == 4 + 2 + 1
    assert changes == pytest.approx([0.0041] * 7, abs=1e-6)
    validation = [curve for name, curve in above.items() if name.endswith("hollow")]
    assert validation[0] == pytest.approx([5.5, 4.5])
    printed = capsys.readouterr().out
    assert "| dense | 20 | 4.7500 | 4.5000 | 4.8000 |" in printed
    # The loss at the end is of other samples: the run that never had the baseline's last validation loss has not now.
    assert "| 4.5000 after |" in printed
    assert "| never |" in printed


def test_logs_of_other_intervals_are_compared_over_equal_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same losses, logged as means of 1, 5 or 20 iterations, differ by nothing."""
    losses = [8.0 - 0.03 * i for i in range(1, 101)]
    words = []
    for every in (1, 5, 20):
        events = [
            {"kind": "train", "iteration": i, "lm_loss": sum(losses[i - every : i]) / every, "consumed_tokens": 8 * i}
            for i in range(every, 101, every)
        ]
        events += [{"kind": "validation", "iteration": i, "lm_loss": 5.0} for i in range(every, 101, every)]
        path = tmp_path / f"every{every}.jsonl"
        path.write_text("\n".join(map(json.dumps, events)))
        words.append(str(path))
    for base in ("every1", "every20"):
        panels = _lines(monkeypatch, [*words, "--baseline", base, "--x", "iterations,tokens", "--smooth", "2"])
        for below in panels[2:]:
            drawn = [value for name, curve in below.items() if name.endswith("line") for value in curve]
            assert len(drawn) > 5
            assert drawn == pytest.approx([0.0] * len(drawn), abs=1e-9)
        assert f"validated every 5 iterations, {base} every" in capsys.readouterr().out


def test_evaluations_are_placed_between_training_losses(tmp_path: Path) -> None:
    """Not at the last training loss before them; a log that begins late counts its own time alone."""
    events: list[dict[str, Any]] = [
        {"kind": "train", "iteration": i, "lm_loss": 5.0, "seconds_per_iteration": 36.0, "consumed_tokens": 8 * i}
        for i in (1010, 1020, 1030)
    ]
    events.insert(2, {"kind": "validation", "iteration": 1026, "lm_loss": 4.0})
    log = tmp_path / "a.jsonl"
    log.write_text("\n".join(map(json.dumps, events)))
    run = read_run(str(log), None)
    assert [point.hours for point in run.train] == pytest.approx([0.1, 0.2, 0.3])
    assert run.valid[0].hours == pytest.approx(0.26)
    assert run.valid[0].tokens == pytest.approx(8 * 1026)
