"""Curves of several runs, from JSON lines and from text logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.plot_loss_curves import Point, interpolated, main, read_run, smoothed


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


def test_a_restart_right_after_a_validation_replaces_what_came_after_it(tmp_path: Path) -> None:
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
    assert "| dense | 20 | 6.2000 | 6.5000 | 0.022 | 20 | 0.022 | 1.00 |" in printed
    assert "| fast | 40 | 6.1000 | 6.5000 | 0.011 | 40 | 0.011 | 2.00 |" in printed
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_means_and_lines_between_points() -> None:
    points = [Point(i, float(i)) for i in range(5)]
    assert smoothed(points, 1) == [0, 1, 2, 3, 4]
    assert smoothed(points, 3) == [0, 0.5, 1, 2, 3]
    assert interpolated([0, 2], [1, 3], 1.0) == 2.0
    assert interpolated([0, 2], [1, 3], 2.5) is None
    assert interpolated([1], [7], 1) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: No such file"),
        (["{empty}"], "no training losses; give a file of --log-json-file"),
        (["{text}"], "the text log does not say tokens; add --seq-length"),
        (["{json}", "--x", "days"], "--x days: choose from iterations, tokens, hours"),
        (["{json}", "--baseline", "none"], "--baseline none: the runs are"),
        (["{json}", "{json}"], "two runs are named"),
        (["{json}", "--smooth", "0"], "--smooth 0: must be at least 1"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("nothing here\n")
    places = {
        "json": _json_log(tmp_path / "a.jsonl", 1.0, 0.1),
        "text": _text_log(tmp_path / "b.txt"),
        "empty": tmp_path / "empty.txt",
    }
    assert main([word.format(**places) for word in words] + ["-o", str(tmp_path / "out.png")]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out.png").exists()
