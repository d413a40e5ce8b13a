"""Merging the traces of several ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tools.merge_traces import main


def _write(folder: Path, rank: int, aligned_us: float | None, start: float) -> Path:
    path = folder / f"trace_rank_{rank:05d}.json"
    common = {"pid": rank, "tid": 0}
    events = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"name": "iteration", "ph": "X", "ts": start, "dur": 5000.0, "args": {"iteration": 0}, **common},
        {"name": "forward", "ph": "X", "ts": start + 10, "dur": 2000.0, "args": {"iteration": 0}, **common},
        {"name": "reduce", "ph": "b", "id": "1", "ts": start, "args": {"sent bytes": 4_000_000}, **common},
        {"name": "reduce", "ph": "e", "id": "1", "ts": start + 5, **common},
    ]
    about = {"rank": rank, "label": f"dp {rank}", "aligned_us": aligned_us}
    path.write_text(json.dumps({"traceEvents": events, "otherData": about}))
    return path


def _starts(path: Path) -> dict[int, float]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return {event["pid"]: event["ts"] for event in events if event["name"] == "iteration"}


def test_clocks_are_set_by_the_barrier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, 0, 1000.0, 1100.0)
    _write(tmp_path, 1, 51000.0, 51250.0)
    out = tmp_path / "all.json.gz"
    assert main([str(tmp_path), "-o", str(out)]) == 0
    assert _starts(out) == {0: 1100.0, 1: 1250.0}
    printed = capsys.readouterr().out
    assert "| 1 (dp 1) | 5.0 | 2.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 4.00 |" in printed
    assert main([str(tmp_path), "-o", str(tmp_path / "raw.json"), "--no-align"]) == 0
    assert _starts(tmp_path / "raw.json") == {0: 1100.0, 1: 51250.0}


def test_what_is_not_a_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path, 0, None, 0.0)
    path.write_text(path.read_text()[:-20])
    (tmp_path / "empty").mkdir()
    cases = [
        ([str(tmp_path)], f"{path}: not a trace of --profile-trace, or cut short"),
        ([str(tmp_path / "none.json")], "none.json: No such file"),
        ([str(tmp_path / "empty")], "no trace_rank_*.json in"),
    ]
    for words, message in cases:
        assert main([*words, "-o", str(tmp_path / "out.json")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_two_runs_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    first, second = _write(tmp_path, 2, None, 0.0), _write(tmp_path / "other", 2, None, 0.0)
    assert main([str(first), str(second), "-o", str(tmp_path / "out.json")]) == 1
    assert "both of rank 2; merge one run at a time" in capsys.readouterr().err
