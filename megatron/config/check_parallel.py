"""Checks of the layout against the model, the number format and the number of processes."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.config.run import RunConfig


def check_layout(config: RunConfig, world_size: int) -> None:
    """Raise UserError when processes, layers, heads or the sequence cannot be divided as asked."""
    model, parallel = config.model, config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    parallel.data_parallel_size(world_size)
    for size, flag in (
        (model.num_attention_heads, "--num-attention-heads"),
        (model.num_query_groups, "--num-query-groups"),
        (model.ffn_hidden_size, "--ffn-hidden-size"),
    ):
        if size % tensor != 0:
            raise UserError(
                f"{flag} {size} is not a multiple of --tensor-model-parallel-size {tensor}; change one of them"
            )
    if model.num_layers % pipeline != 0:
        raise UserError(
            f"--num-layers {model.num_layers} is not a multiple of --pipeline-model-parallel-size "
            f"{pipeline}; change one of them"
        )
    if parallel.sequence_parallel and model.seq_length % tensor != 0:
        raise UserError(
            f"--sequence-parallel: --seq-length {model.seq_length} is not a multiple of "
            f"--tensor-model-parallel-size {tensor}; change one of them"
        )


def check_parallel(config: RunConfig, cuda_available: bool) -> None:
    """Raise UserError for engines that do not go together. Expects derived values to be filled."""
    parallel = config.parallel
    if parallel.distributed_backend == "nccl" and not cuda_available:
        raise UserError("--distributed-backend nccl needs CUDA, which is not there; use --distributed-backend gloo")
    _check_interleaving(config)
    _check_recompute(config)
    _check_compile(config)
    if parallel.ddp_impl == "torch":
        _check_torch_ddp(config)


def _check_interleaving(config: RunConfig) -> None:
    parallel = config.parallel
    chunks, stages = parallel.virtual_pipeline_model_parallel_size, parallel.pipeline_model_parallel_size
    if chunks is None:
        return
    flag = (
        f"--num-layers-per-virtual-pipeline-stage {parallel.num_layers_per_virtual_pipeline_stage} "
        f"(--virtual-pipeline-model-parallel-size {chunks})"
    )
    if stages < 2:
        raise UserError(f"{flag} needs --pipeline-model-parallel-size of at least 2; raise it or leave the flag out")
    if parallel.pipeline_schedule != "1f1b":
        raise UserError(
            f"{flag} needs --pipeline-schedule 1f1b, not {parallel.pipeline_schedule}; change it or leave the flag out"
        )
    if chunks < 2:
        raise UserError(f"{flag} leaves one chunk in each stage; choose fewer layers or leave the flag out")


def _check_recompute(config: RunConfig) -> None:
    recompute = config.recompute
    if recompute.recompute_granularity != "full":
        if recompute.recompute_method is not None:
            raise UserError(
                f"--recompute-method {recompute.recompute_method} needs --recompute-granularity full; add it "
                "or leave the method out"
            )
        if recompute.recompute_num_layers != 1:
            raise UserError(
                f"--recompute-num-layers {recompute.recompute_num_layers} needs --recompute-granularity "
                "full; add it or leave the number out"
            )
        return
    chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
    layers = config.model.num_layers // config.parallel.pipeline_model_parallel_size // chunks
    if recompute.recompute_num_layers > layers:
        raise UserError(
            f"--recompute-num-layers {recompute.recompute_num_layers} is more than the {layers} layers that "
            f"a pipeline stage or chunk holds; choose at most {layers}"
        )


def why_not_compiled(config: RunConfig) -> str | None:
    """Why torch.compile cannot take this run's layers, and what to do; None where it can."""
    tensor = config.parallel.tensor_model_parallel_size
    if tensor > 1:
        return (
            f"layers that are split over --tensor-model-parallel-size {tensor} ranks exchange sums, which are not "
            "compiled; leave the flag out, or split the model otherwise"
        )
    if config.parallel.distributed_backend == "nccl" and config.model.attention_dropout > 0:
        return (
            f"--attention-dropout {config.model.attention_dropout:g} seeds a fused CUDA kernel, which is not compiled; "
            "add --attention-dropout 0 or leave the flag out"
        )
    if config.training.deterministic_mode:
        return "compiled layers may add in another order than --deterministic-mode promises; leave one of them out"
    return None


def _check_compile(config: RunConfig) -> None:
    why = why_not_compiled(config)
    if config.training.compile == "on" and why is not None:
        raise UserError(f"--compile on: {why}")


def _check_torch_ddp(config: RunConfig) -> None:
    parallel = config.parallel
    contradictions = (
        (parallel.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size above 1"),
        (parallel.accumulate_allreduce_grads_in_fp32, "--accumulate-allreduce-grads-in-fp32"),
        (parallel.use_distributed_optimizer, "--use-distributed-optimizer"),
        (config.precision.fp16, "--fp16"),
        (config.precision.bf16, "--bf16"),
    )
    for holds, what in contradictions:
        if holds:
            raise UserError(f"--DDP-impl torch does not go with {what}; use --DDP-impl local")
