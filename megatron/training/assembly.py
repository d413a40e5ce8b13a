"""A rank's engines, built from the configuration: model chunks, buckets, pipeline, optimizer."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron.base.errors import UserError
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.state import CompressorState, end_states
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.training import can_compile_by_default
from megatron.diloco.outer_sync import OuterSync
from megatron.distributed.clock import clock_of
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger
from megatron.distributed.message_seeds import MessageSeeds
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.models.rank_context import RankContext
from megatron.models.stage import Stage
from megatron.models.stages import boundary_lengths, build_stages, padded_vocab_size
from megatron.optimizer.loss_scale import build_loss_scale
from megatron.optimizer.optimizer import Optimizer
from megatron.parallel.data.buffer import FlatBuffer, named_params
from megatron.parallel.data.delay_correction import DelayCorrection, GradientExtrapolation
from megatron.parallel.data.delayed import DelayedGradients
from megatron.parallel.data.gradient_sync import GradientSync, bucket_elements, main_grad_dtype
from megatron.parallel.data.param_versions import ParamVersions
from megatron.parallel.data.sync_warmup import SyncWarmup
from megatron.parallel.data.torch_ddp import TorchReplicas
from megatron.parallel.expert.dispatcher import ExpertComm
from megatron.parallel.pipeline.channel import PipelineChannel
from megatron.parallel.pipeline.engine import PipelineEngine
from megatron.parallel.pipeline.schedule import ScheduleLimits
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.main_grad import WeightGrads
from megatron.parallel.tensor.shards import collect_specs
from megatron.training.experts import ExpertTally
from megatron.training.observers import build_experiments, build_traces


@dataclass(frozen=True)
class Engines:
    """All objects of a rank for computation and communication.

    Args:
        config: resolved configuration.
        topology: this rank's groups and coordinates.
        ledger: bytes and times of every communication point, and the observers.
        vocab_size, padded_vocab_size: size of the vocabulary without and with padding.
        stages: this rank's model chunks.
        buffers: flat parameters and gradients of the chunks.
        sync: reduction of gradients.
        pipeline: execution of pipeline schedules.
        optimizer: update of the parameters.
        channel: messages to the neighboring stages; None with a single stage.
        comm: tensor-parallel communication.
        expert_comm: expert-parallel communication.
        plan: compressors of all points.
        experts: token counts of the experts.
        replicas: torch's DistributedDataParallel around the chunk, with ``--DDP-impl torch``.
        sync_warmup: synchronous steps of all islands.
        outer: rounds of islands on this rank; None without the point ``outer``.
        delayed: gradients that the next step applies; None without ``--delay 1``.
    """

    config: RunConfig
    topology: Topology
    ledger: Ledger
    vocab_size: int
    padded_vocab_size: int
    stages: list[Stage]
    buffers: list[FlatBuffer]
    sync: GradientSync
    pipeline: PipelineEngine
    optimizer: Optimizer
    replicas: TorchReplicas | None
    channel: PipelineChannel | None
    comm: TensorComm
    expert_comm: ExpertComm
    plan: CompressionPlan
    experts: ExpertTally
    sync_warmup: SyncWarmup
    outer: OuterSync | None
    delayed: DelayedGradients | None

    def begin_step(self, iteration: int, seq_length: int | None = None) -> None:
        """Begin a step, or an evaluation, at all communication points except those of gradients.

        Args:
            iteration: 0-based; -1 for an evaluation.
            seq_length: tokens of each sample, which determine the shapes of messages; None for the full length.
        """
        self.ledger.clock.report_known()
        for observer in self.ledger.observers:
            observer.begin_step(iteration)
        self.plan.begin_step(iteration)
        self.sync_warmup.begin_step(iteration)
        self.comm.begin_step(iteration)
        self.expert_comm.begin_step(iteration)
        if self.channel is not None:
            self.channel.shapes = _message_shapes(self.config, self.topology.layout, seq_length)

    def compressor_states(self) -> Iterator[CompressorState]:
        """Compressor states of this rank."""
        yield from self.sync.states()
        if self.channel is not None:
            yield from self.channel.states()

    def end_step(self, keep_states: bool) -> None:
        """End a step or an evaluation: commit staged states of message codecs, or roll them back."""
        end_states(self.channel.states() if self.channel is not None else (), keep_states)
        for observer in self.ledger.observers:
            observer.end_step()

    @property
    def holds_loss(self) -> bool:
        """Whether this rank's last chunk computes the loss."""
        return self.stages[-1].stage_part.last

    @property
    def needs_tokens(self) -> bool:
        """Whether this rank reads tokens, for the embedding, losses, attention masks, or message keys."""
        data, model = self.config.data, self.config.model
        ends = any(stage.stage_part.first or stage.stage_part.last for stage in self.stages)
        attends = data.reset_position_ids or data.reset_attention_mask or not model.causal
        return ends or attends or self.keys_hold_tokens

    @property
    def keys_hold_tokens(self) -> bool:
        """Whether a codec of pipeline messages needs tokens in the message keys."""
        if self.channel is None:
            return False
        points = (Point.PP_FWD, Point.PP_BWD)
        return any(self.plan.is_compressed(point) and self.plan.codec(point).traits.tokens for point in points)


