"""Gradients that are applied one step late, so that their reduction runs beside the next step's computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron.base.values import Values
from megatron.distributed.policy import CompressionPlan
from megatron.kernels.ops import finite_norm
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.data.delay_correction import DelayCorrection, GradientExtrapolation
from megatron.parallel.data.gradient_sync import GradientSync, ReducedGradients
from megatron.parallel.data.param_versions import ParamVersions


@dataclass
class InFlightGradients:
    """Gradients of a step that the next step applies.

    Args:
        iteration: 0-based number of the step that computed them.
        loss_scale: the loss scale in them.
        reduced: properties of the gradients once they are reduced; None while the reduction runs.
        settled: whether the states of their compressors have been committed or rolled back.
    """

    iteration: int
    loss_scale: float
    reduced: ReducedGradients | None = None
    settled: bool = False


@dataclass
class OpenStep:
    """A step whose last backward passes run beside the next step (``--no-pipeline-flush``).

    Args:
        iteration: 0-based number of the step.
        num_micro_batches: number of its micro-batches on each replica.
        seq_length: tokens of each sample.
        loss_scale: the loss scale in its gradients.
        report_losses: returns the sum and the number of items of each loss on this rank, by name.
        losses: means of the losses, once all ranks know them.
    """

    iteration: int
    num_micro_batches: int
    seq_length: int
    loss_scale: float
    report_losses: Callable[[], dict[str, tuple[float, float]]]
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step whose passes have all run, the same on all ranks.

    Args:
        loss_scale: the loss scale in its gradients.
        finite: whether they are finite.
        usable: whether they may be applied: they are finite, and the losses have items.
    """

    loss_scale: float = 1.0
    finite: bool = True
    usable: bool = True


