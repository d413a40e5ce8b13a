"""Optimizer step for every precision and layout: unscale, check, clip, update, all-gather."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.compression.points import Point
from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.kernels.ops import sum_of_squares
from megatron.optimizer.frozen_adam import freeze, set_steps_taken, step_frozen, steps_taken
from megatron.optimizer.inner import make_inner, set_hyperparameters, step_inner
from megatron.optimizer.loss_scale import LossScale
from megatron.optimizer.matrix_gather import MatrixGather
from megatron.optimizer.norm_reducer import ParamNormReducer
from megatron.optimizer.step_summary import NO_VOTES, StepSummary, StopVotes
from megatron.optimizer.update_direction import begin_directions, end_directions
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.data.delay_correction import LookAhead
from megatron.parallel.data.gradient_sync import ReducedGradients
from megatron.parallel.data.param_gather import ParamAllGather
from megatron.parallel.data.param_shards import make_local_shards
from megatron.parallel.data.sync_warmup import SyncWarmup, no_sync_warmup


@dataclass(frozen=True)
class StepTotals:
    """Totals of a training step over all ranks, and its outcome; equal on every rank.

    Args:
        losses: mean of each loss in nats, by name; zero for a loss without items.
        counted: number of items in all losses together.
        grad_sq: sum of squares of the applied gradients of the whole model, with their loss scale.
        params_sq: sum of squares of the parameters; None unless requested.
        num_zeros: number of zero elements in the gradients; None unless requested.
        votes: requests of all ranks to stop.
        loss_scale: loss scale of the step.
        grad_norm: global L2 norm of the applied gradients, unscaled and before clipping; None if no update was taken,
            because gradients are not finite, the losses have no items, or there are no delayed gradients yet.
        finite: whether all gradients are finite, those of this step and those to apply.
        new_finite: whether the gradients of this step are finite.
        scale_can_fall: whether the loss scale can be reduced to make gradients finite.
    """

    losses: Mapping[str, float]
    counted: float
    grad_sq: float
    params_sq: float | None
    num_zeros: float | None
    votes: StopVotes
    loss_scale: float
    grad_norm: float | None = None
    finite: bool = True
    new_finite: bool = True
    scale_can_fall: bool = False

    @property
    def params_norm(self) -> float | None:
        return None if self.params_sq is None else math.sqrt(self.params_sq)

    @property
    def skipped(self) -> bool:
        """Whether gradients are not finite, or the losses have no items."""
        return not self.finite or not self.counted

    @property
    def usable(self) -> bool:
        """Whether this step's gradients may be applied."""
        return self.new_finite and bool(self.counted)