def make_layout(config: RunConfig, world_size: int) -> Layout:
    """Make the mesh layout for a configuration."""
    parallel = config.parallel
    return Layout(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        dp=config.parallel.data_parallel_size(world_size),
        chunks=parallel.virtual_pipeline_model_parallel_size or 1,
        v_shaped=parallel.in_v_form,
        decoder=(parallel.pipeline_model_parallel_split_rank or 0) if config.model.decoder_layers else 0,
        distances=config.model.shares_distances,
        ep=parallel.expert_model_parallel_size,
        folded=parallel.folds_experts and config.model.has_experts,
    )


def groups_by_node(config: RunConfig) -> frozenset[str]:
    """Names of the groups that compressors or experts split by node; see ``NODE_SPLITS``."""
    specs, parallel = config.compression.specs(RunLength(config.training.planned_iters)), config.parallel
    names = set()
    if parallel.expert_model_parallel_size > 1 and parallel.moe_two_stage != "off":
        names.add("ep")
    if config.compression.is_auto and Point.DP_GRAD not in specs:  # the choice may be a two-level sum
        names.add("dp")
    for point, spec in specs.items():
        if point in (Point.DP_GRAD, Point.EMBED_GRAD) and spec.make_rounds().traits.levels:
            names.add("dp" if point is Point.DP_GRAD else "fused_embedding" if spec.fused else "embedding")
    return frozenset(names)


