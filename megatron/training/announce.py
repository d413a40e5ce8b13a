"""Messages of a run before it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.config.run import RunConfig, describe_section
from megatron.data.build import Datasets
from megatron.distributed.topology import Topology
from megatron.training.assembly import Engines
from megatron.training.compression_notes import cache_notes, node_notes, stage_notes
from megatron.training.coverage import coverage_notes
from megatron.training.data_notes import data_notes
from megatron.training.weight_records import weight_record_notes


def log_config(
    config: RunConfig, notes: Sequence[str], sections: Mapping[str, Any], log: Callable[[str], None]
) -> None:
    """Print the notes on the flags, and the settings that differ from the defaults, or all (``--print-config``)."""
    for note in notes:
        log(f"note: {note}")
    defaults = config.logging.print_config
    log("settings:" if defaults else "settings that differ from the defaults (--print-config prints all):")
    log(config.describe(defaults=defaults))
    for name, section in sections.items():
        log(describe_section(name, section, defaults=defaults))


def log_engines(engines: Engines, datasets: Datasets, notes: Sequence[str], log: Callable[[str], None]) -> None:
    """Print a summary of the run's engines and data, and the notes on them."""
    about_nodes = [*node_notes(engines.plan, engines.topology), *stage_notes(engines)]
    about_data = data_notes(engines.config, datasets) if engines.config.model.predicts_words else []
    for note in (*about_nodes, *cache_notes(engines, datasets[0]), *notes, *about_data):
        log(f"note: {note}")
    for line in (*coverage_notes(engines), *weight_record_notes(engines)):
        log(line)
    log(summary(engines.topology, engines.vocab_size, engines.padded_vocab_size, datasets))


def summary(topology: Topology, vocab_size: int, padded: int, datasets: Datasets) -> str:
    """Lines on the run's processes, vocabulary and samples."""
    layout, train = topology.layout, datasets[0]
    samples = [len(dataset) if dataset else 0 for dataset in datasets]
    epochs = ""
    if train is not None:
        size = train.epoch_samples
        epochs = f" ({len(train) / size:.1f} epochs of {size:,})" if size else " (no epoch)"
    lines = [
        f"{layout.world_size} processes on {topology.device.type}: tensor-parallel {layout.tp}, "
        f"pipeline {layout.pp} x {layout.chunks}, data-parallel {layout.dp}",
        f"vocabulary: {vocab_size} entries, padded to {padded}",
        f"samples: {samples[0]:,} train{epochs}, {samples[1]:,} validation, {samples[2]:,} test",
    ]
    return "\n".join(lines)


def rank_0_log(topology: Topology) -> Callable[[str], None]:
    """Return a function that prints lines on rank 0 only."""

    def log(text: str) -> None:
        if topology.rank == 0:
            print(text, flush=True)

    return log
