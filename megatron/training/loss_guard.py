"""Checks of the loss increase due to the compressors of ``--compress auto``, while the run trains."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.base.values import Values
from megatron.checkpoint.certificate import MAX_INCREASE, LossCheck
from megatron.compression.ladder import MAX_NOISE
from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, point_name, read_specs
from megatron.config.compression import CompressionConfig
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.distributed.agreement import take_from_rank_0
from megatron.distributed.ledger import gather_rows
from megatron.distributed.observer import Finding
from megatron.planner.auto import AutoChoice
from megatron.planner.candidates import is_noisy, list_candidates, sum_traits
from megatron.training.assembly import Engines
from megatron.training.evaluation import evaluate
from megatron.training.guarded_point import EXACT, MAX_BREAKS, GuardedPoint, LossMeasurement, guard_point
from megatron.training.quantization_noise import NoiseProbe
from megatron.training.run_plan import RunPlan
from megatron.training.step import open_loader, take_full_batch

CALM_CHECKS = 5
"""Successive checks that must find room for a bolder setting before it is taken."""

_CALM_SHARE = 2 / 3
"""A bolder setting has room if its measured increase of the loss is at most this share of the rest of the budget,
beside the other points. A setting is replaced when it exceeds all of it, so costs in between change nothing."""

_MAX_SHARE, _LEAST_SHARE = 0.02, 0.002
"""Share of a run's time for the choice of its compressors and their checks, and the least share for the checks."""

_MAX_INTERVALS = 10
"""Maximum number of default intervals between two checks: the check that was timed may have been slow by chance."""


