"""Traces: recorded iterations and spans, and their file."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.compression.points import Point
from megatron.distributed.group import Pending
from megatron.distributed.kernel_trace import FIRST_STREAM, DeviceKernels, extract_kernels
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger
from megatron.distributed.trace import Trace
from tests.support.fake_device import FakeDevice, never_waited_for
from tests.support.tiny import tiny_engines
from tools.merge_traces import read_trace


def _steps(trace: Trace, count: int) -> int:
    """Run steps with a forward that contains an encode and a wait; return the number of meetings of the ranks."""
    meetings = 0

    def meet() -> None:
        nonlocal meetings
        meetings += 1

    trace._barrier = meet
    ledger = Ledger(observers=[trace])
    for iteration in range(count):
        trace.begin_step(iteration)
        with ledger.span("forward", micro_batch=0):
            with ledger.encoding(Point.PP_FWD):
                time.sleep(0.002)
            ledger.wait_for(Point.PP_FWD, Pending(None, 123, "send to rank 1"))
        trace.end_step()
        trace.begin_step(-1)
        with ledger.span("evaluation"):
            pass
        trace.end_step()
    return meetings


def test_only_the_requested_iterations_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert _steps(Trace(path, 3, "pp 1", 2, 4, layout=Layout(pp=8), schedule="zb-h1", run="ab"), 6) == 1
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
    assert (about["layout"], about["schedule"]) == ({"tp": 1, "pp": 8, "dp": 1}, "zb-h1")
    assert not list(tmp_path.glob("*.partial"))


def test_spans_nest(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _steps(Trace(path, 0, "", 0, 1), 1)
    spans = {e["name"]: e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"}
    for inner, outer in (("encode", "forward"), ("wait", "forward"), ("forward", "iteration")):
        assert spans[outer]["ts"] <= spans[inner]["ts"]
        assert spans[inner]["ts"] + spans[inner]["dur"] <= spans[outer]["ts"] + spans[outer]["dur"] + 0.1
    assert spans["encode"]["dur"] >= 2000


def test_without_a_trace_there_are_no_observers() -> None:
    ledger = tiny_engines({}).ledger
    assert ledger.observers == []
    assert isinstance(ledger.span("forward"), nullcontext)


def test_an_unwritable_file_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gone" / "trace.json"
    _steps(Trace(path, 0, "", 0, 1), 2)
    assert f"warning: the trace {path} cannot be written: No such file or directory" in capsys.readouterr().err


class _Kernels(DeviceKernels):
    """Reports a kernel in each iteration."""

    def __init__(self) -> None:
        self.running = False

    def start(self) -> None:
        assert not self.running
        self.running = True

    def stop(self) -> list[dict[str, Any]]:
        self.running = False
        return [{"name": "gemm", "cat": "kernel", "tid": FIRST_STREAM + 7, "ts": 5.0, "dur": 2.0}]


def test_spans_of_a_device_have_its_times(tmp_path: Path) -> None:
    """The host does not wait for the device within an iteration."""
    path, device, kernels = tmp_path / "trace.json", FakeDevice(), _Kernels()
    device.now = 1000.0
    clock = device.clock()
    trace = Trace(path, 0, "", 0, 2, clock=clock, kernels=kernels)
    trace._offset = 0.0
    ledger = Ledger(clock, [trace])
    for iteration in range(2):
        trace.begin_step(iteration)
        with never_waited_for(device):
            with ledger.span("forward"):
                device.launch(2.0)
                landing = Pending(None, 8, "receive", finish=partial(device.wait_for, device.free + 3.0))
                landing.started = device.now
                ledger.wait_for(Point.PP_FWD, landing)
            with ledger.span("send"):
                device.launch(1.0)
        assert kernels.running
        trace.end_step()
        assert not kernels.running
    events = read_trace(path).events  # tools/merge_traces.py reads it
    spans = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert spans[:4] == [
        ("wait", 1002.0, 3.0),
        ("forward", 1000.0, 5.0),
        ("send", 1005.0, 1.0),
        ("iteration", 1000.0, 6.0),
    ]
    assert [start for name, start, _ in spans if name == "iteration"] == [1000.0, 1006.0]
    assert [(e["ph"], e["ts"] / 1e6) for e in events if e["ph"] in "be"][:2] == [("b", 1000.0), ("e", 1005.0)]
    kernel_events = [e for e in events if e.get("cat") == "kernel"]
    assert [(e["args"]["iteration"], e["pid"], e["ts"], e["dur"]) for e in kernel_events] == [
        (0, 0, 5.0, 2.0),
        (1, 0, 5.0, 2.0),
    ]
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {0: "compute and waits", FIRST_STREAM + 7: "device, stream 7"}


def test_kernels_are_read_from_the_profilers_trace() -> None:
    """Times count from the base of the profiler; events of the host are left out."""
    kernel = {"ph": "X", "cat": "kernel", "name": "k" * 999, "pid": 0, "tid": 20, "ts": 2.5, "dur": 1.25, "args": {}}
    host = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": 1.0, "dur": 1.0}
    named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 20, "ts": 0, "args": {}}
    copy = {**kernel, "cat": "gpu_memcpy", "name": "Memcpy DtoH", "tid": 7}
    content = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [named, host, kernel, copy]}
    assert extract_kernels(content) == [
        {"name": "k" * 200, "cat": "kernel", "tid": FIRST_STREAM + 20, "ts": 1002.5, "dur": 1.2},
        {"name": "Memcpy DtoH", "cat": "gpu_memcpy", "tid": FIRST_STREAM + 7, "ts": 1002.5, "dur": 1.2},
    ]


def test_times_of_the_profiler_are_wall_clock_times(tmp_path: Path) -> None:
    """In torch's file, base plus event time is in microseconds since 1970, like the times of spans."""
    before = time.time()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.zeros(1).add_(1)
    path = tmp_path / "profile.json"
    profiler.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        event["cat"] = "kernel"
        event["tid"] = 0
    kernel_events = extract_kernels(content)
    assert any(event["name"] == "aten::add_" for event in kernel_events)
    assert all(before - 1 <= event["ts"] / 1e6 <= time.time() + 1 for event in kernel_events)
