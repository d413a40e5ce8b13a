"""Compatibility checks of compressors with the layout, the model and the number format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.base.errors import UserError
from megatron.compression.points import EXPERTS, Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, expand_spec
from megatron.config.compression import CompressionConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig


def check_compression(
    compression: CompressionConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    settings: Mapping[str, Any],
    world_size: int,
    note: Callable[[str], None],
) -> Mapping[Point, Spec]:
    """Check that every compressor can work in this run, and note those without traffic.

    Returns the spec of each point. Raises UserError for a spec that cannot work.

    Args:
        compression, model, parallel, training: sections of the resolved configuration.
        settings: the values of all sections by field name.
        world_size: number of processes.
        note: receives the notes.
    """
    specs = compression.specs(RunLength(training.planned_iters))
    for text in compression.compress:
        if text.partition("=")[0].strip().lower() == EXPERTS:
            note(f"--compress {text} stands for {' '.join(expand_spec(text))}")
    if settings["check_orth_error_acti"]:
        probed = specs.get(Point.PP_BWD)
        if probed is None or probed.identity or parallel.pipeline_model_parallel_size == 1:
            raise UserError(
                "--check-orth-error-acti: no backward message is compressed; add --compress pp-backward=lowrank "
                "and --pipeline-model-parallel-size of at least 2"
            )
        if probed.activation.epilogue:
            raise UserError("--check-orth-error-acti: compares all micro-batches; leave when=epilogue out")
    stages = parallel.pipeline_model_parallel_size
    for point, spec in specs.items():
        flag = f"--compress {point.value}={spec.name}"
        for count, side in ((spec.activation.first_stages, "first"), (spec.activation.last_stages, "last")):
            if count is not None and stages == 1:
                note(f"{flag}: stages={side}:{count} has no effect, there is one pipeline stage")
            elif count is not None and count > stages:
                raise UserError(
                    f"{flag}: stages={side}:{count}, but --pipeline-model-parallel-size is {stages}; name at most "
                    f"{stages}, or write stages=all"
                )
        # The rank of low-rank factors cannot exceed the hidden size, a dimension of every compressed matrix.
        rank = max((getattr(options, "rank", 0) for options in spec.extreme_options()), default=0)
        hidden = model.hidden_size
        if rank > hidden:
            raise UserError(
                f"{flag}: rank={rank} is above the rank of any matrix of a model of --hidden-size {hidden}; "
                f"write rank={max(hidden // 4, 1)} or less"
            )
        if spec.activation.epilogue and parallel.pipeline_schedule == "auto":
            raise UserError(
                f"{flag},when=epilogue: what it compresses depends on the schedule, so with --pipeline-schedule auto "
                "the losses would depend on measured times; name a schedule"
            )
        reason = no_traffic_reason(model, parallel, world_size, point)
        if reason and not spec.identity:
            note(f"{flag}: no effect, {reason}")
        expert_ranks = parallel.expert_model_parallel_size
        if point is Point.DP_GRAD and expert_ranks > 1 and spec.make_rounds().traits.clips_first:
            raise UserError(
                f"{flag}: clips each replica's gradient before it is reduced, and with --expert-model-parallel-size "
                f"{expert_ranks} a replica has those of other replicas' tokens; leave one of the two out"
            )
        if point is Point.DP_GRAD and parallel.ddp_impl == "torch" and not spec.identity:
            raise UserError(f"{flag}: --DDP-impl torch reduces gradients itself; use --DDP-impl local")
        problem = spec.make_compressor().check(point, settings)
        if problem:
            raise UserError(f"{flag}: {problem}")
        compressed = spec.fused or not spec.identity
        if point is Point.EMBED_GRAD and compressed and parallel.use_distributed_optimizer:
            raise UserError(
                f"{flag}: with --use-distributed-optimizer the stages exchange only their shares of the embedding; "
                "leave the spec or the distributed optimizer out"
            )
        if point is Point.EMBED_GRAD and spec.fused and parallel.ddp_impl == "torch":
            raise UserError(f"{flag}: --DDP-impl torch reduces the embedding itself; use --DDP-impl local")
        tensor_parallel = point in (Point.TP_FWD, Point.TP_BWD)
        if tensor_parallel and parallel.message_parts > 1 and spec.registration.codec is None:
            raise UserError(
                f"{flag}: {parallel.splitting_flag} gathers activations, which {spec.name} cannot carry; use fixpoint"
            )
        if point is Point.PARAM_GATHER and parallel.use_distributed_optimizer and not spec.identity:
            _check_tied_gather(flag, spec, model, parallel)
    return specs


def _check_tied_gather(flag: str, spec: Spec, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that all stages that hold a tied embedding gather the same values of it."""
    stages, on_all_stages = parallel.pipeline_model_parallel_size, model.shares_distances
    # In V form, the first stage holds the output, too.
    if stages == 1 or parallel.in_v_form or not (model.ties_embeddings or on_all_stages):
        return
    decoder = (parallel.pipeline_model_parallel_split_rank or 0) if model.decoder_layers else 0
    holders = range(stages) if on_all_stages else sorted({0, decoder, stages - 1})
    if len({spec.activation.covers_stage(stage, stages) for stage in holders}) > 1:
        untie_advice = "" if decoder or on_all_stages else ", or --untie-embeddings-and-output-weights"
        raise UserError(
            f"{flag}: stages: stages {', '.join(map(str, holders))} hold the same embedding and must all "
            f"gather it compressed, or none; write stages=all{untie_advice}"
        )


def no_traffic_reason(model: ModelConfig, parallel: ParallelConfig, world_size: int, point: Point) -> str:
    """Reason why a point has no traffic in this run; empty if it has traffic."""
    if point in (Point.PP_FWD, Point.PP_BWD) and parallel.pipeline_model_parallel_size == 1:
        return "there is one pipeline stage"
    if point in (Point.TP_FWD, Point.TP_BWD) and parallel.tensor_model_parallel_size == 1:
        return "there is one tensor-parallel rank"
    if point.is_expert_point and not model.has_experts:
        return "no layer has experts (--num-experts)"
    if point.is_expert_point and parallel.expert_model_parallel_size == 1:
        return "every replica holds all experts (--expert-model-parallel-size)"
    if point is Point.DP_GRAD and parallel.no_allreduce:
        return "--no-allreduce leaves the sums out"
    if point is Point.PARAM_GATHER and not parallel.use_distributed_optimizer:
        return "every replica updates all parameters without --use-distributed-optimizer"
    if point in (Point.DP_GRAD, Point.PARAM_GATHER) and parallel.data_parallel_size(world_size) == 1:
        return "there is one replica"
    if point is Point.EMBED_GRAD and parallel.pipeline_model_parallel_size == 1:
        return "the embedding is on one pipeline stage only"
    if point is Point.EMBED_GRAD and parallel.in_v_form:
        return "with --pipeline-schedule zb-v, the first stage holds the embedding and the output layer"
    if point is Point.EMBED_GRAD and not (model.ties_embeddings or model.shares_distances):
        return "the embeddings are not tied"
    return ""
