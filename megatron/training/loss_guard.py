"""Checks of what the compressors of ``--compress auto`` cost in loss, while the run trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, point_name, read_specs
from megatron.data.batch import Batch
from megatron.distributed.agreement import gather_texts
from megatron.distributed.ledger import gather_rows
from megatron.distributed.observer import Finding
from megatron.planner.auto import CandidateSpec, candidates_of
from megatron.training.assembly import Engines
from megatron.training.evaluation import evaluate
from megatron.training.run_plan import RunPlan
from megatron.training.step import open_loader, take_full_batch


@dataclass
class _GuardedPoint:
    """A point with a chosen compressor.

    Args:
        candidate: its setting, as declared.
        gentler: declared settings with a lower cost, with their specs, from the boldest to the gentlest.
    """

    candidate: CandidateSpec
    gentler: list[tuple[CandidateSpec, Spec]]


class LossGuard:
    """Keeps the expected increase of the loss within ``--max-loss-increase``.

    The expected increase at a point is what was measured for its setting (``Rung``). It is greater

    - at points of forward messages, if the loss on held-out samples rises by more when the messages are compressed;
    - at reductions with error feedback, if the residual's energy is a greater share of the gradient's than it was when
      the mean increase was measured: the increase then grows in proportion.

    If the sum over the points exceeds the budget, the point with the greatest increase takes the next gentler setting
    of its compressor, or exact traffic if there is none.

    Args:
        engines: engines of this rank.
        batches: this rank's micro-batches of the held-out samples.
        length: length of the run, for warm-ups in fractions of it.
    """

    def __init__(self, engines: Engines, batches: Sequence[Batch], length: RunLength) -> None:
        compression = engines.config.compression
        self.interval, self._budget = compression.loss_check_interval, compression.max_loss_increase
        self._engines = engines
        registry = build_registry(compression.compress_module)
        self._points: dict[Point, _GuardedPoint] = {}
        self._forward_points: list[Point] = []
        self._batches = batches
        measures_loss = bool(batches) and engines.config.model.predicts_words

        def read(text: str) -> Spec:
            (spec,) = read_specs([text], registry, length).values()
            return spec.with_evaluation() if compression.eval_compressed else spec

        for text in compression.chosen_specs:
            spec, point = read(text), Point(point_name(text))
            ladder = candidates_of(registry, spec.name, point, engines.config.model.hidden_size)
            candidate = next((candidate for candidate in ladder if candidate.spec == text), None)
            if candidate is None or engines.plan.is_turned_off(point):
                continue  # an earlier version's setting, or one without further cost
            lower = [(rung, read(rung.spec)) for rung in ladder if rung.increase < candidate.increase]
            # Groups are split by node, or not, for the whole run.
            lower = [pair for pair in lower if _is_in_levels(pair[1]) == _is_in_levels(spec)]
            lower.sort(key=lambda pair: pair[0].increase, reverse=True)
            self._points[point] = _GuardedPoint(candidate, lower)
            if measures_loss and point.forward and not spec.identity and not spec.remembered_samples:
                self._forward_points.append(point)

    @staticmethod
    def is_needed(engines: Engines) -> bool:
        """Whether compressors were chosen that are to be checked."""
        compression = engines.config.compression
        return bool(compression.chosen_specs) and compression.loss_check_interval > 0

    def is_due(self, iteration: int) -> bool:
        """Whether a check is due after an iteration (1-based)."""
        return bool(self._points) and iteration % self.interval == 0

    def check(self) -> Finding:
        """Estimate the increase of the loss, and replace a compressor if it exceeds the budget. A collective call."""
        costs = {point: guarded.candidate.increase for point, guarded in self._points.items()}
        for point, measured in (*self._forward_costs().items(), *self._residual_costs().items()):
            costs[point] = max(costs[point], measured)
        total = sum(costs.values())
        worst = max(costs, key=lambda point: costs[point]).value if total > self._budget else ""
        # All ranks take the decision of rank 0: their sums may round differently.
        eased = gather_texts(self._engines.topology.control.pg, worst)[0]
        line = None
        if eased:
            costs_text = ", ".join(f"{point.value} {cost:.2f}%" for point, cost in costs.items())
            line = (
                f"--compress auto: the loss is expected to be {total:.2f}% higher ({costs_text}), above "
                f"--max-loss-increase {self._budget:g}: {self._ease(Point(eased))}"
            )
        values = {"expected_increase": total, "points": {point.value: cost for point, cost in costs.items()}}
        return Finding("loss_check", {**values, "eased": eased or None}, line)

    def _ease(self, point: Point) -> str:
        """Replace the compressor of a point by a gentler setting, and describe the change."""
        guarded, plan = self._points[point], self._engines.plan
        if not guarded.gentler:
            del self._points[point]
            if point in self._forward_points:
                self._forward_points.remove(point)
            plan.substitute(point, None)
            return f"{point.value} goes on uncompressed"
        guarded.candidate, spec = guarded.gentler.pop(0)
        plan.substitute(point, spec, guarded.candidate.spec)
        return f"{point.value} goes on with {guarded.candidate.spec.partition('=')[2]}"

    def _forward_costs(self) -> dict[Point, float]:
        """Increase of the loss on held-out samples, in percent, by compressing at each point of forward messages."""
        if not self._forward_points:
            return {}
        exact_loss = self._loss(None)
        losses = {point: self._loss(point) for point in self._forward_points}
        if not math.isfinite(exact_loss) or exact_loss <= 0.0:
            return {}
        return {
            point: 100.0 * (loss / exact_loss - 1.0) if math.isfinite(loss) else math.inf
            for point, loss in losses.items()
        }

    def _loss(self, compressed_point: Point | None) -> float:
        """Loss on the held-out samples, with compressed forward messages at one point or at none."""
        plan = self._engines.plan
        plan.evaluation_overrides = {point: point is compressed_point for point in self._forward_points}
        losses = evaluate(self._engines, iter(self._batches), 1, len(self._batches), 0).losses
        plan.evaluation_overrides = {}
        return next(iter(losses.values()))

    def _residual_costs(self) -> dict[Point, float]:
        """Expected increase of the loss, in percent, by the residuals of reduced gradients."""
        guarded = self._points.get(Point.DP_GRAD)
        if guarded is None or not guarded.candidate.residual:
            return {}
        gradient = residual = 0.0
        for reducer in self._engines.sync.reducers:
            for _, state in reducer.residuals():
                if state.health is not None:
                    sums = state.health.stacked().sum(dim=1)
                    gradient, residual = gradient + float(sums[0]), residual + float(sums[2])
        rows = gather_rows(self._engines.topology.control, self._engines.ledger, [gradient, residual])
        gradient, residual = (sum(column) for column in zip(*rows, strict=True))
        if not gradient or not math.isfinite(gradient):
            return {}
        if not math.isfinite(residual):
            return {Point.DP_GRAD: math.inf}
        ratio = residual / gradient / guarded.candidate.residual**2
        return {Point.DP_GRAD: guarded.candidate.mean_increase * ratio}


def _is_in_levels(spec: Spec) -> bool:
    """Whether a compressor sums in two levels."""
    return spec.point.is_reduction and spec.make_rounds().traits.levels


def held_out_batches(engines: Engines, plan: RunPlan) -> list[Batch]:
    """This rank's share of a global batch of validation samples, or without any of the last training samples."""
    if plan.valid_sets:
        dataset, first = plan.valid_sets[0].dataset, 0
    else:
        assert plan.train_set is not None
        dataset, first = plan.train_set, max(len(plan.train_set) - engines.config.training.global_batch_size, 0)
    with open_loader(engines, dataset, first) as loader:
        return take_full_batch(engines, loader)
