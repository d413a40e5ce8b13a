"""Choices of the planner: layout, schedule and compressors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from megatron.base.errors import UserError
from megatron.compression.points import Point
from megatron.config.check_parallel import SCHEDULES_WITHOUT_FLUSH
from megatron.config.islands import IslandsConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.distributed.layout import Layout
from megatron.parallel.pipeline.list_schedule import AUTO
from megatron.parallel.pipeline.schedule import ZERO_BUBBLE_V, has_weight_passes

NOT_PLANNED = ("t5", "deberta")
"""Types of models that the planner does not support."""


@dataclass(frozen=True)
class Choice:
    """A way to run a model on a cluster.

    Args:
        tp, pp, dp: tensor-, pipeline- and data-parallel sizes.
        ep: expert-parallel size; it divides the number of replicas.
        folded: whether tensor-parallel ranks join the expert-parallel group instead of splitting experts; ``ep`` then
            divides ``tp * dp``.
        chunks: virtual stages on each pipeline rank.
        schedule: 1f1b, eager-1f1b, zb-h1, zb-v (with two chunks), gpipe or auto.
        micro_batch: sequences per micro-batch.
        micro_batches: micro-batches per replica and step.
        sequence_parallel: whether activations between tensor-parallel regions are split along the sequence.
        recompute: activation recomputation.
        sharded: whether the optimizer's state is split over the replicas.
        overlap: whether gradient reduction overlaps with backward.
        delay: steps by which gradients are applied late, so that their reduction overlaps with the next step.
        flush: whether a pipeline drains at the end of each step; otherwise passes of two steps take turns.
        specs: specs of ``--compress``.
        islands: number of islands, each with this layout.
        two_stage: --moe-two-stage.
    """

    tp: int
    pp: int
    dp: int
    ep: int = 1
    chunks: int = 1
    schedule: Literal["1f1b", "eager-1f1b", "zb-h1", "zb-v", "gpipe", "auto"] = "1f1b"
    micro_batch: int = 1
    micro_batches: int = 1
    sequence_parallel: bool = False
    recompute: RecomputeConfig = dataclasses.field(default_factory=RecomputeConfig)
    sharded: bool = False
    overlap: bool = False
    delay: int = 0
    flush: bool = True
    specs: tuple[str, ...] = ()
    islands: int = 1
    folded: bool = False
    two_stage: Literal["auto", "on", "off"] = "auto"

    @property
    def world_size(self) -> int:
        """Number of ranks of an island."""
        return self.tp * self.pp * self.dp

    @property
    def outer_spec(self) -> str:
        """The spec of the point ``outer``; empty without islands."""
        outer_specs = (spec for spec in self.specs if spec.startswith(f"{Point.OUTER.value}="))
        return next(outer_specs, "") if self.islands > 1 else ""

    @property
    def layout(self) -> tuple[int, int, int]:
        """Tensor-, pipeline- and data-parallel sizes."""
        return self.tp, self.pp, self.dp

    @property
    def overlaps_reduction(self) -> bool:
        """Whether gradients are reduced beside computation, bucket by bucket."""
        return self.overlap or self.delay > 0

    @property
    def can_overlap_steps(self) -> bool:
        """Whether passes of two steps can take turns, with a delay."""
        return self.pp > 1 and self.delay > 0 and self.chunks == 1 and self.schedule in SCHEDULES_WITHOUT_FLUSH

    @property
    def has_weight_passes(self) -> bool:
        """Whether ranks compute weight gradients separately, or may do so."""
        return has_weight_passes(self.schedule, self.flush, self.tp)

    @property
    def expert_ranks(self) -> int:
        """Number of ranks of a stage that together hold each expert once."""
        return self.ep if self.folded else self.tp * self.ep

    @property
    def expert_dp(self) -> int:
        """Size of the expert data-parallel group: ranks that hold equal experts, or equal parts of them."""
        return self.tp * self.dp // self.expert_ranks

    @property
    def mesh(self) -> Layout:
        """The mesh of ranks, without virtual stages."""
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep, folded=self.folded)

    @property
    def in_v_form(self) -> bool:
        """Whether the virtual stages are placed in V form."""
        return self.schedule == ZERO_BUBBLE_V and self.pp > 1

    @property
    def placement(self) -> Layout:
        """Places of the virtual stages on the pipeline ranks."""
        return Layout(pp=self.pp, chunks=self.chunks, v_shaped=self.in_v_form)

    @property
    def message_boundaries(self) -> list[int]:
        """Boundaries between virtual stages of different pipeline ranks."""
        placement = self.placement
        return [boundary for boundary in range(placement.num_virtual_stages - 1) if placement.crosses(boundary)]

    def link_of(self, boundary: int) -> int:
        """The rank whose link to the next rank (cyclic) a boundary's messages use, in either direction."""
        first, second = self.placement.ends_of(boundary, forward=True)
        return first if (first + 1) % self.pp == second else second

    @property
    def splits_tie(self) -> bool:
        """Whether different pipeline ranks hold the embedding and the output layer, with copies of a tied embedding."""
        return bool(self.placement.ties)

    def message_parts(self, config: RunConfig) -> int:
        """Number of sequence parts in a pipeline message, each sent by a tensor-parallel rank."""
        return self.configure(config).parallel.message_parts

    def configure(self, config: RunConfig) -> RunConfig:
        """Return the configuration with this choice applied, unresolved."""
        seconds = config.islands.islands_timeout_seconds
        islands = IslandsConfig(islands=self.islands, islands_timeout_seconds=seconds)
        return dataclasses.replace(
            config,
            parallel=dataclasses.replace(
                config.parallel,
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                expert_model_parallel_size=self.ep,
                expert_tensor_parallel_size=1 if self.folded else None,
                virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
                num_layers_per_virtual_pipeline_stage=None,
                pipeline_schedule=self.schedule,
                pipeline_cluster=config.parallel.pipeline_cluster if self.schedule == AUTO else None,
                sequence_parallel=self.sequence_parallel,
                use_distributed_optimizer=self.sharded,
                overlap_grad_reduce=self.overlap,
                delay=self.delay,
                no_pipeline_flush=not self.flush,
                moe_two_stage=self.two_stage,
            ),
            recompute=self.recompute,
            training=dataclasses.replace(config.training, micro_batch_size=self.micro_batch),
            compression=dataclasses.replace(config.compression, compress=list(self.specs)),
            islands=config.islands if config.islands.islands == self.islands else islands,
        )

    def resolve(self, config: RunConfig) -> RunConfig:
        """Return the configuration of the first island with this choice applied, resolved.

        Raises:
            UserError: when training would reject it.
        """
        # The target is the cluster, regardless of this machine's devices.
        return configure_first_island(self.configure(config)).resolve(self.world_size, cuda_available=True)