class LossGuard:
    """Guard that keeps the expected increase of the loss within ``--max-loss-increase``.

    The expected increase at a point is what was measured for its setting (``Rung``). It is greater

    - at points of forward messages, if the loss on held-out samples rises by more when the messages are compressed;
    - at reductions with error feedback, if the residual's energy is a greater share of the gradient's than it was when
      the mean increase was measured: the increase then grows in proportion;
    - at points of gradients that a compressor quantizes, if the noise exceeds ``MAX_NOISE``: no budget allows this.

    If the sum over the points, or the joint cost of the forward points plus the costs of the others, exceeds the
    budget, the point with the greatest increase takes the next gentler setting of its compressor, or exact traffic if
    there is none. What the forward points cost together beyond the sum of each counts for each of them. If instead
    ``CALM_CHECKS`` checks in a row find room for a point's next bolder setting, the point goes back to that setting:
    never beyond the setting that was chosen, and not to a setting that has exceeded the budget twice, or was too noisy
    or not finite once.

    Args:
        engines: engines of this rank.
        batches: this rank's micro-batches of the held-out samples.
        length: length of the run, for costs by length and warm-ups in fractions of it.
        saved: the value of ``state_dict`` in the checkpoint whose choice the run keeps, by point.
        due_at_start: whether a check is due before the first step: the compressors are new, but not the weights.
        interval: iterations between checks; None for those of ``--loss-check-interval``.

    Attributes:
        checks: the checks so far.
        interval: iterations between checks.
    """

    def __init__(
        self,
        engines: Engines,
        batches: Sequence[Batch],
        length: RunLength,
        saved: Mapping[str, Values] = MappingProxyType({}),
        due_at_start: bool = False,
        interval: int | None = None,
    ) -> None:
        compression = engines.config.compression
        self._budget = compression.max_loss_increase
        self.interval = compression.loss_check_interval if interval is None else interval
        self._engines = engines
        registry = build_registry(compression.compress_module)
        self.checks: list[LossCheck] = []
        self._points: dict[Point, GuardedPoint] = {}
        self._forward_points: list[Point] = []
        self._batches = batches
        boundaries = engines.topology.layout.num_virtual_stages - 1
        measures_loss = bool(batches) and engines.config.model.predicts_words

        def read(text: str) -> Spec:
            (spec,) = read_specs([text], registry, length).values()
            return spec.with_evaluation() if compression.eval_compressed else spec

        for text in compression.chosen_specs:
            spec, point = read(text), Point(point_name(text))
            ladder = list_candidates(registry, spec.name, point, engines.config.model.hidden_size, length, boundaries)
            if text not in [candidate.spec for candidate in ladder]:
                continue  # an earlier version's setting, or one without further cost
            # Groups are split by node, or not, for the whole run.
            in_levels = sum_traits(spec).levels
            settings = [
                pair
                for pair in ((candidate, read(candidate.spec)) for candidate in ladder)
                if sum_traits(pair[1]).levels == in_levels and (pair[0].spec == text or not is_noisy(*pair))
            ]
            self._points[point] = guard_point(settings, text, engines.plan.is_turned_off(point), saved.get(point.value))
            if measures_loss and point.forward and not spec.identity and not spec.remembered_samples:
                self._forward_points.append(point)
        gradient_points = [point for point in self._points if point.carries_gradients]
        self._noise = NoiseProbe(engines.topology, engines.ledger, gradient_points)
        self.due_at_start = due_at_start and bool(self._points)

    @staticmethod
    def is_needed(engines: Engines) -> bool:
        """Whether compressors were chosen that are to be checked."""
        compression = engines.config.compression
        return bool(compression.chosen_specs) and compression.loss_check_interval > 0

    def state_dict(self) -> dict[str, Any]:
        """Results of the checks so far, by point."""
        return {
            point.value: {
                "chosen": guarded.settings[0][0].spec,
                "breaks": list(guarded.breaks),
                "calm_checks": guarded.calm_checks,
            }
            for point, guarded in self._points.items()
        }

    def is_due(self, iteration: int) -> bool:
        """Whether a check is due after an iteration (1-based)."""
        return bool(self._points) and iteration % self.interval == 0

    def begin_step(self, iteration: int) -> None:
        """Prepare for a step (0-based): the check after it needs the noise of its gradients."""
        self._noise.watch(self.is_due(iteration + 1))

    def watch_noise(self) -> None:
        """Measure the noise of gradients in the next step, which a check follows."""
        self._noise.watch(True)

    def check(self, iteration: int) -> Finding:
        """Estimate the increase of the loss; replace a compressor if it exceeds the budget, or has long been far below
        it. A collective call, after ``complete_steps``.

        Args:
            iteration: number of iterations so far.
        """
        start = time.perf_counter()
        measurement = self._measure()
        costs = {point: guarded.candidate.increase for point, guarded in self._points.items()}
        costs |= {point: max(cost, costs[point]) for point, cost in measurement.costs.items()}
        total = measurement.total(costs)
        # All ranks take the numbers and the decision of rank 0: their sums and clocks may differ.
        numbers: dict[str, Any] = {
            "expected_increase": total,
            "points": {point.value: cost for point, cost in costs.items()},
            "measured_increase": measurement.total(measurement.costs) if measurement.costs else None,
            "joint_increase": measurement.joint_cost,
            "seconds": time.perf_counter() - start,
        }
        group = self._engines.topology.control.pg
        decision, numbers = take_from_rank_0(group, (self._decide(costs, total, measurement), numbers))
        for name, count in decision["calm_checks"].items():
            self._points[Point(name)].calm_checks = count
        eased, emboldened, line = decision["eased"], decision["emboldened"], None
        costs_by_name, total = numbers["points"], numbers["expected_increase"]
        self.checks.append(LossCheck(iteration, min(total, MAX_INCREASE), eased or ""))
        if eased or emboldened:
            costs_text = ", ".join(f"{name} {cost:.2f}%" for name, cost in costs_by_name.items())
            if total > sum(costs_by_name.values()):
                costs_text += f"; {' and '.join(point.value for point in measurement.joint_points)} together more"
            relation = "above" if eased else f"in {CALM_CHECKS} checks far below"
            reason = (
                f"the loss is expected to be {total:.2f}% higher ({costs_text}), {relation} --max-loss-increase "
                f"{self._budget:g}"
                if math.isfinite(total)
                else f"what {eased} sends is too noisy, or not finite"
            )
            # Go to the next gentler setting, or the next bolder one.
            point = Point(eased or emboldened)
            guarded = self._points[point]
            if eased:
                is_endless = math.isinf(costs_by_name[eased])
                guarded.breaks[guarded.position] += MAX_BREAKS if is_endless else 1
            guarded.position += 1 if eased else -1
            self._use_setting(point, guarded.position)
            exact = guarded.candidate is EXACT
            change = "uncompressed" if exact else f"with {guarded.candidate.spec.partition('=')[2]}"
            line = f"--compress auto: {reason}: {point.value} goes on {change}"
        positions = {point.value: guarded.position for point, guarded in self._points.items()}
        changes = {"settings": positions, "interval": self.interval, "eased": eased, "emboldened": emboldened}
        return Finding("loss_check", {**numbers, **changes}, line)

    def _decide(self, costs: Mapping[Point, float], total: float, measurement: LossMeasurement) -> dict[str, Any]:
        """Decide which point takes a gentler or a bolder setting, if any, and count the calm checks of all points."""
        eased, emboldened = None, None
        calm_checks = dict.fromkeys(costs, 0)
        if total > self._budget:
            separate = sum(costs.values())
            excess = total - separate if math.isfinite(separate) else 0.0
            joint = measurement.joint_points
            eased = max(costs, key=lambda point: (costs[point] + (excess if point in joint else 0.0), costs[point]))
        else:
            for point, guarded in self._points.items():
                room, bolder = self._budget - (total - costs[point]), guarded.bolder
                if bolder is not None and bolder.increase <= room:
                    increase = measurement.bolder_costs.get(point, bolder.mean_increase)
                    calm_checks[point] = guarded.calm_checks + 1 if increase <= _CALM_SHARE * room else 0
            calmest = max(calm_checks, key=lambda point: calm_checks[point])
            if calm_checks[calmest] >= CALM_CHECKS:
                emboldened = calmest
                calm_checks = dict.fromkeys(costs, 0)  # the others have less room from now on
        return {
            "eased": eased and eased.value,
            "emboldened": emboldened and emboldened.value,
            "calm_checks": {point.value: count for point, count in calm_checks.items()},
        }

    def _use_setting(self, point: Point, position: int) -> None:
        """Use a setting of a point from now on; the position after the last means exact traffic."""
        plan, settings = self._engines.plan, self._points[point].settings
        candidate, spec = settings[min(position, len(settings) - 1)]
        plan.substitute(point, spec, candidate.spec)
        if position == len(settings):
            plan.substitute(point, None)

    def _measure(self) -> LossMeasurement:
        """Measure the increase of the loss with the settings in use, and with the next bolder ones."""
        measurement = LossMeasurement(*self._residual_costs())
        self._noise.watch(False)
        noise = self._noise.take_noise()
        measurement.costs |= {point: math.inf for point, ratio in noise.items() if ratio > MAX_NOISE}
        points = {point: self._points[point] for point in self._forward_points}
        compressed = [point for point, guarded in points.items() if guarded.candidate is not EXACT]
        with_bolder = [point for point, guarded in points.items() if guarded.bolder is not None]
        exact_loss = self._evaluate_loss(()) if compressed or with_bolder else math.nan
        if not math.isfinite(exact_loss) or exact_loss <= 0.0:
            measurement.bolder_costs |= dict.fromkeys(with_bolder, math.inf)
            return measurement
        for point in compressed:
            measurement.costs[point] = _increase(self._evaluate_loss((point,)), exact_loss)
        if len(compressed) > 1:
            measurement.joint_points = compressed
            measurement.joint_cost = _increase(self._evaluate_loss(tuple(compressed)), exact_loss)
        for point in with_bolder:
            self._use_setting(point, points[point].position - 1)
            measurement.bolder_costs[point] = _increase(self._evaluate_loss((point,)), exact_loss)
            self._use_setting(point, points[point].position)
        return measurement

    def _evaluate_loss(self, compressed: Collection[Point]) -> float:
        """Loss on the held-out samples, with compressed forward messages at some points only."""
        plan = self._engines.plan
        plan.evaluation_overrides = {point: point in compressed for point in self._forward_points}
        losses = evaluate(self._engines, iter(self._batches), 1, len(self._batches), 0).losses
        plan.evaluation_overrides = {}
        return next(iter(losses.values()))

    def _residual_costs(self) -> tuple[dict[Point, float], dict[Point, float]]:
        """Expected increase of the loss, in percent, by the residuals of reduced gradients; with the setting in use,
        and with the next bolder one."""
        guarded = self._points.get(Point.DP_GRAD)
        if guarded is None or not guarded.candidate.residual:
            return {}, {}
        gradient = residual = 0.0
        for reducer in self._engines.sync.reducers:
            for _, state in reducer.residuals():
                if state.health is not None:
                    sums = state.health.stacked().sum(dim=1)
                    gradient, residual = gradient + float(sums[0]), residual + float(sums[2])
        rows = gather_rows(self._engines.topology.control, self._engines.ledger, [gradient, residual])
        gradient, residual = (sum(column) for column in zip(*rows, strict=True))
        if not gradient or not math.isfinite(gradient):
            return {}, {Point.DP_GRAD: math.inf}
        if not math.isfinite(residual):
            return {Point.DP_GRAD: math.inf}, {Point.DP_GRAD: math.inf}
        quantizes = sum_traits(guarded.settings[guarded.position][1]).quantizes
        if quantizes and residual > gradient * MAX_NOISE**2:
            return {Point.DP_GRAD: math.inf}, {Point.DP_GRAD: math.inf}
        ratio = residual / gradient / guarded.candidate.residual**2
        bolder_mean = 0.0 if guarded.bolder is None else guarded.bolder.mean_increase
        return {Point.DP_GRAD: guarded.candidate.mean_increase * ratio}, {Point.DP_GRAD: bolder_mean * ratio}