def build_engines(config: RunConfig, topology: Topology, vocab_size: int, length: RunLength | None = None) -> Engines:
    """Build this rank's engines with freshly initialized weights.

    Args:
        config: resolved configuration.
        topology: this rank's groups and coordinates.
        vocab_size: size of the tokenizer's vocabulary.
        length: length of the run, for warm-ups in fractions of the run.
    """
    layout, parallel, clock = topology.layout, config.parallel, clock_of(topology.device)
    ledger = Ledger(clock, build_traces(config.logging, parallel.pipeline_schedule, topology, clock))
    specs = config.compression.specs(length or RunLength(config.training.planned_iters))
    plan = CompressionPlan(specs, topology.coordinates.pp, layout.pp)
    warmup_iters, outer = plan.activation(Point.OUTER).warmup_iters, plan.specs.get(Point.OUTER)
    sums_compressed = outer is not None and outer.outer_options.in_step == "compressed"
    sync_warmup = SyncWarmup(config.islands.islands, warmup_iters, ledger, sums_compressed)
    seeds = MessageSeeds()
    comm = TensorComm(
        topology.tp, ledger, plan, parallel.sequence_parallel, parallel.async_tensor_model_parallel_allreduce, seeds
    )
    expert_comm = ExpertComm(topology.ep, ledger, plan, parallel.moe_two_stage, layout.folded, seeds)
    rank = RankContext(
        config.model, comm, topology.device, config.precision.params_dtype, config.recompute, expert_comm
    )
    stages = _build_stages(config, topology, vocab_size, rank)
    torch_ddp = parallel.ddp_impl == "torch" and layout.dp > 1
    sharded = parallel.use_distributed_optimizer and layout.dp > 1
    weight_grads = WeightGrads()
    buffers = _build_buffers(config, topology, stages, sharded or config.islands.several, weight_grads)
    ledger.observers += build_experiments(config.logging, topology, buffers)
    reduces = not (torch_ddp or parallel.no_allreduce)
    sync = GradientSync(
        buffers,
        topology,
        plan,
        ledger,
        sharded,
        parallel.overlap_grad_reduce,
        reduces,
        config.optimizer.clip_grad,
        sync_warmup,
    )
    channel = _build_channel(config, topology, plan, ledger, comm) if layout.pp > 1 else None
    optimizer = Optimizer(
        buffers,
        topology,
        config.optimizer,
        build_loss_scale(config.precision),
        plan,
        ledger,
        sharded=sharded,
        log_params_norm=config.logging.log_params_norm,
        log_num_zeros=config.logging.log_num_zeros_in_grad,
        sync_warmup=sync_warmup,
        look_ahead=parallel.delay_strength if parallel.looks_ahead else None,
    )
    delayed = _build_delayed(parallel, sync, buffers, plan, optimizer) if parallel.delay else None
    replicas = TorchReplicas(stages[0], topology.dp, ledger) if torch_ddp else None
    outer_sync = None
    if outer is not None:  # even a single island has rounds
        named_buffers = {name: x for stage in stages for name, x in stage.named_buffers()}
        layers = config.model.num_layers
        outer_sync = OuterSync(buffers, optimizer, topology, plan, ledger, outer.outer_options, layers, named_buffers)
    # Advance the reduction between passes only if this is safe. NCCL operations of several groups must be launched in
    # the same order on all ranks, but a round advances when its messages have arrived, at different times on different
    # ranks. A round inside a node blocks, which must not happen while the node's other ranks wait for this rank
    # elsewhere.
    only_replicas = layout.tp == layout.pp == layout.ep == 1
    never_blocks = topology.device.type == "cpu" and all(buffer.group.split is None for buffer in buffers)
    after_pass = delayed.advance_reduction if delayed is not None and (only_replicas or never_blocks) else lambda: None
    return Engines(
        config=config,
        topology=topology,
        ledger=ledger,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, layout.tp),
        stages=stages,
        buffers=buffers,
        sync=sync,
        pipeline=PipelineEngine(
            layout,
            topology.coordinates.pp,
            channel,
            partial(_begin_pass, None if delayed is None else delayed.versions, plan, comm, seeds),
            sync.begin_last_backward,
            weight_grads,
            after_pass,
            ScheduleLimits.from_config(parallel),
        ),
        optimizer=optimizer,
        replicas=replicas,
        channel=channel,
        comm=comm,
        expert_comm=expert_comm,
        plan=plan,
        experts=ExpertTally(config.model, stages, topology, ledger, sync_warmup),
        sync_warmup=sync_warmup,
        outer=outer_sync,
        delayed=delayed,
    )


def _begin_pass(
    versions: ParamVersions | None,
    plan: CompressionPlan,
    comm: TensorComm,
    seeds: MessageSeeds,
    iteration: int,
    micro_batch: int,
) -> None:
    """Prepare for a pass of a micro-batch and, if passes of two steps take turns, of a step."""
    if versions is not None:
        versions.select(iteration if iteration >= 0 else None)
        plan.begin_step(iteration)
        comm.begin_step(iteration)
    seeds.micro_batch = micro_batch