class Optimizer:
    """Optimizer of the parameters of this rank's chunks.

    Args:
        buffers: buffers of the chunks.
        topology: the mesh.
        config: algorithm and hyper-parameters.
        loss_scale: constant loss scale, or dynamic loss scale for fp16.
        plan: plan with the compressor of the parameter all-gather.
        ledger: ledger that counts the bytes.
        sharded: whether every data-parallel rank updates only its share (``--use-distributed-optimizer``).
        log_params_norm, log_num_zeros: whether to compute these totals.
        sync_warmup: synchronous steps of all islands.
        look_ahead: strength of the look-ahead of delayed gradients; None for no look-ahead.

    ``frozen_at`` is the number of updates before Adam's second moments were frozen; 0 if they are not frozen.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        topology: Topology,
        config: OptimizerConfig,
        loss_scale: LossScale,
        plan: CompressionPlan,
        ledger: Ledger,
        *,
        sharded: bool,
        log_params_norm: bool = False,
        log_num_zeros: bool = False,
        sync_warmup: SyncWarmup | None = None,
        look_ahead: float | None = None,
    ) -> None:
        self.sync_warmup = no_sync_warmup() if sync_warmup is None else sync_warmup
        self.buffers = buffers
        self.topology = topology
        self.config = config
        self.loss_scale = loss_scale
        self.ledger = ledger
        self.sharded = sharded and topology.dp.size > 1
        self.log_params_norm = log_params_norm
        self.log_num_zeros = log_num_zeros
        # If any stage gathers parameters through a compressor, the main values of all stages have separate memory,
        # because a checkpoint holds all main values or none.
        separate = look_ahead is not None or (self.sharded and plan.is_compressed(Point.PARAM_GATHER))
        self.shards = make_local_shards(buffers, self.sharded, separate)
        ahead = None if look_ahead is None else LookAhead(self.shards, look_ahead)
        self.publisher = ParamAllGather(buffers, self.shards, plan, ledger, self.sharded, ahead)
        self.norms = ParamNormReducer(self.shards, buffers, topology.tp, self.sharded, ledger)
        matrices = MatrixGather(self.shards, buffers, topology.tp, self.sharded, ledger)
        self.inner = make_inner(self.shards, config, self.norms, matrices)
        self.frozen_at = 0

    @property
    def steps(self) -> int:
        """Number of updates taken so far."""
        return steps_taken(self.inner, self.shards)

    @steps.setter
    def steps(self, count: int) -> None:
        set_steps_taken(self.inner, self.shards, count)

    @property
    def separate_main(self) -> bool:
        """Whether main parameters have separate memory from the model's parameters."""
        return self.publisher.separate_main

    def summarize(
        self, completed: StepSummary, gradients: ReducedGradients | None, votes: StopVotes = NO_VOTES
    ) -> StepSummary:
        """Add the numbers of the gradients to apply, and the votes, to this rank's numbers of a step.

        Args:
            completed: losses of a step and, if a later step applies its gradients, whether they are finite.
            gradients: properties of the gradients to apply; None if there are no delayed gradients yet.
            votes: this rank's requests to stop.

        Returns:
            This rank's numbers; ``step`` takes their sums over all ranks.
        """
        counted_shards = [shard for shard in self.shards if shard.counts_in_norm(self.topology.tp.rank)]
        counted_grads = [] if gradients is None else [shard.grad for shard in counted_shards]
        num_zeros = 0.0
        if self.log_num_zeros and counted_grads:  # with a single synchronization of the device
            num_zeros = float(torch.stack([(grad == 0).sum() for grad in counted_grads]).sum())
        return replace(
            completed,
            votes=votes,
            grad_sq=sum_of_squares(counted_grads),
            params_sq=sum_of_squares([shard.main for shard in counted_shards]) if self.log_params_norm else 0.0,
            num_zeros=num_zeros,
        )

    def step(
        self,
        summary: StepSummary,
        gradients: ReducedGradients | None,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        *,
        delayed: bool = False,
    ) -> StepTotals:
        """Take a step with the reduced gradients.

        If a compressor needs the update, its direction replaces the gradients: the amount subtracted from the
        parameters, including weight decay, divided by the learning rate. It is defined for learning rate 0, too.

        Args:
            summary: sums of ``summarize`` over all ranks.
            gradients: properties of the gradients; None if there are no delayed gradients yet.
            lr, weight_decay: learning rate and weight decay of this step.
            decoupled_lr: learning rate of input embeddings and the output layer; ``lr`` if None.
            delayed: whether the gradients are those of an earlier step.
        """
        totals = StepTotals(
            summary.mean_losses,
            summary.counted,
            summary.grad_sq,
            summary.params_sq if self.log_params_norm else None,
            summary.num_zeros if self.log_num_zeros else None,
            summary.votes,
            self.loss_scale.scale,
        )
        can_apply = gradients is not None and gradients.finite and math.isfinite(totals.grad_sq)
        new_is_finite = not summary.not_finite if delayed else can_apply
        finite = new_is_finite and (gradients is None or can_apply)
        totals = replace(totals, finite=finite, new_finite=new_is_finite, scale_can_fall=self.loss_scale.can_fall)
        # A sum that overflowed under an earlier, larger scale says nothing about the current scale.
        of_this_scale = gradients is None or gradients.loss_scale <= totals.loss_scale
        self.loss_scale.update(found_inf=not finite if of_this_scale else not new_is_finite)
        # The items of this step's losses do not matter to the gradients of an earlier step.
        if gradients is None or not can_apply or (not delayed and not totals.counted):
            return totals
        norm, divisor = math.sqrt(totals.grad_sq) / gradients.loss_scale, gradients.loss_scale
        if self.config.clip_grad > 0 and norm > 0 and not gradients.clipped:
            divisor /= min(1.0, self.config.clip_grad / (norm + 1e-6))
        set_hyperparameters(self.inner, lr, weight_decay, decoupled_lr)
        terms = begin_directions(self.inner, self.shards, divisor) if gradients.needs_update else []
        if self.publisher.look_ahead is not None:
            self.publisher.look_ahead.remember()
        if gradients.freezes_variance and not self.frozen_at and self.steps:
            freeze(self.inner, self.shards, self.norms)
            self.frozen_at = self.steps
        if gradients.freezes_variance and self.frozen_at:
            step_frozen(self.inner, self.shards, divisor, self.frozen_at)
        else:
            step_inner(self.inner, self.shards, divisor)
        if gradients.needs_update:
            end_directions(self.inner, self.shards, terms, self.frozen_at if gradients.freezes_variance else 0)
        self.publisher.publish(gradients.iteration)
        return replace(totals, grad_norm=norm)
