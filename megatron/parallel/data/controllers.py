"""Controllers of compressors: they measure reduced gradients and tune options during the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.compression.api import Controller, Reduced, Trial
from megatron.compression.points import Point
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.round_driver import start_request
from megatron.parallel.data.trial import TrialReduction, run_trial, synchronize_ranks

Log = Callable[[str], None]


@dataclass(frozen=True)
class ReducedPoint:
    """Reduced gradients of a point, as input to its controller.

    Args:
        flats: this rank's final gradients, flat.
        shapes: shapes of this rank's parameters of two or more dimensions.
        make_trials: makes trial reductions of copies of the gradients under another plan.
    """

    flats: Sequence[Tensor]
    shapes: Sequence[tuple[int, ...]]
    make_trials: Callable[[CompressionPlan], Iterable[TrialReduction]]


class Controllers:
    """The controllers of a rank, by point; identical on all ranks.

    Args:
        plan: the plan to tune.
        points: points with reductions in this run.
        world: the group of all ranks, with tensors on the CPU.
        ledger: ledger that counts bytes and time.
        layout: tensor-, pipeline-, data- and expert-parallel size of the run.
    """

    def __init__(
        self,
        plan: CompressionPlan,
        points: Sequence[Point],
        world: Group,
        ledger: Ledger,
        layout: tuple[int, ...] = (1, 1, 1, 1),
    ) -> None:
        self.plan, self.world, self.ledger, self.layout = plan, world, ledger, layout
        self._ahead_s = 0.0
        self.by_point: dict[Point, Controller] = {}
        for point in points:
            spec = plan.specs.get(point)
            controller = None if spec is None else spec.make_controller()
            if controller is not None:
                self.by_point[point] = controller
        self._apply_options()

    def _apply_options(self) -> None:
        """Apply the options that the controllers have chosen to the plan."""
        for point, controller in self.by_point.items():
            self.plan.tune(point, controller.options(self.plan.stage))

    def before_reduction(self, iteration: int) -> None:
        """Wait for the other ranks if a controller needs the waiting time. Every rank must call it.

        Args:
            iteration: 0-based.
        """
        synchronizes = any(controller.needs_wait_times(iteration) for controller in self.by_point.values())
        self._ahead_s = synchronize_ranks(self.world, self.ledger) if synchronizes else 0.0

    def after_reduction(
        self, iteration: int, scale: float, all_finite: bool, collect: Callable[[Point], ReducedPoint]
    ) -> None:
        """Let the controllers measure a step. Every rank must call it.

        Args:
            iteration: 0-based.
            scale: the loss scale in the gradients.
            all_finite: whether the gradients are finite; if not, controllers do not see them.
            collect: collects the reduced gradients of a point.
        """
        for point, controller in self.by_point.items():
            reduced_point = collect(point)
            compressed = self.plan.is_active(point, iteration)
            flats = reduced_point.flats if all_finite else []
            stage, ahead_s = self.plan.stage, self._ahead_s
            reduced = Reduced(iteration, flats, reduced_point.shapes, scale, compressed, stage, ahead_s)
            requests = controller.after_reduction(reduced)
            try:
                request = next(requests)
                while True:
                    if isinstance(request, Trial):
                        trials = reduced_point.make_trials(self.plan.make_trial_plan(point, request.options))
                        result = run_trial(request, trials, self.world, self.ledger)
                    else:
                        pending, result = start_request(request, self.world)
                        self.ledger.complete(Point.CONTROL, pending)
                    request = requests.send(result)
            except StopIteration:
                pass  # the controller has all it asked for
        self._apply_options()

    def figures(self) -> dict[str, dict[str, float]]:
        """Logged metrics of the controllers, by point name; identical on every rank."""
        covered = {
            point: [stage for stage in range(self.plan.stages) if self.plan.covers(point, stage)]
            for point in self.by_point
        }
        return {point.value: dict(controller.figures(covered[point])) for point, controller in self.by_point.items()}

    def state_dict(self) -> dict[str, Any]:
        """The controllers' states by point name; identical on every rank."""
        return {
            point.value: {
                "compressor": self.plan.specs[point].name,
                "layout": list(self.layout),
                "state": dict(controller.state_dict()),
            }
            for point, controller in self.by_point.items()
        }

    def load_state_dict(self, saved: Mapping[str, Any], log: Log) -> None:
        """Restore the controllers; log controllers that start afresh and saved states that are dropped.

        Raises:
            TypeError, ValueError, LookupError, ArithmeticError: when no run saves such a state.
        """
        remaining_entries = {(name, entry["compressor"]): entry for name, entry in saved.items()}
        for point, controller in self.by_point.items():
            name = self.plan.specs[point].name
            entry = remaining_entries.pop((point.value, name), None)
            if entry is not None:
                controller.load_state_dict(entry["state"])
                if entry.get("layout") != list(self.layout):  # earlier versions did not save the layout
                    controller.on_layout_change()
            else:
                log(f"the checkpoint holds no state of the controller of {point.value}={name}: it starts anew")
        for point_name, name in remaining_entries:
            log(f"warning: the state of {point_name}={name}'s controller has no place in this run and is left out")
        self._apply_options()
