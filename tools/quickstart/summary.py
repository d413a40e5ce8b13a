"""Summary of a quickstart run, from its log, as text and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.base.atomic import atomic_write
from megatron.base.errors import UserError
from megatron.config.memory import format_bytes
from megatron.training.records import read_records
from tools.quickstart.unigram import Unigram

EXPECTED_GAIN = 1.8
"""Nats per token by which a model that uses context should be below one that only counts tokens."""


@dataclass(frozen=True)
class Summary:
    """Results of a run: losses and entropies in nats per token, bytes sent by communication point."""

    iteration: int
    tokens_per_second: float
    validation_loss: float
    unigram_entropy: float
    heldout_tokens: int
    bytes_per_iteration: Mapping[str, float]

    @property
    def gain(self) -> float:
        return self.unigram_entropy - self.validation_loss

    def write(self, path: Path) -> None:
        record = {**asdict(self), "gain": self.gain}
        with atomic_write(path) as stream:
            stream.write(json.dumps(record, indent=2).encode() + b"\n")


def summarize(log: Path, heldout: Unigram) -> Summary:
    """Summarize a run from its JSON-lines log.

    Raises:
        UserError: if the run logged no training or no validation.
    """
    events = read_records(log)
    train = [event for event in events if event.get("kind") == "train"]
    validation = [event for event in events if event.get("kind") == "validation"]
    if not train or not validation or validation[-1].get("lm_loss") is None:
        raise UserError(f"{log}: no training and validation losses; remove its folder and run again")
    return Summary(
        iteration=int(train[-1]["iteration"]),
        tokens_per_second=statistics.median(event["tokens_per_second"] for event in train),
        validation_loss=float(validation[-1]["lm_loss"]),
        unigram_entropy=heldout.nats_per_token,
        heldout_tokens=heldout.tokens,
        bytes_per_iteration={name: point["wire_bytes"] for name, point in (train[-1].get("comm") or {}).items()},
    )


def format_summary(summary: Summary, results: Mapping[str, Path], sample: str) -> str:
    verdict = "" if summary.gain >= EXPECTED_GAIN else f", less than the {EXPECTED_GAIN} expected"
    rows: list[tuple[str, Any]] = [
        ("iterations", f"{summary.iteration:,}"),
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s"),
        ("validation loss", f"{summary.validation_loss:.4f} nats per token"),
        (
            "unigram entropy",
            f"{summary.unigram_entropy:.4f} nats per token ({summary.heldout_tokens:,} tokens)",
        ),
        ("difference", f"{summary.gain:.4f} nats per token below the unigram entropy{verdict}"),
        ("bytes moved", f"{format_bytes(sum(summary.bytes_per_iteration.values()))} per iteration"),
    ]
    rows += [(f"  {point}", format_bytes(count)) for point, count in summary.bytes_per_iteration.items()]
    rows += results.items()
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    quoted = [f"  | {line}" for line in sample.strip().splitlines()]
    return "\n".join(["Summary", *lines, "", "  A sample of the model's text:", *quoted])
