"""Parallel layout and gradient reduction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.option import Condition, derived, is_unset, option
from megatron.base.user_text import Note
from megatron.config.conditions import EXPERTS, HALF_PRECISION, SEVERAL_PROCESSES, unless, when
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.split import split_rank
from megatron.config.virtual_stages import resolve_v_form, resolve_virtual_stages

MAX_PROCESSES = 1 << 20
MAX_MINUTES = 60 * 24 * 366
"""Maximum time-out, within the range of the clocks of all libraries."""


_STAGES = Condition(lambda run, _: run.parallel.pipeline_model_parallel_size > 1, "there is one pipeline stage")
_TENSOR_RANKS = Condition(
    lambda run, _: run.parallel.tensor_model_parallel_size > 1, "there is one tensor-parallel rank"
)
_REPLICAS = Condition(lambda run, world_size: run.parallel.data_parallel_size(world_size) > 1, "there is one replica")
_BUCKETS = Condition(lambda run, _: run.parallel.ddp_impl == "local", "with --DDP-impl torch, which has its own")
_SPREAD_EXPERTS = Condition(
    lambda run, _: run.parallel.expert_model_parallel_size > 1,
    "every replica holds all experts (--expert-model-parallel-size)",
)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Tensor, pipeline and data parallelism. The data-parallel size follows from the world size."""

    tensor_model_parallel_size: int = option(
        1,
        "Tensor-parallel size: number of processes that share each layer.",
        unit="processes",
        minimum=1,
        maximum=MAX_PROCESSES,
        common="layout",
    )
    pipeline_model_parallel_size: int = option(
        1,
        "Pipeline-parallel size: number of pipeline stages.",
        unit="stages",
        minimum=1,
        maximum=MAX_PROCESSES,
        common="layout",
    )
    pipeline_model_parallel_split_rank: int | None = derived(
        "in the middle",
        "First pipeline stage of T5's decoder; the stages before it hold the encoder.",
        unit="stages",
        minimum=0,
        only_if=(when("model.model_type", "t5"), _STAGES),
    )
    num_layers_per_virtual_pipeline_stage: int | None = derived(
        "no interleaving",
        "Interleaving: each stage holds several chunks of this many layers. Needs at least 2 stages.",
        unit="layers",
        minimum=1,
        common="layout",
    )
    virtual_pipeline_model_parallel_size: int | None = derived(
        "no interleaving",
        "Interleaving: number of chunks per stage, instead of --num-layers-per-virtual-pipeline-stage.",
        unit="chunks",
        minimum=1,
    )
    pipeline_schedule: Literal["1f1b", "eager-1f1b", "zb-h1", "zb-v", "gpipe", "auto"] = option(
        "1f1b",
        "Order of forward and backward passes. With virtual stages, 1f1b is interleaved; eager-1f1b hides "
        "messages over slow links behind twice the warm-up, for up to twice the activations; zb-h1 computes "
        "weight gradients separately, while a stage would otherwise wait (zero bubble, Qi et al. 2024); zb-v "
        "does so with two chunks of layers per stage, the second ones in reverse order, waits half as long, and "
        "sends twice the messages; auto measures passes and messages in the first steps, and uses the order that "
        "is fastest for them.",
        only_if=(_STAGES,),
        common="layout",
    )
    pipeline_cluster: str | None = derived(
        "the first steps are measured",
        "With --pipeline-schedule auto: file that describes the cluster (see tools/plan.py --cluster). The run then "
        "starts with the order that is fastest by the planner's times for it.",
        metavar="FILE",
        contents="file",
        only_if=(_STAGES, when("parallel.pipeline_schedule", "auto")),
    )
    pipeline_max_in_flight: int | None = derived(
        "2 x stages - 1",
        "With --pipeline-schedule eager-1f1b or auto: maximum number of micro-batches in flight on a stage, "
        "between their forward and their last pass. Larger values take more memory and hide slower messages.",
        unit="micro-batches",
        minimum=1,
        only_if=(_STAGES, when("parallel.pipeline_schedule", "eager-1f1b", "auto")),
    )
    pipeline_max_weight_records: int | None = derived(
        "as many as the schedule takes",
        "With --pipeline-schedule zb-h1, zb-v or auto: maximum number of backward passes of a stage whose weight "
        "gradients are still to be computed. Smaller values take less memory, and stages wait more.",
        unit="passes",
        minimum=1,
        only_if=(_STAGES, when("parallel.pipeline_schedule", "zb-h1", "zb-v", "auto")),
    )
    expert_model_parallel_size: int = option(
        1,
        "Expert-parallel size: number of data-parallel processes that share the experts of each layer, and send "
        "each other the tokens for them.",
        unit="processes",
        minimum=1,
        maximum=MAX_PROCESSES,
        aliases=("moe-expert-parallel-size", "ep-world-size"),
        common="experts",
    )
    expert_tensor_parallel_size: int | None = derived(
        "--tensor-model-parallel-size",
        "Tensor-parallel size of the experts. 1: each tensor-parallel process holds whole experts, and "
        "dispatches its share of the tokens; --expert-model-parallel-size then counts tensor-parallel processes, "
        "too.",
        unit="processes",
        minimum=1,
        maximum=MAX_PROCESSES,
        only_if=(EXPERTS,),
    )
    moe_two_stage: Literal["auto", "on", "off"] = option(
        "auto",
        "Send each token to a node only once, whatever experts it has there; ranks of the node forward it, and "
        "sum the outputs of its experts there. auto: if nodes hold several expert-parallel ranks; on: also if "
        "they hold only one, so that a token is sent once for all of its experts on that rank; off: send it to "
        "each expert.",
        only_if=(_SPREAD_EXPERTS,),
    )
    sequence_parallel: bool = option(
        False, "Split the sequence over the tensor-parallel processes outside attention and MLPs.", common="layout"
    )
    scatter_gather_tensors_in_pipeline: bool = option(
        False,
        "Split each pipeline message over the tensor-parallel processes: each sends its part of the sequence, "
        "and the receiving stage gathers the parts.",
        only_if=(_STAGES, _TENSOR_RANKS, unless("parallel.sequence_parallel")),
    )
    async_tensor_model_parallel_allreduce: bool = option(
        True,
        "Do not overlap the tensor-parallel all-reduce of input gradients with the computation of weight gradients.",
        flag="no-async-tensor-model-parallel-allreduce",
        off_switch=True,
        only_if=(_TENSOR_RANKS,),
    )
    ddp_impl: Literal["local", "torch"] = option(
        "local",
        "Data parallelism: our contiguous buckets (local) or torch's DistributedDataParallel (torch).",
        flag="DDP-impl",
    )
    overlap_grad_reduce: bool = option(
        False,
        "Overlap gradient reduction with the backward pass.",
        only_if=(_REPLICAS, _BUCKETS),
        common="layout",
    )
    delay: int = option(
        0,
        "1: apply every gradient one step late, so that its reduction over replicas overlaps with the next "
        "step's computation: theta_{t+1} = theta_t - lr U(g(theta_{t-1})). Changes training; --optimizer muon "
        "tolerates it best. 0: apply gradients at once.",
        unit="steps",
        minimum=0,
        maximum=1,
    )
    delay_correction: Literal["none", "lookahead", "extrapolate"] = option(
        "none",
        "Correction of delayed gradients. lookahead: compute them where repeating the last update would lead, "
        "theta + strength (theta - theta_before); evaluations use theta. extrapolate: apply g + strength (g - "
        "g_before).",
        only_if=(when("parallel.delay", 1),),
    )
    delay_strength: float = option(
        1.0,
        "Strength of --delay-correction; values below 1 damp it.",
        above=0,
        maximum=1,
        only_if=(when("parallel.delay", 1), when("parallel.delay_correction", "lookahead", "extrapolate")),
    )
    no_pipeline_flush: bool = option(
        False,
        "Run the last backward passes of a step between the first forward passes of the next, so that no stage "
        "waits while the pipeline fills and drains (PipeDream-2BW). Takes two more copies of the parameters. "
        "Losses are logged one step late.",
        only_if=(_STAGES, when("parallel.delay", 1)),
    )
    ddp_bucket_size: int | None = derived(
        "chosen from the model's size",
        "Size of a gradient bucket.",
        unit="elements",
        minimum=1,
        only_if=(_BUCKETS,),
    )
    no_allreduce: bool = option(
        False,
        "Do not all-reduce gradients over the data-parallel group, to time a step without the all-reduce; "
        "replicas diverge.",
        only_if=(_REPLICAS,),
    )
    use_distributed_optimizer: bool = option(
        False, "Shard the optimizer state over the data-parallel processes.", only_if=(_REPLICAS,), common="layout"
    )
    accumulate_allreduce_grads_in_fp32: bool = option(
        False,
        "Accumulate and reduce gradients in fp32. Always on with --bf16.",
        only_if=(HALF_PRECISION,),
    )
    distributed_backend: Literal["nccl", "gloo"] = derived(
        "nccl when CUDA is there, else gloo",
        "Communication library.",
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "How long a process waits for its peers before it gives up.",
        unit="minutes",
        minimum=0.01,
        maximum=MAX_MINUTES,
        only_if=(SEVERAL_PROCESSES,),
    )
    peer_timeout_seconds: float = option(
        20.0,
        "How long a process may send no heartbeat before the others consider it dead. Heartbeats continue while "
        "it computes, compiles or waits for a disk; raise the limit to attach a debugger, which stops the whole "
        "process.",
        unit="seconds",
        minimum=3,
        maximum=86_400,
        only_if=(SEVERAL_PROCESSES,),
    )
    local_rank: int | None = derived(
        "LOCAL_RANK of the environment",
        "Rank of this process on its node; launchers set it.",
        minimum=0,
        maximum=MAX_PROCESSES,
        may_differ="it tells the processes of a machine apart",
    )

    @property
    def in_v_form(self) -> bool:
        """Whether each stage holds two chunks, in V form: the first stage also holds the model's last layers."""
        return self.pipeline_schedule == "zb-v" and self.pipeline_model_parallel_size > 1

    @property
    def folds_experts(self) -> bool:
        """Whether tensor-parallel ranks hold whole experts, while other layers are sharded over them."""
        return self.tensor_model_parallel_size > 1 and self.expert_tensor_parallel_size == 1

    @property
    def overlaps_reduction(self) -> bool:
        """Whether gradients are reduced during computation, bucket by bucket."""
        return self.overlap_grad_reduce or self.delay > 0

    @property
    def looks_ahead(self) -> bool:
        """Whether gradients are computed ahead of the parameters."""
        return self.delay > 0 and self.delay_correction == "lookahead"

    @property
    def overlaps_steps(self) -> bool:
        """Whether passes of two steps interleave, so that the pipeline is not flushed."""
        return self.no_pipeline_flush and self.delay > 0 and self.pipeline_model_parallel_size > 1

    @property
    def splits_messages(self) -> bool:
        """Whether pipeline messages are scattered over the tensor-parallel ranks and gathered by the next stage."""
        tensor_and_pipeline = self.tensor_model_parallel_size > 1 and self.pipeline_model_parallel_size > 1
        return self.scatter_gather_tensors_in_pipeline and tensor_and_pipeline and not self.sequence_parallel

    @property
    def message_parts(self) -> int:
        """Number of sequence chunks sent to the next stage, each by a tensor-parallel rank."""
        return self.tensor_model_parallel_size if self.sequence_parallel or self.splits_messages else 1

    @property
    def splitting_flag(self) -> str:
        """Flag that splits sequences."""
        return "--sequence-parallel" if self.sequence_parallel else "--scatter-gather-tensors-in-pipeline"

    def data_parallel_size(self, world_size: int) -> int:
        """Number of ranks that hold the same shard and see different samples.

        Raises UserError when the tensor- and pipeline-parallel sizes do not divide `world_size`.
        """
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if world_size % (tensor * pipeline) != 0:
            raise UserError(
                f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} = "
                f"{tensor * pipeline} does not divide the {world_size} processes; start a multiple of "
                f"{tensor * pipeline} processes or lower one of the two"
            )
        return world_size // (tensor * pipeline)


