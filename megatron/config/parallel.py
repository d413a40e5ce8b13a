"""The layout over processes, and how gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.option import derived, option

MOST_PROCESSES = 1 << 20
MOST_MINUTES = 60 * 24 * 366
"""Of waiting: what every library's clock can count."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Tensor, pipeline and data parallelism. The data-parallel size is what the world size leaves."""

    tensor_model_parallel_size: int = option(
        1, "Tensor-parallel size: processes that share each layer.", unit="processes", minimum=1, maximum=MOST_PROCESSES
    )
    pipeline_model_parallel_size: int = option(
        1, "Pipeline-parallel size: number of pipeline stages.", unit="stages", minimum=1, maximum=MOST_PROCESSES
    )
    num_layers_per_virtual_pipeline_stage: int | None = derived(
        "no interleaving",
        "Interleave: each stage holds several chunks of this many layers. Needs at least 2 stages.",
        unit="layers",
        minimum=1,
    )
    virtual_pipeline_model_parallel_size: int | None = derived(
        "no interleaving",
        "Interleave: the number of chunks each stage holds (the other way to say it).",
        unit="chunks",
        minimum=1,
    )
    pipeline_schedule: Literal["1f1b", "eager-1f1b", "gpipe"] = option(
        "1f1b",
        "Order of forward and backward passes. Interleaving is 1f1b with virtual stages; eager-1f1b hides messages "
        "over slow links behind twice the warm-up, for up to twice the activations.",
    )
    sequence_parallel: bool = option(
        False, "Split the sequence over the tensor-parallel processes outside attention and MLP."
    )
    async_tensor_model_parallel_allreduce: bool = option(
        True,
        "Do not overlap the tensor-parallel reduction of input gradients with the weight gradients.",
        flag="no-async-tensor-model-parallel-allreduce",
        off_switch=True,
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "Do not add weight gradients into the gradient buffers as they are computed.",
        flag="no-gradient-accumulation-fusion",
        off_switch=True,
        no_effect="autograd adds gradients into the buffers in place, without a fused kernel",
    )
    ddp_impl: Literal["local", "torch"] = option(
        "local",
        "Data parallelism: our contiguous buckets (local) or torch's DistributedDataParallel (torch).",
        flag="DDP-impl",
    )
    overlap_grad_reduce: bool = option(False, "Reduce gradients while backward goes on.")
    ddp_bucket_size: int | None = derived(
        "chosen from the model's size", "Size of a gradient bucket.", unit="elements", minimum=1
    )
    no_allreduce: bool = option(
        False, "Do not sum gradients over the replicas, to time a step without it; the replicas drift apart."
    )
    use_distributed_optimizer: bool = option(False, "Shard the optimizer state over the data-parallel processes.")
    accumulate_allreduce_grads_in_fp32: bool = option(
        False, "Accumulate and reduce gradients in fp32. Always on with --bf16."
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
        maximum=MOST_MINUTES,
    )
    peer_timeout_seconds: float = option(
        20.0,
        "How long a process may give no sign of life before the others take it for dead. Computing, compiling and "
        "waiting for disks are no silence; raise it to attach a debugger, which stops the whole process.",
        unit="seconds",
        minimum=3,
        maximum=86_400,
    )
    local_rank: int | None = derived(
        "LOCAL_RANK of the environment",
        "Number of this process on its node; launchers pass it.",
        minimum=0,
        maximum=MOST_PROCESSES,
        may_differ="it tells the processes of a machine apart",
    )

    def data_parallel_size(self, world_size: int) -> int:
        """Processes that hold the same shard and see different samples.

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
