"""Notes about a run's compressors that depend on the training set."""

from __future__ import annotations

import torch

from megatron.compression.api import RoundCompressor
from megatron.compression.outer import RoundSchedule
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.curriculum import lengths_of
from megatron.config.memory import format_bytes
from megatron.config.run import RunConfig
from megatron.data.build import Dataset
from megatron.distributed.nodes import describe_sums
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.training.assembly import Engines

MIN_TURNS = 3
"""Least average number of times that each element should be sent in a run, if most elements wait in a residual."""


def run_length(train_iters: int, train: Dataset | None, batch_sizes: BatchSizeSchedule) -> RunLength:
    """Return the length of a run and of its epochs in iterations, for warm-ups given as fractions."""
    epoch = train.epoch_samples if train is not None else 0
    return RunLength(train_iters, lambda epochs: batch_sizes.iterations_for(round(epochs * epoch)) if epoch else 0)


def compression_notes(
    config: RunConfig, train: Dataset | None, replicas: int, length: RunLength, train_iters: int
) -> list[str]:
    """Notes on compressors that have little or no effect in this run, with the reasons."""
    notes = []
    for point, spec in config.compression.specs(length).items():
        flag = f"--compress {point.value}={spec.name}"
        warmup = spec.activation.warmup_iters
        in_step = spec.point is Point.OUTER and spec.outer_options.in_step == "compressed"
        idle = ""
        if in_step and not config.islands.several:
            idle = "there is one island"
        elif in_step and not warmup:
            idle = "islands never go in step with warmup=0"
        if idle:
            notes.append(f"{flag}: in-step=compressed: no effect, {idle}")
        if warmup >= train_iters > 0 and (idle or not in_step):
            notes.append(f"{flag}: no effect, its warm-up of {warmup} iterations is the whole run of {train_iters}")
        compressor = spec.make_compressor(spec.options_at(train_iters))
        density = compressor.traits.density if isinstance(compressor, RoundCompressor) else 1.0
        kind, quantity, advice, times, every = "steps", "gradients", "train for", max(train_iters - warmup, 0), 1
        if spec.point is Point.OUTER:
            kind, quantity, advice = "rounds", "differences", "let islands take"
            times, every = RoundSchedule(spec.outer_options, warmup, train_iters).rounds, spec.outer_options.every
        if density < 1 and 0 < times * density < MIN_TURNS:
            notes.append(
                f"warning: {flag}: sends {density:.2%} of the numbers in each of {times:,} {kind}, each number about "
                f"{times * density:.1f} times in the whole run; below {MIN_TURNS} times a large part of the {quantity} "
                f"never leaves the residuals: send more of them, or {advice} "
                f"{round(MIN_TURNS / density) * every:,} steps"
            )
        if train is None or not spec.remembered_samples:
            continue
        grows = lengths_of(config.curriculum, config.model.seq_length).first[-1]
        if grows:
            notes.append(
                f"{flag}: what is remembered is forgotten whenever sequences grow, the last time at iteration {grows}"
            )
        visits = len(train) / max(train.epoch_samples, 1)
        if visits < 2:
            notes.append(
                f"{flag}: a sample comes {visits:.1f} times in this run, and the first visit sends it whole; "
                "fixpoint would send less"
            )
        capacity = spec.remembered_samples
        if capacity < train.epoch_samples // replicas:
            notes.append(
                f"{flag}: cache={capacity} is less than the {train.epoch_samples // replicas} samples that a replica "
                "meets in an epoch, so they are forgotten before they return"
            )
        stays = config.training.micro_batch_size * replicas
        if replicas > 1 and (train.lanes is None or train.lanes % stays):
            notes.append(
                f"{flag}: samples return to other replicas than before, which do not remember them; "
                "take a micro-batch size x replicas that divides 64, and one data set"
            )
    return notes


def cache_notes(engines: Engines, train: Dataset | None) -> list[str]:
    """Memory of remembered samples, at its size after the first epoch."""
    channel, plan, notes = engines.channel, engines.plan, []
    for point, spec in plan.specs.items() if channel is not None and train is not None else ():
        if not spec.remembered_samples:
            continue
        assert channel is not None
        assert train is not None
        codec = plan.codec(point)
        row = max(codec.remembered_bytes(torch.Size((shape[0], shape[2]))) for shape in channel.shapes)
        replicas = engines.topology.layout.dp
        samples = min(spec.remembered_samples, -(-train.epoch_samples // replicas))
        in_memory = min(samples, codec.traits.samples_in_memory or samples)
        on_disk = f", and {format_bytes((samples - in_memory) * row)} in a file" if in_memory < samples else ""
        notes.append(
            f"--compress {point.value}={spec.name}: each end of a boundary will remember {samples:,} samples of "
            f"{format_bytes(row)}: {format_bytes(in_memory * row)} of memory{on_disk}"
        )
    return notes


def node_notes(plan: CompressionPlan, topology: Topology) -> list[str]:
    """Notes on how two-level sums use the run's nodes."""
    notes = []
    for point, spec in plan.specs.items():
        embeddings = topology.fused_embedding if spec.fused else topology.embedding
        groups = {Point.DP_GRAD: [topology.dp, topology.expert_dp], Point.EMBED_GRAD: list(embeddings.values())}
        for group in groups.get(point, []):
            if group.size > 1 and group.split is not None and plan.rounds(point).traits.levels:
                notes.append(f"--compress {point.value}={spec.name}: {describe_sums(group.split)}")
    return list(dict.fromkeys(notes))


def stage_notes(engines: Engines) -> list[str]:
    """A note on how two-stage dispatch of rows uses the run's nodes."""
    comm, mode = engines.expert_comm, engines.config.parallel.moe_two_stage
    split = comm.group.split
    if split is None:
        return []
    flag = f"--moe-two-stage {mode}"
    if comm.nodes is None:
        return [f"{flag}: no effect, {split.reason}"] if mode == "on" else []
    if split.node.size == 1:
        return [f"{flag}: a token goes once to each rank that has experts for it ({split.reason})"]
    nodes = f"{len(split.nodes)} {'blocks' if split.reason else 'nodes'} of {split.node.size} ranks"
    return [f"{flag}: a token goes once to each of {nodes} that has experts for it, and is handed on there"]
