"""Merging the traces of several ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk import largest_file
from tests.support.svg import KINDS, read_rows, read_texts
from tools import merge_traces
from tools.merge_traces import main


def _write(folder: Path, rank: int, aligned_us: float | None, start: float, **about: Any) -> Path:
    path = folder / f"trace_rank_{rank:05d}.json"
    common = {"pid": rank, "tid": 0}
    events = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"name": "iteration", "ph": "X", "ts": start, "dur": 5000.0, "args": {"iteration": 0}, **common},
        {"name": "forward", "ph": "X", "ts": start + 10, "dur": 2000.0, "args": {"iteration": 0}, **common},
        {"name": "reduce", "ph": "b", "id": "1", "ts": start, "args": {"sent bytes": 4_000_000}, **common},
        {"name": "reduce", "ph": "e", "id": "1", "ts": start + 5, **common},
    ]
    about = {"rank": rank, "label": f"dp {rank}", "aligned_us": aligned_us, "world_size": 2, "run": "a", **about}
    path.write_text(json.dumps({"traceEvents": events, "otherData": about}))
    return path


def test_the_table_holds_means_over_iterations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path, 0, None, 0.0, world_size=1)
    trace = json.loads(path.read_text())
    later = [{**event, "ts": event["ts"] + 9000.0} for event in trace["traceEvents"] if "ts" in event]
    later = [{**event, "dur": 3 * event["dur"]} if "dur" in event else event for event in later]
    trace["traceEvents"] += later
    path.write_text(json.dumps(trace))
    assert main([str(path), "-o", str(tmp_path / "out.json")]) == 0
    assert "| 0 (dp 0) | 10.0 | 4.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 4.00 |" in capsys.readouterr().out


def _starts(path: Path) -> dict[int, float]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return {event["pid"]: event["ts"] for event in events if event["name"] == "iteration"}


def test_clocks_are_aligned_by_the_barrier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, 0, 1000.0, 1100.0)
    _write(tmp_path, 1, 51000.0, 51250.0)
    out = tmp_path / "all.json.gz"
    assert main([str(tmp_path), "-o", str(out)]) == 0
    assert _starts(out) == {0: 1100.0, 1: 1250.0}
    captured = capsys.readouterr()
    printed = captured.out
    assert not captured.err
    assert "all.json.gz: 2 ranks;" in printed
    assert "| 1 (dp 1) | 5.0 | 2.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 4.00 |" in printed
    assert main([str(tmp_path), "-o", str(tmp_path / "raw.json"), "--no-align"]) == 0
    assert _starts(tmp_path / "raw.json") == {0: 1100.0, 1: 51250.0}


def test_a_file_that_is_not_a_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path, 0, None, 0.0)
    path.write_text(path.read_text()[:-20])
    (tmp_path / "empty").mkdir()
    cases = [
        ([str(tmp_path)], f"{path}: not a trace of --profile-trace, or cut short"),
        ([str(tmp_path / "none.json")], "none.json: No such file"),
        ([str(tmp_path / "empty")], "no trace_rank_*.json in"),
    ]
    for words, message in cases:
        assert main([*words, "-o", str(tmp_path / "out.json")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_full_disk_is_one_line(tmp_path: Path, error_line: Callable[[], str]) -> None:
    _write(tmp_path, 0, None, 0.0, world_size=1)
    out = tmp_path / "out.json"
    with largest_file(20):
        assert main([str(tmp_path), "-o", str(out)]) == 2
    assert error_line().startswith(f"error: -o {out}: cannot be written (File too large)")
    assert [path.name for path in tmp_path.iterdir()] == ["trace_rank_00000.json"]


def test_two_runs_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    first, second = _write(tmp_path, 2, None, 0.0), _write(tmp_path / "other", 2, None, 0.0)
    assert main([str(first), str(second), "-o", str(tmp_path / "out.json")]) == 2
    assert "both of rank 2; merge one run at a time" in capsys.readouterr().err


def test_missing_ranks_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 3):
        _write(tmp_path, rank, 0.0, 10.0, world_size=4)
    assert main([str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    captured = capsys.readouterr()
    assert captured.err == "warning: the merged trace is incomplete: 1 of 4 ranks left no trace: 2\n"
    assert "out.json: 3 of 4 ranks;" in captured.out
    _write(tmp_path, 0, 0.0, 10.0, world_size=100)
    assert main([str(tmp_path / "trace_rank_00000.json"), "-o", str(tmp_path / "out.json")]) == 0
    assert "99 of 100 ranks left no trace: 1, 2, 3, 4, 5 and 94 more\n" in capsys.readouterr().err


def test_files_of_different_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _write(tmp_path, 0, 0.0, 10.0)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"run": "b"}, 0, "are of different runs"),
        ({"run": None}, 0, "are of different runs"),
        ({}, 7, "are of different iterations (0, 7)"),
    ]
    for about, iteration, message in cases:
        second = _write(tmp_path, 1, 0.0, 10.0, **about)
        second.write_text(second.read_text().replace('"iteration": 0', f'"iteration": {iteration}'))
        assert main([str(tmp_path), "-o", str(tmp_path / "out.json")]) == 2
        assert f"{first} and {second} {message}" in capsys.readouterr().err
    second.write_text(second.read_text().replace('"name": "iteration"', '"name": "other"'))
    assert main([str(tmp_path), "-o", str(tmp_path / "out.json")]) == 2
    assert "are of different iterations (0, none)" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_files_without_a_run_are_merged_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Older versions wrote no run."""
    for rank in (0, 1):
        _write(tmp_path, rank, 0.0, 10.0, run=None, world_size=None)
    assert main([str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    captured = capsys.readouterr()
    assert "warning: the traces, of an older version, do not name their run" in captured.err
    assert "out.json: 2 ranks;" in captured.out


def _write_passes(folder: Path, rank: int, spans: list[tuple[str, int, float, float]], **about: Any) -> Path:
    """Trace of a rank of 2 stages x 2 replicas whose clock is ahead by its number of seconds.

    Args:
        spans: name, micro-batch, and milliseconds of the start and the duration of the passes of iteration 3.
    """
    path, ahead = folder / f"trace_rank_{rank:05d}.json", 1e6 * rank
    args: dict[str, Any] = {"iteration": 3, "chunk": 0}
    begin: dict[str, Any] = {"ph": "X", "pid": rank, "tid": 0}
    events = [
        {**begin, "name": name, "ts": ahead + 1000 * start, "dur": 1000 * ms, "args": {**args, "micro_batch": number}}
        for name, number, start, ms in spans
    ]
    # Another iteration, and a kernel of the device, which is on another track.
    events.append({**events[0], "args": {**events[0]["args"], "iteration": 2}})
    events.append({**begin, "name": "forward", "tid": 8, "ts": 0.0, "dur": 9e9, "args": {"iteration": 3}})
    for iteration in (2, 3):
        events.append({**begin, "name": "iteration", "ts": ahead, "dur": 5e4, "args": {"iteration": iteration}})
    layout = {"tp": 1, "pp": 2, "dp": 2}
    about = {"rank": rank, "label": "", "aligned_us": ahead, "world_size": 4, "run": "a", "layout": layout} | about
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"schedule": "zb-h1"} | about}))
    return path