def configure_first_island(config: RunConfig) -> RunConfig:
    """Configure a run like the launcher does for the first of several islands."""
    islands_config = config.islands
    if not islands_config.several:
        return config
    address = islands_config.islands_address or "localhost:29600"
    return dataclasses.replace(config, islands=dataclasses.replace(islands_config, island=0, islands_address=address))


def resolve_for_planning(config: RunConfig, gpus: int) -> RunConfig:
    """Resolve the configuration for ``gpus`` devices.

    Raises:
        UserError: when training or the planner would reject it on these devices.
    """
    # The target is the cluster, regardless of this machine's devices.
    resolved = configure_first_island(config).resolve(gpus // config.islands.islands, cuda_available=True)
    recompute = resolved.recompute
    if recompute.recompute_granularity == "full" and (
        recompute.recompute_method == "block" or recompute.recompute_num_layers != 1
    ):
        raise UserError(
            "--recompute-method block and --recompute-num-layers are not planned; plan uniform with 1 layer, "
            "which keeps the input of each layer"
        )
    return resolved


def check_planned(config: RunConfig, gpus: int, flag: str, remedy: str) -> None:
    """Check that a run that needs predictions can be predicted.

    Args:
        config: resolved configuration.
        gpus: number of devices.
        flag: the flag that needs predictions.
        remedy: alternative to the flag.

    Raises:
        UserError: when it cannot.
    """
    if config.model.model_type in NOT_PLANNED:
        raise UserError(f"{flag}: the planner does not know {config.model.model_type} models; {remedy}")
    try:
        resolve_for_planning(config, gpus)
    except UserError as error:
        raise UserError(f"{flag}: cannot predict this run ({error}); {remedy}") from error


def make_choice(config: RunConfig, devices: int) -> Choice:
    """Make the choice of a resolved configuration on ``devices`` devices, which islands share."""
    parallel, training, islands = config.parallel, config.training, config.islands.islands
    dp = parallel.data_parallel_size(devices // islands)
    return Choice(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        dp=dp,
        ep=parallel.expert_model_parallel_size,
        chunks=parallel.virtual_pipeline_model_parallel_size or 1,
        schedule=parallel.pipeline_schedule,
        micro_batch=training.micro_batch_size,
        micro_batches=training.global_batch_size // (islands * dp * training.micro_batch_size),
        sequence_parallel=parallel.sequence_parallel,
        recompute=config.recompute,
        sharded=parallel.use_distributed_optimizer and dp > 1,
        overlap=parallel.overlap_grad_reduce and dp > 1,
        delay=parallel.delay,
        flush=not parallel.overlaps_steps,
        specs=tuple(config.compression.spec_texts),
        islands=islands,
        folded=parallel.folds_experts and config.model.has_experts,
        two_stage=parallel.moe_two_stage,
    )
