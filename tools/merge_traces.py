#!/usr/bin/env python3
"""Merges the traces of a run's ranks into one, for https://ui.perfetto.dev or chrome://tracing.

    python tools/launch.py ... pretrain_gpt.py ... --profile-trace traces
    python tools/merge_traces.py traces -o trace.json.gz

Clocks of different machines are aligned by the barrier that the ranks passed just before the first traced iteration
(`--no-align` leaves them as they are). Prints a table of where each rank's time went. Traces of different runs are
refused; missing ranks are reported. `--draw-schedule FILE.svg` also draws the forward, backward and weight passes of
the last traced iteration on the pipeline ranks of a replica, as tools/plan.py draws predicted passes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.merge_traces")

from megatron.base.atomic import write_whole
from megatron.base.errors import UserError
from megatron.base.figures import check_picture, save_figure
from megatron.base.markdown import markdown_table
from megatron.base.regular import read_regular
from megatron.base.values import Values
from megatron.distributed.layout import Layout
from megatron.parallel.pipeline.schedule import Pass, PipelineOp, TimedPass
from megatron.parallel.pipeline.schedule_plot import (
    Timeline,
    check_size,
    compute_bubble,
    draw_schedule,
    find_span,
    summarize_times,
)

FLAG = "--draw-schedule"
MAX_BYTES = 1 << 29
"""Maximum size of a rank's file."""
MAX_MICROSECONDS = 1e17
"""Maximum time since 1970."""
PASSES = {"forward": Pass.FORWARD, "backward": Pass.BACKWARD, "weight": Pass.WEIGHT}
"""Spans of passes, by name."""
COLUMNS = ("forward", "backward", "optimizer", "encode", "decode", "wait")


@dataclass(frozen=True)
class RankTrace:
    """Trace file of a rank.

    Args:
        path: path of the file.
        rank, label: number and label of the rank.
        world_size, run: size and identity of the run; None in traces of versions that did not write them.
        aligned_us: time at which the rank left the barrier, by its own clock.
        layout, schedule: mesh and pipeline schedule of the run; None in traces of versions that did not write them.
        events: Chrome trace events.
    """

    path: Path
    rank: int
    label: str
    world_size: int | None
    run: str | None
    aligned_us: float | None
    layout: Layout | None
    schedule: str | None
    events: list[dict[str, Any]]

    @property
    def iterations(self) -> list[int]:
        """Traced iterations."""
        return sorted({event["args"]["iteration"] for event in self.events if _is_iteration(event)})


