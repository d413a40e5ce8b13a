"""Checks of the parallel layout and of the reduction of gradients."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.split import check_not_interleaved, check_split, split_rank
from megatron.config.virtual_stages import check_virtual_stages

SCHEDULES_WITHOUT_FLUSH = ("1f1b", "eager-1f1b")
"""Pipeline schedules that support --no-pipeline-flush."""


def check_layout(parallel: ParallelConfig, model: ModelConfig, world_size: int) -> None:
    """Check that ranks, layers, heads and the sequence are divisible by the layout; raise UserError otherwise."""
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    parallel.data_parallel_size(world_size)
    for size, flag in (
        (model.num_attention_heads, "--num-attention-heads"),
        (model.num_query_groups, "--num-query-groups"),
        (model.ffn_hidden_size, "--ffn-hidden-size"),
        (0 if parallel.folds_experts else model.moe_ffn_hidden_size or 0, "--moe-ffn-hidden-size"),
        (model.moe_shared_expert_intermediate_size or 0, "--moe-shared-expert-intermediate-size"),
    ):
        if size % tensor != 0:
            raise UserError(
                f"{flag} {size} is not a multiple of --tensor-model-parallel-size {tensor}; change one of them"
            )
    if parallel.pipeline_schedule == "auto" and (
        model.model_type == "deberta" or (model.model_type == "t5" and tensor > 1)
    ):
        raise UserError(
            f"--pipeline-schedule auto: in a {model.model_type} model a weight has gradients of backward and of weight "
            "passes, whose sum would depend on measured times; name a schedule"
        )
    check_not_interleaved(
        parallel.virtual_pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage, model
    )
    if parallel.sequence_parallel and model.model_type == "deberta" and model.conv_kernel_size:
        raise UserError(
            f"--sequence-parallel: a convolution of --conv-kernel-size {model.conv_kernel_size} needs neighbors that "
            "are on other ranks; leave the flag out"
        )
    _check_experts(parallel, model, world_size)
    split = split_rank(parallel.pipeline_model_parallel_split_rank, pipeline, model)
    if split is not None:
        check_split(split, pipeline, model)
    elif model.num_layers % pipeline != 0:
        raise UserError(
            f"--num-layers {model.num_layers} is not a multiple of --pipeline-model-parallel-size "
            f"{pipeline}; change one of them"
        )
    for flag, length in (("--seq-length", model.seq_length), ("--decoder-seq-length", model.labels_of(0))):
        if length % parallel.message_parts != 0:
            raise UserError(
                f"{parallel.splitting_flag}: {flag} {length} is not a multiple of --tensor-model-parallel-size "
                f"{tensor}; change one of them"
            )


def _check_experts(parallel: ParallelConfig, model: ModelConfig, world_size: int) -> None:
    ranks, holders = parallel.expert_model_parallel_size, parallel.data_parallel_size(world_size)
    if model.has_experts and parallel.ddp_impl == "torch":
        raise UserError("--DDP-impl torch does not support experts; use --DDP-impl local")
    flag, holder_kind = f"--expert-model-parallel-size {ranks}", "data-parallel processes"
    tensor, expert_tensor = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    # Experts are split like the other layers, or distributed whole over the tensor-parallel ranks.
    if model.has_experts and expert_tensor not in (None, 1, tensor):
        raise UserError(
            f"--expert-tensor-parallel-size {expert_tensor}: write 1, or leave it out for --tensor-model-parallel-size "
            f"{tensor}"
        )
    if model.has_experts and parallel.folds_experts and ranks % tensor != 0:
        raise UserError(
            f"--expert-tensor-parallel-size 1: {flag} is not a multiple of --tensor-model-parallel-size {tensor}, "
            "over whose processes experts are distributed; change one of them"
        )
    if ranks == 1:
        return
    if not model.has_experts:
        raise UserError(f"{flag}: no layer has experts; add --num-experts, or leave it out")
    if parallel.folds_experts:
        holders, holder_kind = holders * tensor, "tensor- and data-parallel processes"
    if holders % ranks != 0:
        raise UserError(
            f"{flag} does not divide the {holders} {holder_kind}, which share the experts; choose a divisor"
        )
    for count in model.expert_layers.values():
        if count % ranks != 0:
            raise UserError(
                f"{flag} does not divide the {count} experts of a layer (--num-experts); change one of them"
            )


def check_parallel(parallel: ParallelConfig, cuda_available: bool) -> None:
    """Check the backend and the schedule; raise UserError for contradictions. Derived values must be filled."""
    if parallel.distributed_backend == "nccl" and not cuda_available:
        raise UserError("--distributed-backend nccl needs CUDA, which is not available; use --distributed-backend gloo")
    stages, in_flight = parallel.pipeline_model_parallel_size, parallel.pipeline_max_in_flight
    if parallel.pipeline_schedule in ("eager-1f1b", "auto") and in_flight is not None and in_flight < stages:
        raise UserError(
            f"--pipeline-max-in-flight {in_flight}: give at least the {stages} stages, or leave it out; no schedule "
            "keeps all stages busy with fewer micro-batches"
        )
    check_virtual_stages(
        parallel.virtual_pipeline_model_parallel_size,
        parallel.num_layers_per_virtual_pipeline_stage,
        stages,
        parallel.pipeline_schedule,
    )


def check_delay(parallel: ParallelConfig, has_outer: bool, gathers_compressed: bool, clips_first: bool) -> None:
    """Check that --delay can be combined with the other settings; raise UserError otherwise.

    Args:
        parallel: resolved configuration.
        has_outer: the run has islands, or rounds of one island.
        gathers_compressed: updated parameters are gathered through a compressor.
        clips_first: replicas clip their gradients before a compressor sums them.
    """
    contradictions = (
        (parallel.ddp_impl == "torch", "--DDP-impl torch, which applies gradients at once; use --DDP-impl local"),
        (parallel.overlap_grad_reduce, "--overlap-grad-reduce, since it already overlaps more; leave that flag out"),
        (parallel.no_allreduce, "--no-allreduce, since there is nothing to wait for; leave one of them out"),
        (
            parallel.looks_ahead and gathers_compressed,
            "--delay-correction lookahead with a spec of param-gather, which sends differences of main values; "
            "leave one of them out",
        ),
        (
            parallel.delay_correction == "extrapolate" and clips_first,
            "--delay-correction extrapolate with a compressor that clips gradients before they are summed and "
            "extrapolated; leave one of them out, or give --clip-grad 0",
        ),
        (has_outer, "islands, whose rounds change the parameters in between; leave one of them out"),
    )
    for is_set, problem in contradictions if parallel.delay else ():
        if is_set:
            raise UserError(f"--delay {parallel.delay} cannot be combined with {problem}")


def check_flush(parallel: ParallelConfig, has_experts: bool, has_epilogue: bool) -> None:
    """Check that --no-pipeline-flush can be combined with the other settings; raise UserError otherwise.

    Args:
        parallel: resolved configuration.
        has_experts: layers have experts.
        has_epilogue: a compressor is active in epilogues only.
    """
    contradictions = (
        (
            parallel.pipeline_schedule not in SCHEDULES_WITHOUT_FLUSH,
            f"--pipeline-schedule {parallel.pipeline_schedule}; use {' or '.join(SCHEDULES_WITHOUT_FLUSH)}",
        ),
        (
            bool(parallel.virtual_pipeline_model_parallel_size or parallel.num_layers_per_virtual_pipeline_stage),
            "virtual stages; leave one of them out",
        ),
        (has_experts, "experts; leave one of them out"),
        (
            has_epilogue,
            "when=epilogue, since no message is in an epilogue; leave one of them out",
        ),
        (
            parallel.distributed_backend == "nccl",
            "NCCL, under which a pipeline posts receives step by step; use --distributed-backend gloo",
        ),
    )
    for is_set, problem in contradictions if parallel.overlaps_steps else ():
        if is_set:
            raise UserError(f"--no-pipeline-flush cannot be combined with {problem}")


def check_torch_ddp(parallel: ParallelConfig, precision: PrecisionConfig) -> None:
    """Check that --DDP-impl torch supports the other settings; raise UserError otherwise."""
    if parallel.ddp_impl != "torch":
        return
    contradictions = (
        (parallel.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size above 1"),
        (parallel.accumulate_allreduce_grads_in_fp32, "--accumulate-allreduce-grads-in-fp32"),
        (parallel.use_distributed_optimizer, "--use-distributed-optimizer"),
        (precision.fp16, "--fp16"),
        (precision.bf16, "--bf16"),
    )
    for is_set, flag in contradictions:
        if is_set:
            raise UserError(f"--DDP-impl torch cannot be combined with {flag}; use --DDP-impl local")
