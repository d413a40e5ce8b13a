"""Traces of a training run, beside its ledger."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from megatron.parallel.pipeline.schedule import make_schedule
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags, write_documents
from tests.support.events import read_events
from tests.support.svg import KINDS, read_rows, read_texts
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
    trained = read_events(log)
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
    picture = tmp_path / "schedule.svg"
    command = ["tools/merge_traces.py", str(folder), "-o", str(merged), "--draw-schedule", str(picture)]
    done = run_cli(1, command).check()
    assert "merged.json: 4 ranks" in done.stdout
    assert "warning" not in done.stderr
    assert {event["pid"] for event in json.loads(merged.read_text())["traceEvents"]} == {0, 1, 2, 3}
    # Passes of both stages in the order of the schedule; an activation arrives before the next stage's forward ends.
    rows = read_rows(picture)
    for stage, row in enumerate(rows):
        expected = [(op.computation.name.lower(), op.micro_batch) for op in make_schedule("1f1b", 2, stage, 1, 2)]
        assert [KINDS[box.color] for box in row] == [name for name, _ in expected]
        numbers = [(box.text, str(micro_batch + 1)) for box, (_, micro_batch) in zip(row, expected, strict=True)]
        assert all(text in ("", number) for text, number in numbers)
        assert all(before.right <= after.left + 0.01 for before, after in itertools.pairwise(row))
    assert {"stage 0 (rank 0)", "stage 1 (rank 2)"} <= set(read_texts(picture))
    assert "iteration 3: tp 1, pp 2, dp 2, 2 micro-batches, 1f1b" in read_texts(picture)