def _is_iteration(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event["name"] == "iteration"


def _check_event(event: Any) -> None:
    """Check that an event has the fields that the merged trace and the table need (else UserError)."""
    if not isinstance(event, dict):
        raise UserError("is not an object")
    values = Values(event)
    if event.get("ph") == "X":
        values.text("name")
        values.number("dur")
    if event.get("ph") == "X" or "ts" in event:
        values.number("ts")
    if _is_iteration(event):
        Values(values.table("args")).integer("iteration", minimum=0, maximum=10**18)
    if event.get("ph") == "b":
        Values(values.table("args")).number("sent bytes")


def read_trace(path: Path) -> RankTrace:
    """Read the trace file of a rank.

    Raises:
        UserError: when the file is not a trace.
    """
    try:
        data = read_regular(path, MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: is larger than {MAX_BYTES:,} bytes; trace fewer iterations")
    try:
        content = json.loads(data.decode())
        about, events = content["otherData"], content["traceEvents"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a trace of --profile-trace, or cut short; write it anew") from error
    if not isinstance(about, dict) or not isinstance(events, list):
        raise UserError(f"{path}: not a trace of --profile-trace; write it anew")
    location = str(path)
    try:
        fields = Values(about)
        rank, label = fields.integer("rank", minimum=0), fields.text("label")
        world_size = fields.integer("world_size") if fields.has("world_size") else None
        name = fields.text("run") if fields.has("run") else None
        aligned_us = (
            fields.number("aligned_us", minimum=0, maximum=MAX_MICROSECONDS) if fields.has("aligned_us") else None
        )
        schedule = fields.text("schedule") if fields.has("schedule") else None
        layout = None
        if fields.has("layout"):
            sizes = Values(fields.table("layout"))
            layout = Layout(tp=sizes.integer("tp"), pp=sizes.integer("pp"), dp=sizes.integer("dp"))
        for number, event in enumerate(events):
            location = f"{path}: event {number}"
            _check_event(event)
    except UserError as error:
        raise UserError(f"{location}: {error}; write it anew") from error
    return RankTrace(path, rank, label, world_size, name, aligned_us, layout, schedule, events)


def find_files(words: Sequence[str]) -> list[Path]:
    """List the trace files that arguments name: files, or folders of them.

    Raises:
        UserError: when there is none.
    """
    paths: list[Path] = []
    for word in words:
        path = Path(word)
        paths += sorted(path.glob("trace_rank_*.json")) if path.is_dir() else [path]
    if not paths:
        raise UserError(f"no trace_rank_*.json in {', '.join(words)}; name the folder of --profile-trace")
    return paths


def merge(traces: Sequence[RankTrace], align: bool = True) -> dict[str, Any]:
    """Merge traces, with all clocks set to that of the first.

    Raises:
        UserError: when two files are of the same rank, or of different runs.
    """
    ranks: dict[int, Path] = {}
    for trace in traces:
        if trace.rank in ranks:
            raise UserError(
                f"{trace.path} and {ranks[trace.rank]} are both of rank {trace.rank}; merge one run at a time"
            )
        ranks[trace.rank] = trace.path
    ordered = sorted(traces, key=lambda trace: trace.rank)
    _check_run(ordered)
    events: list[dict[str, Any]] = []
    for trace, shift in zip(ordered, compute_clock_shifts(ordered, align), strict=True):
        events += [{**event, "ts": round(event["ts"] + shift, 1)} if "ts" in event else event for event in trace.events]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def compute_clock_shifts(traces: Sequence[RankTrace], align: bool) -> list[float]:
    """Microseconds from the clock of each trace to that of the first trace with an aligned clock."""
    reference = next((trace.aligned_us for trace in traces if trace.aligned_us is not None), None)
    if not align or reference is None:
        return [0.0] * len(traces)
    return [0.0 if trace.aligned_us is None else reference - trace.aligned_us for trace in traces]


def _check_run(traces: Sequence[RankTrace]) -> None:
    """Check that traces are of the same run and iterations (else UserError)."""
    first, iterations = traces[0], traces[0].iterations
    for trace in traces[1:]:
        paths = f"{first.path} and {trace.path} are of different"
        if trace.run != first.run:
            raise UserError(f"{paths} runs; merge one run at a time")
        if trace.iterations != iterations:
            lists = ", ".join(_abbreviate(numbers) or "none" for numbers in (iterations, trace.iterations))
            raise UserError(f"{paths} iterations ({lists}); merge one run at a time")


def _abbreviate(numbers: Sequence[int]) -> str:
    remainder = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + remainder


def find_warnings(traces: Sequence[RankTrace]) -> list[str]:
    """Describe possible problems of the merged trace, a line each."""
    if len(traces) > 1 and traces[0].run is None:
        return ["the traces, of an older version, do not name their run; make sure that all are of the same run"]
    missing = sorted(set(range(traces[0].world_size or 0)) - {trace.rank for trace in traces})
    if not missing:
        return []
    ranks = f"{len(missing)} of {traces[0].world_size} ranks"
    return [f"the merged trace is incomplete: {ranks} left no trace: {_abbreviate(missing)}"]


def summarize(traces: Sequence[RankTrace]) -> str:
    """Format a table of each rank's milliseconds per iteration in each kind of span."""
    rows = []
    for trace in sorted(traces, key=lambda trace: trace.rank):
        spans = [event for event in trace.events if event.get("ph") == "X"]
        iterations = max(sum(event["name"] == "iteration" for event in spans), 1)
        sent = sum(event["args"]["sent bytes"] for event in trace.events if event.get("ph") == "b") / iterations
        durations = [sum(event["dur"] for event in spans if event["name"] == name) for name in ("iteration", *COLUMNS)]
        milliseconds = [f"{duration / 1000 / iterations:.1f}" for duration in durations]
        rows.append([f"{trace.rank} ({trace.label})", *milliseconds, f"{sent / 1e6:.2f}"])
    return markdown_table(["rank", "iteration ms", *COLUMNS, "sent MB"], rows)


def read_timeline(traces: Sequence[RankTrace], align: bool = True) -> Timeline:
    """Collect the passes of the last iteration on the pipeline ranks of a replica, from traces that ``merge`` accepts.

    Raises:
        UserError: when stages are missing, or the passes cannot be drawn.
    """
    stages = find_stages(traces)
    if not stages[0].iterations:
        raise UserError(f"{stages[0].path}: holds no iteration; let the run reach --profile-step-end")
    iteration = stages[0].iterations[-1]
    rows = []
    for trace, shift in zip(stages, compute_clock_shifts(stages, align), strict=True):
        rows.append(_read_passes(trace, iteration, shift))
    check_size(FLAG, len(rows), sum(map(len, rows)))
    start_s, end_s = find_span(rows)
    if end_s <= start_s:
        raise UserError(f"{stages[0].path}: the passes of iteration {iteration} take no time; write the traces anew")
    steps = [event for trace in stages for event in trace.events if _is_iteration(event)]
    step_s = max(event["dur"] for event in steps if event["args"]["iteration"] == iteration) / 1e6
    ops = [timed.op for row in rows for timed in row]
    chunks, count = 1 + max(op.chunk for op in ops), 1 + max(op.micro_batch for op in ops)
    layout, schedule = stages[0].layout, stages[0].schedule
    schedule = f"interleaved {chunks}" if chunks > 1 and schedule == "1f1b" else schedule
    assert layout is not None
    title = (
        f"iteration {iteration}: tp {layout.tp}, pp {layout.pp}, dp {layout.dp}, {count} micro-batches, {schedule}\n"
        f"traced: {summarize_times(end_s - start_s, compute_bubble(rows), step_s)}"
    )
    return Timeline(title, rows, [f"stage {stage} (rank {trace.rank})" for stage, trace in enumerate(stages)])


def find_stages(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Find the traces of the first replica and tensor-parallel rank with a trace of every stage, in stage order.

    Raises:
        UserError: when there is none.
    """
    by_rank = {trace.rank: trace for trace in traces}
    layout = traces[0].layout
    if layout is None:
        raise UserError(f"{FLAG}: {traces[0].path}, of an older version, lacks the layout; write it anew")
    for rank in sorted(by_rank) if layout.pp <= len(traces) else ():
        at = layout.coordinates(rank)
        ranks = [layout.rank_of(tp=at.tp, dp=at.dp, pp=pp) for pp in range(layout.pp)]
        if all(rank in by_rank for rank in ranks):
            return [by_rank[rank] for rank in ranks]
    raise UserError(f"{FLAG}: no replica has a trace of each of its {layout.pp} stages; name the files of all ranks")


def _read_passes(trace: RankTrace, iteration: int, shift: float) -> list[TimedPass]:
    """Read the passes of an iteration, in order of time, with ``shift`` microseconds added."""
    passes: dict[PipelineOp, TimedPass] = {}
    for number, event in enumerate(trace.events):
        computation = PASSES.get(event["name"]) if event.get("ph") == "X" and event.get("tid") == 0 else None
        if computation is None:
            continue
        try:
            span, labels = Values(event), Values(Values(event).table("args"))
            if labels.integer("iteration", minimum=0, maximum=10**18) != iteration:
                continue
            op = PipelineOp(computation, labels.integer("chunk", minimum=0), labels.integer("micro_batch", minimum=0))
            start_us = span.number("ts", minimum=0, maximum=MAX_MICROSECONDS) + shift
            timed = TimedPass(
                op, start_us / 1e6, (start_us + span.number("dur", minimum=0, maximum=MAX_MICROSECONDS)) / 1e6
            )
            if passes.setdefault(op, timed) is not timed:
                raise UserError(f"a second {event['name']} of the micro-batch {op.micro_batch} in chunk {op.chunk}")
        except UserError as error:
            raise UserError(f"{trace.path}: event {number}: {error}; write it anew") from error
    if not passes:
        raise UserError(f"{trace.path}: holds no passes of iteration {iteration}; write it anew")
    return sorted(passes.values(), key=lambda timed: timed.start_s)


def write(content: dict[str, Any], path: Path) -> None:
    """Write a complete trace or none, compressed if the name ends in .gz.

    Raises:
        UserError: when it cannot be written.
    """
    data = json.dumps(content).encode()
    write_whole(path, gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data, "-o")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", help="the folder of --profile-trace, or files from it")
    parser.add_argument("-o", "--output", default="trace.json", help="the merged trace; .json or .json.gz (trace.json)")
    parser.add_argument(FLAG, metavar="FILE.svg", help="draw the passes of each pipeline rank over time")
    parser.add_argument("--no-align", action="store_true", help="leave the ranks' clocks as they are")
    options = parser.parse_args(arguments)
    try:
        if options.draw_schedule is not None:
            check_picture(options.draw_schedule, FLAG)
        traces = [read_trace(path) for path in find_files(options.traces)]
        merged, table = merge(traces, align=not options.no_align), summarize(traces)
        timeline = None if options.draw_schedule is None else read_timeline(traces, align=not options.no_align)
        write(merged, Path(options.output))
        if timeline is not None:
            save_figure(draw_schedule([timeline]), Path(options.draw_schedule))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # an unreadable folder
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    for warning in find_warnings(traces):
        print(f"warning: {warning}", file=sys.stderr)
    print(table)
    total = f" of {traces[0].world_size}" if len(traces) < (traces[0].world_size or 0) else ""
    print(f"\n{options.output}: {len(traces)}{total} ranks; open it at https://ui.perfetto.dev")
    if options.draw_schedule is not None:
        print(f"{options.draw_schedule}: the passes of an iteration")
    return 0
