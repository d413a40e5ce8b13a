"""A small run, as the planner is given one."""

from __future__ import annotations

from typing import Any

from megatron.config.run import RunConfig
from megatron.planner.choice import Choice, choice_of
from megatron.planner.cluster import Cluster, Device, LinkSpec
from megatron.planner.predict import Predictor

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
    """What predicts a configuration, and the choice that it makes."""
    return Predictor(config, cluster, VOCAB), choice_of(config, cluster.gpus)