class DelayedGradients:
    """Gradients of a step that wait for the next step, which applies them (``--delay 1``).

    Step t computes its gradient g(theta_t) while that of step t-1 is reduced, and then takes the update

        theta_{t+1} = theta_t - lr_t U(g(theta_{t-1})),

    the rule of PipeDream-2BW (Narayanan et al. 2021) with every gradient exactly one step old. The first step takes no
    update, nor does a step after one whose gradients were not finite. Compressors see gradients as without a delay.

    Args:
        sync: reduction of the gradients.
        buffers: buffers with separate memory for the reduction.
        plan: compressors of all points; its step is that of the gradients while they are reduced and applied.
        correction: correction of the delay, if any: ``take_gradients`` extrapolates, or the optimizer looks ahead.
        versions: parameters of the last two steps, whose passes take turns; None if pipelines are flushed.

    With ``--no-pipeline-flush``, ``open_step`` is the last step while some of its backward passes have not run, and
    ``last_outcome`` is the latest outcome that all ranks know.
    """

    def __init__(
        self,
        sync: GradientSync,
        buffers: Sequence[FlatBuffer],
        plan: CompressionPlan,
        correction: DelayCorrection | None = None,
        versions: ParamVersions | None = None,
    ) -> None:
        self._sync, self._buffers, self._plan = sync, buffers, plan
        self.correction, self.versions = correction, versions
        self.open_step: OpenStep | None = None
        self.last_outcome = StepOutcome()
        self.in_flight: InFlightGradients | None = None

    def complete_gradients(self) -> Tensor:
        """Complete this step's gradients; return whether they are finite on this rank: 1 or 0, fp64."""
        self._sync.complete_gradients()
        if self.versions is not None:  # backward passes of the next step overwrite them before ``launch_reduction``
            self._copy_new()
        return torch.stack([finite_norm(buffer.grads_flat)[1] for buffer in self._buffers]).amin()

    def advance_reduction(self) -> None:
        """Run the rounds in flight whose messages have arrived.

        Call it only between passes of a training step: until ``take_gradients``, no other collective may use the same
        group, since ranks get here at different times but must start a group's collectives in the same order.
        """
        if self.in_flight is not None and self.in_flight.reduced is None:
            self._sync.advance_reduction()

    def take_gradients(self) -> ReducedGradients | None:
        """Finish the reduction in flight, and correct its gradients for the step that applies them.

        Returns:
            Properties of the gradients; None if there are none.
        """
        gradients = self.finish_reduction()
        if gradients is not None and isinstance(self.correction, GradientExtrapolation):
            self.correction.apply(gradients.loss_scale)
        return gradients

    def finish_reduction(self) -> ReducedGradients | None:
        """Finish the reduction in flight, and return properties of its gradients; None if there are none."""
        in_flight = self.in_flight
        if in_flight is None:
            return None
        self._plan.begin_step(in_flight.iteration)
        if in_flight.reduced is None:
            in_flight.reduced = self._sync.finish_reduction(all_finite=True)
        return in_flight.reduced

    def settle_states(self) -> None:
        """Finish the reduction in flight, and commit its compressors' states if its sums are finite. A collective call.

        Afterwards, a checkpoint can save the gradients and the states.
        """
        assert self.open_step is None, "flush the pipeline first"
        gradients, in_flight = self.finish_reduction(), self.in_flight
        if gradients is None or in_flight is None or in_flight.settled:
            return
        finite = self._sync.reduced_are_finite()
        self._sync.end_step(keep_states=finite)
        in_flight.reduced, in_flight.settled = replace(gradients, finite=finite), True

    def end_step(self, updated: bool) -> None:
        """End the step that has applied the gradients.

        Args:
            updated: whether there were any, and they were finite.
        """
        self._sync.end_step(keep_states=updated)
        if isinstance(self.correction, GradientExtrapolation):
            self.correction.end_step(updated)

    def launch_reduction(self, iteration: int, loss_scale: float, *, usable: bool) -> None:
        """Launch the reduction of this step's gradients, in place of those that were applied.

        Args:
            iteration: 0-based number of this step.
            loss_scale: the loss scale in its gradients.
            usable: whether they are finite on all ranks, and losses have items; otherwise they are dropped.
        """
        self.in_flight = None
        self._plan.begin_step(iteration)
        if not usable:
            return
        if self.versions is None:
            self._copy_new()
        self._sync.begin_step(iteration, loss_scale, checked=True)
        self._sync.launch_reduction()
        self.in_flight = InFlightGradients(iteration, loss_scale)

    def _copy_new(self) -> None:
        """Copy this step's gradients to the memory in which they are reduced."""
        for buffer in self._buffers:
            buffer.reduced_flat.copy_(buffer.grads_flat)

    def state_dict(self) -> dict[str, Any]:
        """Properties of the gradients in flight, the name of the correction if it has previous tensors, and the outcome
        of a step whose gradients were dropped."""
        in_flight, correction = self.in_flight, self.correction
        has_previous = correction is not None and correction.previous is not None
        state: dict[str, Any] = {"previous": correction.name if correction is not None and has_previous else ""}
        if not self.last_outcome.usable:
            state["dropped"] = asdict(self.last_outcome)
        if in_flight is not None:
            assert in_flight.reduced is not None, "settle the states before a save"
            state |= asdict(in_flight.reduced)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; the buckets hold the reduced gradients, and ``correction`` its previous tensors.

        Raises:
            UserError: when a value is missing or of another kind.
        """
        self.in_flight, self.last_outcome = None, StepOutcome()
        values = Values(state)
        if values.has("dropped") and self.versions is not None:
            dropped = Values(values.table("dropped"))
            self.last_outcome = StepOutcome(
                dropped.number("loss_scale"), dropped.flag("finite"), dropped.flag("usable")
            )
        if not values.has("iteration"):
            return
        iteration, loss_scale = values.integer("iteration", minimum=0), values.number("loss_scale")
        flags = {name: values.flag(name) for name in ("finite", "clipped", "freezes_variance", "needs_update")}
        self._plan.begin_step(iteration)
        self._sync.begin_step(iteration, loss_scale, checked=True)
        reduced = ReducedGradients(iteration, loss_scale, **flags)
        self.in_flight = InFlightGradients(iteration, loss_scale, reduced, settled=True)
