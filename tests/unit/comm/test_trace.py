"""What a trace records, and when its file is there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.comm.ledger import Ledger
from megatron.comm.trace import Trace
from megatron.compression.points import Point
from megatron.topology.group import Pending


def _steps(trace: Trace, count: int) -> int:
    """Steps with a forward that holds an encode and a wait for a send; how often the ranks met."""
    met = 0

    def meet() -> None:
        nonlocal met
        met += 1

    ledger = Ledger(trace)
    for iteration in range(count):
        trace.begin(iteration, meet)
        with trace.span("forward", micro_batch=0):
            with ledger.encoding(Point.PP_FWD):
                time.sleep(0.002)
            ledger.wait(Point.PP_FWD, Pending(None, 123, "send to rank 1"))
        trace.end()
        trace.begin(-1, meet)
        with trace.span("evaluation"):
            pass
    return met


def test_only_the_iterations_asked_for_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert _steps(Trace(path, 3, "pp 1", 2, 4, world_size=8, run="ab"), 6) == 1
    content = json.loads(path.read_text())
    spans: list[dict[str, Any]] = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert [s["args"]["iteration"] for s in spans if s["name"] == "iteration"] == [2, 3]
    assert {s["name"] for s in spans} == {"iteration", "forward", "encode", "wait"}
    assert {event["pid"] for event in content["traceEvents"]} == {3}
    flights = [event for event in content["traceEvents"] if event["ph"] in "be"]
    assert [(f["name"], f["cat"], f["ph"]) for f in flights] == [
        ("send", "pp-forward", "b"),
        ("send", "pp-forward", "e"),
    ] * 2
    assert flights[0]["args"] == {"point": "pp-forward", "sent bytes": 123, "iteration": 2}
    about = content["otherData"]
    assert about["aligned_us"] <= spans[0]["ts"]
    assert (about["rank"], about["world_size"], about["run"]) == (3, 8, "ab")
    assert not list(tmp_path.glob("*.partial"))


def test_spans_nest(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _steps(Trace(path, 0, "", 0, 1), 1)
    spans = {e["name"]: e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"}
    for inner, outer in (("encode", "forward"), ("wait", "forward"), ("forward", "iteration")):
        assert spans[outer]["ts"] <= spans[inner]["ts"]
        assert spans[inner]["ts"] + spans[inner]["dur"] <= spans[outer]["ts"] + spans[outer]["dur"] + 0.1
    assert spans["encode"]["dur"] >= 2000


def test_without_a_path_nothing_is_recorded() -> None:
    trace = Trace()
    assert _steps(trace, 3) == 0
    assert not trace._events


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gone" / "trace.json"
    _steps(Trace(path, 0, "", 0, 1), 2)
    assert f"warning: the trace {path} cannot be written: No such file or directory" in capsys.readouterr().err