def _build_stages(config: RunConfig, topology: Topology, vocab_size: int, rank: RankContext) -> list[Stage]:
    """Build this rank's model chunks, with 8-bit linear layers and compiled layers if configured."""
    stages = build_stages(rank, topology.layout, topology.coordinates.pp, vocab_size, config.training.seed)
    choice, cuda = config.training.compile, topology.device.type == "cuda"
    has_compiler = (
        importlib.util.find_spec("triton") is not None
        if cuda
        else any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
    )
    if choice == "on" and not has_compiler:
        requirement = "the package triton" if cuda else "a C++ compiler (g++, clang++ or the value of CXX)"
        raise UserError(f"--compile on: {requirement} is missing; install it or leave the flag out")
    by_default = can_compile_by_default(config.training, config.parallel, config.model)
    compiles = choice == "on" or (choice == "auto" and has_compiler and by_default)
    for stage in stages:
        stage.compute_in_fp8(config.precision.fp8)
        if compiles:
            stage.compile_layers(lengths_vary=config.curriculum.curriculum_learning)
    return stages


def _build_buffers(
    config: RunConfig, topology: Topology, stages: Sequence[Stage], sharded: bool, weight_grads: WeightGrads
) -> list[FlatBuffer]:
    """Build the flat buffers of each chunk, with a separate buffer for experts under expert parallelism. With
    ``sharded``, every bucket divides into equal shares, one per replica."""
    parallel, layout = config.parallel, topology.layout
    buffers = []
    for chunk, stage in enumerate(stages):
        params = named_params(collect_specs(stage), stage)
        expert_params = [param for param in params if param.spec.of_expert and layout.ep > 1]
        other_params = [param for param in params if not (param.spec.of_expert and layout.ep > 1)]
        for members, group in ((other_params, topology.dp), (expert_params, topology.expert_dp)):
            if members:
                buffers.append(
                    FlatBuffer(
                        members,
                        main_grad_dtype(config.precision.params_dtype, parallel.accumulate_allreduce_grads_in_fp32),
                        group,
                        bucket_elements(parallel.ddp_bucket_size, parallel.overlaps_reduction, layout.dp),
                        sharded=sharded,
                        tensor_parallel=layout.tp > 1,
                        chunk=chunk,
                        weight_grads=weight_grads,
                        delayed=parallel.delay > 0,
                    )
                )
    return buffers


def _build_channel(
    config: RunConfig, topology: Topology, plan: CompressionPlan, ledger: Ledger, comm: TensorComm
) -> PipelineChannel:
    """Build the channel to the neighboring pipeline stages."""
    return PipelineChannel(
        topology.layout,
        topology.forward_link,
        topology.backward_link,
        plan,
        ledger,
        _message_shapes(config, topology.layout),
        config.model.residual_dtype(config.precision.params_dtype),
        topology.device,
        comm if config.parallel.splits_messages else None,
    )


def _build_delayed(
    parallel: ParallelConfig,
    sync: GradientSync,
    buffers: Sequence[FlatBuffer],
    plan: CompressionPlan,
    optimizer: Optimizer,
) -> DelayedGradients:
    """Build the delayed gradients, with the configured correction."""
    correction: DelayCorrection | None = optimizer.publisher.look_ahead
    if parallel.delay_correction == "extrapolate":
        correction = GradientExtrapolation(optimizer.shards, parallel.delay_strength)
    versions = ParamVersions(buffers) if parallel.overlaps_steps else None
    return DelayedGradients(sync, buffers, plan, correction, versions)


def _message_shapes(config: RunConfig, layout: Layout, length: int | None = None) -> list[torch.Size]:
    """Shapes of pipeline messages by boundary; this rank's slice of the sequence if messages are split."""
    lengths = boundary_lengths(config.model, layout, length or config.model.seq_length)
    batch_and_width = (config.training.micro_batch_size, config.model.hidden_size)
    return [torch.Size((length // config.parallel.message_parts, *batch_and_width)) for length in lengths]