def _increase(loss: float, exact_loss: float) -> float:
    """Increase of a loss over the exact one, in percent."""
    return 100.0 * (loss / exact_loss - 1.0) if math.isfinite(loss) else math.inf


def choose_interval(
    config: RunConfig,
    flag_fields: Collection[str],
    choice: AutoChoice | None,
    iterations: int,
    saved_interval: int | None = None,
) -> int:
    """Choose the iterations between checks: those of ``--loss-check-interval``, or a multiple of its default if choice
    and checks would otherwise take more than ``_MAX_SHARE`` of the run.

    Args:
        config: resolved configuration.
        flag_fields: dotted names (``section.field``) of the fields that flags set.
        choice: the choice that was made now, if any.
        iterations: number of iterations that are left.
        saved_interval: that of the checkpoint whose choice the run keeps.
    """
    interval, default = config.compression.loss_check_interval, CompressionConfig().loss_check_interval
    if interval != default or "compression.loss_check_interval" in flag_fields:
        return interval
    if choice is None or choice.estimate is None:
        return saved_interval if saved_interval and saved_interval % default == 0 else interval
    share = max(_MAX_SHARE - choice.took_s / (iterations * choice.chosen.seconds), _LEAST_SHARE)
    checks_per_interval = choice.estimate.check_s / (share * interval * choice.chosen.seconds)
    return interval * min(max(math.ceil(checks_per_interval), 1), _MAX_INTERVALS)


def held_out_batches(engines: Engines, plan: RunPlan) -> list[Batch]:
    """This rank's share of a global batch of validation samples; of the last training samples if there are none."""
    if plan.valid_sets:
        dataset, first = plan.valid_sets[0].dataset, 0
    else:
        assert plan.train_set is not None
        dataset, first = plan.train_set, max(len(plan.train_set) - engines.config.training.global_batch_size, 0)
    with open_loader(engines, dataset, first) as loader:
        return take_full_batch(engines, loader)