def resolve_parallel(
    parallel: ParallelConfig, model: ModelConfig, precision: PrecisionConfig, cuda_available: bool, note: Note
) -> ParallelConfig:
    """Fill every derived value. Raises UserError if that is impossible."""
    if precision.bf16 and not parallel.accumulate_allreduce_grads_in_fp32:
        if parallel.ddp_impl == "torch":
            raise UserError(
                "--DDP-impl torch cannot accumulate gradients in fp32, which --bf16 needs; use --DDP-impl local"
            )
        note("--bf16 turns --accumulate-allreduce-grads-in-fp32 on")
        parallel = replace(parallel, accumulate_allreduce_grads_in_fp32=True)
    if is_unset(parallel.distributed_backend):
        parallel = replace(parallel, distributed_backend="nccl" if cuda_available else "gloo")
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        note("--sequence-parallel: no effect, there is one tensor-parallel rank")
        parallel = replace(parallel, sequence_parallel=False)
    pipeline = parallel.pipeline_model_parallel_size
    if model.decoder_layers:
        split = split_rank(parallel.pipeline_model_parallel_split_rank, pipeline, model)
        parallel = replace(parallel, pipeline_model_parallel_split_rank=split)
    resolve = resolve_v_form if parallel.in_v_form else resolve_virtual_stages
    chunks, per_chunk = resolve(
        parallel.virtual_pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage, pipeline, model
    )
    return replace(
        parallel, virtual_pipeline_model_parallel_size=chunks, num_layers_per_virtual_pipeline_stage=per_chunk
    )