_FIRST = [
    ("forward", 0, 0.0, 10.0),
    ("forward", 1, 10.0, 10.0),
    ("backward", 0, 50.0, 20.0),
    ("backward", 1, 70.0, 20.0),
]
_LAST = [
    ("forward", 0, 12.0, 10.0),
    ("backward", 0, 22.0, 12.0),
    ("forward", 1, 34.0, 10.0),
    ("backward", 1, 44.0, 12.0),
]
_LAST += [("weight", 0, 56.0, 8.0), ("weight", 1, 64.0, 8.0)]


def test_the_schedule_of_a_replica_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the first replica with traces of both stages, on the first rank's clock."""
    for rank, spans in ((0, _FIRST), (1, _FIRST), (3, _LAST)):
        _write_passes(tmp_path, rank, spans)
    picture = tmp_path / "s.svg"
    words = [str(tmp_path), "-o", str(tmp_path / "out.json"), "--draw-schedule", str(picture)]
    assert main(words) == 0
    assert f"{picture}: the passes of an iteration" in capsys.readouterr().out
    rows = read_rows(picture)
    left, right = rows[0][0].left, rows[0][-1].right
    for row, spans in zip(rows, (_FIRST, _LAST), strict=True):
        assert [(KINDS[box.color], int(box.text) - 1) for box in row] == [(name, number) for name, number, *_ in spans]
        starts = [left + start / 90 * (right - left) for *_, start, _ in spans]
        assert [box.left for box in row] == pytest.approx(starts, abs=0.01)
    texts = read_texts(picture)
    assert {"stage 0 (rank 1)", "stage 1 (rank 3)"} <= set(texts)
    assert "iteration 3: tp 1, pp 2, dp 2, 2 micro-batches, zb-h1" in texts
    assert f"traced: step 50 ms, passes 90 ms, bubble {1 - 120 / 180:.1%}" in texts
    assert main([*words, "--no-align"]) == 0
    assert "traced: step 50 ms, passes 2,072 ms, bubble 97.1%" in read_texts(picture)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"layout": {', '"mesh": {', "of an older version, lacks the layout"),
        ('"pp": 2', '"pp": 16777216', "no replica has a trace of each of its 16777216 stages"),
        ('"dp": 2', '"dp": 3', "no replica has a trace of each of its 2 stages"),
        ('"pp": 2', '"pp": 0', "pp is 0; it must be at least 1"),
        ('"chunk": 0, ', "", "event 0: chunk is missing"),
        ('"chunk": 0', '"chunk": -1', "event 0: chunk is -1; it must be at least 0"),
        ('"micro_batch": 1', '"micro_batch": 0', "event 1: a second forward of the micro-batch 0 in chunk 0"),
        ('"micro_batch": 1', '"micro_batch": 1e9', "event 1: micro_batch: 1000000000.0 is not an integer"),
        ('"dur": 10000.0', '"dur": -1', "event 0: dur is -1; it must be at least 0"),
        ('"ts": 1000000.0', '"ts": 1e300', "event 0: ts is 1e+300; it must be at least 0"),
        ('"aligned_us": 1000000.0', '"aligned_us": 1e300', "aligned_us is 1e+300; it must be at least 0"),
        ("ward", "wind", "holds no passes of iteration 3"),
        ('"iteration", "ts"', '"else", "ts"', "holds no iteration"),
    ],
)
def test_passes_that_cannot_be_drawn_are_named(
    old: str, new: str, message: str, tmp_path: Path, error_line: Callable[[], str]
) -> None:
    for rank, spans in ((1, _FIRST), (3, _LAST)):
        path = _write_passes(tmp_path, rank, spans)
        path.write_text(path.read_text().replace(old, new))
    assert new in (tmp_path / "trace_rank_00001.json").read_text()
    picture, merged = tmp_path / "s.svg", tmp_path / "out.json"
    assert main([str(tmp_path), "-o", str(merged), "--draw-schedule", str(picture)]) == 2
    assert message in error_line()
    assert not picture.exists()
    assert not merged.exists()


