#!/usr/bin/env python3
"""Predicts what a training run costs on a cluster, and finds the layout, schedule and compressors that make it fastest.

    python tools/plan.py --config run.yaml --cluster cluster.yaml             the run as it is, and the fastest ones
    python tools/plan.py --config run.yaml --cluster cluster.yaml --no-search the run as it is
    torchrun --nproc-per-node 8 tools/plan.py --config run.yaml --cluster cluster.yaml --measure

--config is what pretrain_gpt.py --config reads (and writes, to config.yaml beside its checkpoints). --cluster describes
the devices and links; examples/clusters holds some. --measure fills its rates in by a probe of about a minute on the
machine itself: alone it measures the device, under torchrun the links as well, with the ranks of a node one after the
other. A device's memory and the sizes of the cluster stay what the file says.

Predicted are seconds of an iteration and what they are spent on, memory of the fullest device, bytes of each
communication point, and MFU. The real model and compressors are run on tensors without contents for that, and the real
pipeline schedules are played through. What a compressor does to the loss is not predicted: see docs/compression.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

REPO = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(REPO))

import torch  # noqa: E402

from megatron.config.errors import UserError  # noqa: E402
from megatron.config.run import RunConfig  # noqa: E402
from megatron.data.atomic import atomic_write  # noqa: E402
from megatron.tokenizer.build import build_tokenizer  # noqa: E402
from megatron.topology.launch import LaunchEnvironment, init_process_group, pick_device, shutdown  # noqa: E402
from megatron.topology.topology import build_topology  # noqa: E402
from megatron.training.assembly import layout_of  # noqa: E402
from tools.planner.choice import Choice, choice_of  # noqa: E402
from tools.planner.cluster import Cluster, Device, read_cluster, write_cluster  # noqa: E402
from tools.planner.measure import described, measure_all  # noqa: E402
from tools.planner.predict import Prediction, Predictor  # noqa: E402
from tools.planner.report import breakdown, reason, table  # noqa: E402
from tools.planner.search import SPEC_SETS, search  # noqa: E402

GPT2_VOCAB = 50257


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--config", required=True, metavar="FILE", help="YAML configuration of the run")
    made.add_argument("--cluster", required=True, metavar="FILE", help="YAML description of the cluster")
    made.add_argument("--measure", action="store_true", help="measure this machine and write its rates to --cluster")
    made.add_argument("--gpus", type=int, metavar="N", help="devices, instead of the cluster file's")
    made.add_argument("--no-search", action="store_true", help="predict the run as it is, and nothing else")
    made.add_argument("--top", type=int, default=5, metavar="N", help="choices that are shown (5)")
    made.add_argument(
        "--specs",
        action="append",
        metavar='"SPEC SPEC"',
        help="compressors that serve together, as in --compress; once for each set to be searched, in place of the "
        'usual ones; "" is no compression',
    )
    made.add_argument(
        "--vocab-size", type=int, metavar="N", help="entries of the vocabulary, instead of the tokenizer's"
    )
    made.add_argument("--json", metavar="FILE", help="write the predictions there, too")
    return made


def entries_of(config: RunConfig) -> int:
    """Entries of the run's vocabulary.

    Raises:
        UserError: when its tokenizer cannot be built here.
    """
    if config.tokenizer.tokenizer_type is None:
        return config.tokenizer.vocab_size or GPT2_VOCAB
    try:
        return build_tokenizer(config.tokenizer).vocab_size
    except UserError as error:
        if config.tokenizer.tokenizer_type == "GPT2BPETokenizer":
            return GPT2_VOCAB
        raise UserError(f"{error}; or give the number of its entries with --vocab-size") from error


def _without_pipeline(config: RunConfig, world_size: int) -> RunConfig:
    """The same model on the ranks that measure: tensor-parallel as it will be where there are several, no pipeline."""
    tp = config.parallel.tensor_model_parallel_size if world_size > 1 else 1
    replicas = max(world_size // tp, 1)
    one = Choice(tp, 1, replicas, micro_batch=config.training.micro_batch_size, sequence_parallel=tp > 1)
    training = dataclasses.replace(config.training, global_batch_size=replicas * config.training.micro_batch_size)
    backend: Literal["nccl", "gloo"] = "nccl" if torch.cuda.is_available() else "gloo"
    parallel = dataclasses.replace(config.parallel, distributed_backend=backend)
    made = dataclasses.replace(config, training=training, parallel=parallel)
    return one.configure(made).resolve(world_size, cuda_available=torch.cuda.is_available())


def _this_machine() -> Cluster:
    """What is known of the machine before anything is measured: how many ranks, and their memory."""
    env, here = LaunchEnvironment.read(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available():
        return Cluster(gpus=env.world_size, gpus_per_node=here, device=Device(memory_gib=4.0))
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return Cluster(gpus=env.world_size, gpus_per_node=here, device=Device(memory_gib=memory))


def measure(config: RunConfig, cluster: Cluster, vocab_size: int, specs: Sequence[str], path: Path) -> Cluster | None:
    """Measures this machine; the cluster on the first rank, which writes it down, and None on the others."""
    env = LaunchEnvironment.read()
    if env.world_size == 1:
        found = measure_all(_without_pipeline(config, 1), vocab_size, specs, None, 1)
    else:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        resolved = _without_pipeline(config, env.world_size)
        init_process_group(env, backend, timeout_minutes=10)
        topology = build_topology(layout_of(resolved, env.world_size), pick_device(backend, env.local_rank))
        found = measure_all(resolved, vocab_size, specs, topology, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        shutdown()
        if env.rank:
            return None
    made = described(found, cluster)
    with atomic_write(path) as file:
        file.write(write_cluster(made).encode())
    return made


def show(predictor: Predictor, given: Prediction, options: argparse.Namespace) -> list[Prediction]:
    """Prints predictions; what was printed."""
    memory = predictor.cluster.device.memory_gib
    print(f"the run as it is, on {predictor.cluster.name}:\n{table([given], memory)}\n{breakdown(given)}")
    if given.memory_bytes > memory * 2**30:
        print(f"  it does not fit: {given.memory_bytes / 2**30:.1f} GiB of {memory:.0f}")
    if options.no_search:
        return [given]
    sets = (
        [tuple(text.split()) for text in options.specs]
        if options.specs
        else [*SPEC_SETS, tuple(predictor.config.compression.compress)]
    )
    start = time.perf_counter()
    found = search(predictor, sets, options.top)
    spent = time.perf_counter() - start
    print(
        f"\nthe fastest of {found.considered} choices that fit ({found.predicted} predicted in {spent:.1f} s, the "
        "others ruled out by their lower bounds):"
    )
    print(f"{table(found.best, memory)}\n\nthe fastest:\n{breakdown(found.best[0])}")
    if len(found.best) > 1:
        print(f"the runner-up is {reason(found.best[0], found.best[1])}")
    return [given, *found.best]


def run(options: argparse.Namespace) -> None:
    """The whole command.

    Raises:
        UserError: for anything that is wrong with what it was given.
    """
    path = Path(options.cluster)
    config = RunConfig.load_yaml(options.config)
    cluster = read_cluster(path) if path.exists() or not options.measure else _this_machine()
    if options.gpus is not None:
        cluster = dataclasses.replace(cluster, gpus=options.gpus)
    vocab_size = options.vocab_size or entries_of(config)
    if options.measure:
        measured = measure(config, cluster, vocab_size, config.compression.compress, path)
        if measured is None:
            return
        print(f"measured; written to {path}\n")
        cluster = measured
    # The devices are the cluster's, whatever this machine has.
    resolved = config.resolve(cluster.gpus, cuda_available=True)
    recompute = resolved.recompute
    if recompute.recompute_granularity == "full" and (
        recompute.recompute_method == "block" or recompute.recompute_num_layers != 1
    ):
        raise UserError(
            "--recompute-method block and --recompute-num-layers are not planned; plan uniform with 1 layer, "
            "which keeps the input of each layer"
        )
    predictor = Predictor(resolved, cluster, vocab_size)
    given = predictor.predict(choice_of(resolved, cluster.gpus))
    shown = show(predictor, given, options)
    if options.json:
        with atomic_write(Path(options.json)) as file:
            file.write(json.dumps([dataclasses.asdict(one) for one in shown], indent=1).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    for name in ("gpus", "top", "vocab_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            made.error(f"--{name.replace('_', '-')} {value}: give at least 1")
    try:
        run(options)
    except UserError as error:
        print(f"plan: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
