#!/usr/bin/env python3
"""Makes one trace of those that the ranks of a run wrote, for https://ui.perfetto.dev or chrome://tracing.

    torchrun ... pretrain_gpt.py ... --profile-trace traces
    python tools/merge_traces.py traces -o trace.json.gz

Clocks of different machines are aligned by the barrier that the ranks passed just before the first traced iteration
(`--no-align` leaves them as they are). A table on standard output says where each rank's time went.
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.atomic import atomic_write

COLUMNS = ("forward", "backward", "optimizer", "encode", "decode", "wait")


class TraceError(Exception):
    """What is wrong with a file; one line."""


@dataclass(frozen=True)
class RankTrace:
    """One rank's file.

    Args:
        path: where it came from.
        rank, label: who wrote it.
        aligned_us: when the rank left the barrier, by its own clock.
        events: Chrome trace events.
    """

    path: Path
    rank: int
    label: str
    aligned_us: float | None
    events: list[dict[str, Any]]


def read_trace(path: Path) -> RankTrace:
    """Reads a rank's file.

    Raises:
        TraceError: when it is not one.
    """
    try:
        content = json.loads(path.read_text())
        about, events = content["otherData"], content["traceEvents"]
        return RankTrace(path, int(about["rank"]), str(about["label"]), about["aligned_us"], list(events))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a trace of --profile-trace, or cut short; write it anew") from error


def find(words: Sequence[str]) -> list[Path]:
    """The files that arguments name: files, or folders of them.

    Raises:
        TraceError: when there is none.
    """
    found: list[Path] = []
    for word in words:
        path = Path(word)
        found += sorted(path.glob("trace_rank_*.json")) if path.is_dir() else [path]
    if not found:
        raise TraceError(f"no trace_rank_*.json in {', '.join(words)}; name the folder of --profile-trace")
    return found


def merge(traces: Sequence[RankTrace], align: bool = True) -> dict[str, Any]:
    """One trace, its ranks' clocks set to that of the first.

    Raises:
        TraceError: when two files are of the same rank.
    """
    ranks: dict[int, Path] = {}
    for trace in traces:
        if trace.rank in ranks:
            raise TraceError(
                f"{trace.path} and {ranks[trace.rank]} are both of rank {trace.rank}; merge one run at a time"
            )
        ranks[trace.rank] = trace.path
    ordered = sorted(traces, key=lambda trace: trace.rank)
    reference = next((trace.aligned_us for trace in ordered if trace.aligned_us is not None), None)
    events: list[dict[str, Any]] = []
    for trace in ordered:
        known = align and reference is not None and trace.aligned_us is not None
        shift = reference - trace.aligned_us if known else 0.0  # type: ignore[operator]  # known says that both are
        events += [{**event, "ts": round(event["ts"] + shift, 1)} if "ts" in event else event for event in trace.events]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def summary(traces: Sequence[RankTrace]) -> str:
    """Milliseconds per iteration of each rank in each kind of span, as a table."""
    lines = [
        "| rank | iteration ms | " + " | ".join(COLUMNS) + " | sent MB |",
        "|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for trace in sorted(traces, key=lambda trace: trace.rank):
        spans = [event for event in trace.events if event.get("ph") == "X"]
        iterations = max(sum(event["name"] == "iteration" for event in spans), 1)

        def milliseconds(name: str, spans: list[dict[str, Any]] = spans, count: int = iterations) -> str:
            return f"{sum(event['dur'] for event in spans if event['name'] == name) / 1000 / count:.1f}"

        sent = sum(event["args"]["sent bytes"] for event in trace.events if event.get("ph") == "b") / iterations
        figures = [milliseconds(name) for name in ("iteration", *COLUMNS)]
        lines.append(f"| {trace.rank} ({trace.label}) | " + " | ".join(figures) + f" | {sent / 1e6:.2f} |")
    return "\n".join(lines)


def write(content: dict[str, Any], path: Path) -> None:
    """Writes a trace, compressed where the name ends in .gz; whole or not at all."""
    data = json.dumps(content).encode()
    with atomic_write(path) as stream:
        stream.write(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", help="the folder of --profile-trace, or files from it")
    parser.add_argument("-o", "--output", default="trace.json", help="the merged trace; .json or .json.gz")
    parser.add_argument("--no-align", action="store_true", help="leave the ranks' clocks as they are")
    options = parser.parse_args(arguments)
    try:
        traces = [read_trace(path) for path in find(options.traces)]
        write(merge(traces, align=not options.no_align), Path(options.output))
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {options.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(summary(traces))
    print(f"\n{options.output}: {len(traces)} ranks; open it at https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