def test_passes_without_duration_are_not_drawn(tmp_path: Path, error_line: Callable[[], str]) -> None:
    for rank in (0, 2):
        _write_passes(tmp_path, rank, [("forward", 0, 1.0, 0.0)])
    assert main([str(tmp_path), "-o", str(tmp_path / "o"), "--draw-schedule", str(tmp_path / "s.svg")]) == 2
    assert "the passes of iteration 3 take no time" in error_line()


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path, error_line: Callable[[], str]) -> None:
    assert main(["none", "--draw-schedule", str(tmp_path / "s.gif")]) == 2
    assert error_line().startswith(f"error: --draw-schedule {tmp_path / 's.gif'}: not a picture format; use .png")


def test_large_files_are_refused(
    tmp_path: Path, error_line: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path, 0, None, 0.0)
    monkeypatch.setattr(merge_traces, "MAX_BYTES", path.stat().st_size - 1)
    assert main([str(path), "-o", str(tmp_path / "out.json")]) == 2
    assert f"{path}: is larger than {path.stat().st_size - 1:,} bytes; trace fewer iterations" in error_line()


_HUGE = 10**400
_SPAN = {"name": "forward", "ph": "X", "ts": 0.0, "dur": 1.0}


@pytest.mark.parametrize(
    ("events", "about", "message"),
    [
        ([1, 2], {}, "event 0: is not an object"),
        ([_SPAN, {**_SPAN, "ts": "0"}], {}, "event 1: ts: '0' is not a number"),
        ([{**_SPAN, "ts": float("nan")}], {}, "event 0: ts: nan is not a finite number"),
        ([{**_SPAN, "dur": None}], {}, "event 0: dur is missing"),
        ([{"name": "forward", "ph": "X", "dur": 1.0}], {}, "event 0: ts is missing"),
        ([{"ph": "X", "ts": 0.0, "dur": 1.0}], {}, "event 0: name is missing"),
        ([{**_SPAN, "name": "iteration"}], {}, "event 0: args is missing"),
        ([{**_SPAN, "name": "iteration", "args": {}}], {}, "event 0: iteration is missing"),
        ([{"name": "send", "ph": "b", "ts": 0.0}], {}, "event 0: args is missing"),
        ([{"name": "send", "ph": "b", "ts": 0.0, "args": {}}], {}, "event 0: sent bytes is missing"),
        ([_SPAN], {"aligned_us": "1"}, "aligned_us: '1' is not a number"),
        ([_SPAN], {"rank": "1"}, "rank: '1' is not an integer"),
        ([_SPAN], {"world_size": "2"}, "world_size: '2' is not an integer"),
        ([{**_SPAN, "ts": _HUGE}], {}, "event 0: ts: a number of 1329 bits is too large a number"),
        ([_SPAN, {**_SPAN, "dur": _HUGE}], {}, "event 1: dur: a number of 1329 bits is too large a number"),
        ([_SPAN], {"aligned_us": _HUGE}, "aligned_us: a number of 1329 bits is too large a number"),
        ([_SPAN], {"world_size": _HUGE}, "world_size: a number of 1329 bits is too large an integer"),
        ({}, {}, "not a trace of --profile-trace"),
    ],
)
def test_malformed_events_are_named(
    events: Any, about: dict[str, Any], message: str, tmp_path: Path, error_line: Callable[[], str]
) -> None:
    path = _write(tmp_path, 0, None, 0.0)
    metadata = json.loads(path.read_text())["otherData"]
    path.write_text(json.dumps({"traceEvents": events, "otherData": {**metadata, **about}}))
    assert main([str(path), "-o", str(tmp_path / "out.json")]) == 2
    assert f"{path}: {message}" in error_line()
    assert not (tmp_path / "out.json").exists()
