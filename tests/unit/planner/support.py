"""A small run for the planner, and its files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.run import RunConfig
from megatron.planner.choice import Choice, make_choice
from megatron.planner.cluster import Cluster, Device, LinkSpec, format_cluster
from megatron.planner.predict import Prediction, Predictor

VOCAB = 1000
CLUSTER = Cluster("c", 8, 4, Device("d", 100.0, 0.5, 1.0, 500.0, 5.0), LinkSpec(400.0, 5.0), LinkSpec(40.0, 20.0))


def small_run(world: int = 8, specs: tuple[str, ...] = (), **sections: dict[str, Any]) -> RunConfig:
    """A resolved configuration of 8 layers of width 64."""
    plain: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
        "training": {"micro_batch_size": 1, "global_batch_size": 32, "train_iters": 100},
        "optimizer": {"lr": 1e-3},
        "tokenizer": {"vocab_size": VOCAB},
        "compression": {"compress": list(specs)},
    }
    for name, values in sections.items():
        plain[name] = plain.get(name, {}) | values
    return RunConfig.from_dict(plain).resolve(world)


def predictor_of(config: RunConfig, cluster: Cluster = CLUSTER) -> tuple[Predictor, Choice]:
    """The predictor of a configuration, and the configuration's choice."""
    return Predictor(config, cluster, VOCAB), make_choice(config, cluster.gpus)


def limit_memory(cluster: Cluster, gib: float) -> Cluster:
    """A cluster whose devices have this much memory."""
    return replace(cluster, device=replace(cluster.device, memory_gib=gib))


def fastest_seconds(predictions: Iterable[Prediction], limit: float) -> list[float]:
    """Seconds of the fastest choice of each layout that needs at most ``limit`` bytes, sorted."""
    fastest: dict[tuple[int, ...], float] = {}
    for prediction in predictions:
        if prediction.memory_bytes <= limit:
            layout = prediction.choice.layout
            fastest[layout] = min(prediction.seconds, fastest.get(layout, math.inf))
    return sorted(fastest.values())


def write_files(folder: Path, config: RunConfig, cluster: Cluster = CLUSTER) -> list[str]:
    """Writes run.yaml and cluster.yaml; returns the planner's arguments."""
    run_file, cluster_file = folder / "run.yaml", folder / "cluster.yaml"
    run_file.write_text(config.to_yaml())
    cluster_file.write_text(format_cluster(cluster))
    return ["--config", str(run_file), "--cluster", str(cluster_file)]
