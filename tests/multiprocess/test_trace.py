"""Traces of a training run, beside its ledger."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags, write_documents
from tests.support.train import train

pytestmark = pytest.mark.multiprocess


def test_every_byte_of_the_ledger_is_in_the_traces(tmp_path: Path) -> None:
    log, folder = tmp_path / "log.jsonl", tmp_path / "traces"
    flags = tiny_flags(
        write_documents(tmp_path / "tiny"),
        pipeline_model_parallel_size=2,
        train_iters=5,
        compress=["pp-forward=fixpoint,bits=8", "dp-grad=powersgd,rank=2"],
        log_json_file=log,
        profile_trace=folder,
        profile_step_start=2,
        profile_step_end=4,
    )
    train(4, flags)
    trained = [event for event in map(json.loads, log.read_text().splitlines()) if event["kind"] == "train"]
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"trace_rank_{rank:05d}.json" for rank in range(4)]
    names: Counter[str] = Counter()
    sent: Counter[tuple[int, str]] = Counter()
    runs = set()
    for file in files:
        content = json.loads(file.read_text())
        runs.add((content["otherData"]["world_size"], content["otherData"]["run"]))
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                assert event["args"]["iteration"] in (2, 3)
                names[event["name"]] += 1
            elif event["ph"] == "b":
                sent[event["args"]["iteration"], event["args"]["point"]] += event["args"]["sent bytes"]
    ((world_size, run),) = runs
    assert world_size == 4
    assert run
    assert names.keys() >= {"forward", "backward", "encode", "send", "wait", "decode", "optimizer", "iteration"}
    assert names["iteration"] == 2 * 4
    assert names["forward"] == names["backward"]
    for iteration in (2, 3):
        comm = trained[iteration]["comm"]
        # The log line's own messages come after the step.
        points = {point: figures["wire_bytes"] for point, figures in comm.items() if point != "control"}
        assert points.keys() >= {"pp-forward", "pp-backward", "dp-grad", "embedding"}
        assert {point: sent[iteration, point] for point in points} == points
    merged = tmp_path / "merged.json"
    done = run_cli(1, ["tools/merge_traces.py", str(folder), "-o", str(merged)]).check()
    assert "merged.json: 4 ranks" in done.stdout
    assert "warning" not in done.stderr
    assert {event["pid"] for event in json.loads(merged.read_text())["traceEvents"]} == {0, 1, 2, 3}
