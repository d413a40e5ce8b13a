"""Choice of ``--compress auto``: the fastest compressors whose measured cost in loss fits a budget."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import point_name, read_specs
from megatron.config.check_compression import why_no_traffic
from megatron.config.run import RunConfig
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster
from megatron.planner.costs import wires_of
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.search import refusal_reason

WORTHWHILE = 0.03
"""Share of an iteration that compression must save; also, sets this close to the fastest count as equally fast.

Neither predictions nor trial steps are more accurate than this.
"""

TRIAL_MARGIN = 0.15
"""Sets predicted to take longer than the fastest by more than this share are not timed."""

MAX_TRIALS = 2
"""Maximum number of sets that are timed, in addition to no compressors.

The planner is less accurate about the gain of compression than about differences between compressors.
"""

_MEMORY_SHARE = 0.8
"""Share of a device's memory that the engines of all timed sets may need at the same time."""


NOTHING_TO_CHOOSE = "--compress auto: no point without a spec has both traffic and a compressor to choose"


@dataclass(frozen=True)
class CandidateSpec:
    """A compressor that may be chosen.

    Args:
        spec: value of ``--compress``.
        increase: upper end of its measured increase of the validation loss, in percent.
        mean_increase: mean of that increase.
        residual: norm of the residual over that of the gradient, as measured; None without error feedback.
    """

    spec: str
    increase: float
    mean_increase: float = 0.0
    residual: float | None = None


Ladders = Mapping[Point, Sequence[CandidateSpec]]
"""Candidates by point."""


@dataclass(frozen=True)
class PointChoice:
    """The choice at a point.

    Args:
        point: the point.
        candidate: the chosen compressor; None for none.
        saved_s: predicted seconds per iteration that it saves in the chosen set; without one, that the fastest
            candidate would save in addition.
        reason: reason why nothing is chosen; empty where something is.
    """

    point: Point
    candidate: CandidateSpec | None
    saved_s: float
    reason: str = ""


@dataclass(frozen=True)
class CompressorSet:
    """Compressors for the points of a run.

    Args:
        candidates: the compressors by point; points without one are missing.
        prediction: prediction of an iteration with them and with the specs of the user.
        trial_s: measured seconds of an iteration; None if none was run.
        gains: whether trial steps have shown that it saves ``WORTHWHILE`` of an iteration.
    """

    candidates: Mapping[Point, CandidateSpec]
    prediction: Prediction
    trial_s: float | None = None
    gains: bool = False

    @property
    def increase(self) -> float:
        """Largest expected increase of the validation loss, in percent: the sum over the points."""
        return sum(candidate.increase for candidate in self.candidates.values())

    @property
    def seconds(self) -> float:
        """Seconds of an iteration: as measured, else as predicted."""
        return self.prediction.seconds if self.trial_s is None else self.trial_s

    @property
    def specs(self) -> list[str]:
        """The values of ``--compress``."""
        return [candidate.spec for candidate in self.candidates.values()]


@dataclass(frozen=True)
class AutoChoice:
    """The chosen compressors.

    Args:
        uncompressed: the run with the specs of the user alone.
        chosen: the chosen set.
        points: choice at each point that has traffic and no spec of the user.
        considered: number of sets of compressors within the budget.
        trials: sets whose iterations were timed; empty if the choice is by prediction.
    """

    uncompressed: CompressorSet
    chosen: CompressorSet
    points: Sequence[PointChoice]
    considered: int
    trials: Sequence[CompressorSet] = ()


def read_ladders(config: RunConfig, choice: Choice, cluster: Cluster) -> Ladders:
    """Candidates of each point that has traffic in a choice and no spec of the user, as the compressors declare them.

    Sums in two levels are candidates where several nodes have several replicas each.

    Args:
        config: resolved configuration; its own specs are those of the user.
        choice: the layout.
        cluster: the numbers of devices and nodes.

    Raises:
        UserError: when a compressor declares options that it cannot read.
    """
    registry = build_registry(config.compression.compress_module)
    length = RunLength(config.training.planned_iters or 1_000_000)
    two_levels = 1 < wires_of(cluster, choice).dp.per_node < choice.dp
    user_points = {point_name(spec) for spec in choice.specs}
    ladders: dict[Point, list[CandidateSpec]] = {}
    for point in Point:
        if not point.compressible or point is Point.OUTER or point.value in user_points:
            continue
        if why_no_traffic(config.model, config.parallel, choice.world_size, point):
            continue
        for name in registry.names:
            for candidate in candidates_of(registry, name, point, config.model.hidden_size):
                spec = read_specs([candidate.spec], registry, length)[point]
                refused = refusal_reason(config, replace(choice, specs=(*choice.specs, candidate.spec))) is not None
                if not refused and (two_levels or not (point.is_reduction and spec.make_rounds().traits.levels)):
                    ladders.setdefault(point, []).append(candidate)
    return ladders


def candidates_of(registry: Registry, name: str, point: Point, hidden_size: int) -> list[CandidateSpec]:
    """The settings of a compressor that may be chosen at a point."""
    return [
        CandidateSpec(rung.spec(point, name, hidden_size), rung.highest_increase, rung.mean_increase, rung.residual)
        for rung in registry[name].ladder.get(point, ())
    ]


def affordable(ladders: Ladders, budget: float) -> Ladders:
    """The candidates whose own increase of the loss is within a budget; points without one keep none."""
    return {
        point: [candidate for candidate in candidates if candidate.increase <= budget]
        for point, candidates in ladders.items()
    }


def candidate_specs(ladders: Ladders) -> list[str]:
    """Specs of all candidates."""
    return [candidate.spec for candidates in ladders.values() for candidate in candidates]


class CompressorSearch:
    """All sets of candidates within a budget, and the choice among them.

    Args:
        predictor: predictor of the model on the cluster.
        choice: the layout, with the specs of the user.
        ladders: candidates by point.
        budget: largest acceptable sum of increases of the validation loss, in percent.
        memory_gib: memory of a device. If the run exceeds it without compressors, sets may not exceed that.

    ``sets`` holds the prediction of every set, so a choice by prediction is exact. The first is empty.

    Raises:
        UserError: when a set cannot be predicted.
    """

    def __init__(
        self, predictor: Predictor, choice: Choice, ladders: Ladders, budget: float, memory_gib: float
    ) -> None:
        self.predictor, self._choice, self._budget = predictor, choice, budget
        self._ladders = affordable(ladders, budget)
        uncompressed = CompressorSet({}, predictor.predict(choice))
        self._memory_limit = max(memory_gib * 2**30, uncompressed.prediction.memory_bytes)
        self.sets = [uncompressed]
        for members in itertools.product(*([None, *candidates] for candidates in self._ladders.values())):
            candidates = {
                point: member for point, member in zip(self._ladders, members, strict=True) if member is not None
            }
            if candidates and sum(candidate.increase for candidate in candidates.values()) <= budget:
                compressors = CompressorSet(candidates, self._predict(candidates))
                if compressors.prediction.memory_bytes <= self._memory_limit:
                    self.sets.append(compressors)

    def contenders(self) -> list[CompressorSet]:
        """Sets worth timing: no compressors and, if any are nearly as fast as the fastest prediction, up to
        ``MAX_TRIALS`` of them, or a single one if none is predicted to gain; empty if compressors cannot gain."""
        limit_s = min(candidate_set.seconds for candidate_set in self.sets) * (1 + TRIAL_MARGIN)
        fast_sets = [candidate_set for candidate_set in self.sets[1:] if candidate_set.seconds <= limit_s]
        if not fast_sets:
            return []
        mildest_set = _mildest_of_fastest(fast_sets)
        fast_sets.remove(mildest_set)
        fast_sets.sort(key=lambda candidate_set: candidate_set.seconds)
        may_gain = limit_s <= self.sets[0].seconds * (1 - WORTHWHILE) * (1 + TRIAL_MARGIN)
        return [self.sets[0], mildest_set, *fast_sets[: MAX_TRIALS - 1 if may_gain else 0]]

    def choose(self, trials: Sequence[CompressorSet] = ()) -> AutoChoice:
        """Choose a set: none if that is as fast as the fastest set, within ``WORTHWHILE``; otherwise the set with the
        lowest increase among those that are.

        Args:
            trials: sets whose iterations were timed, the first without compressors, of which only those that gain may
                be chosen; empty to choose by prediction.
        """
        sets = trials or self.sets
        chosen = _mildest_of_fastest([trial for trial in trials if trial.gains] or trials[:1] or self.sets)
        points = [self._explain(point, chosen, trials) for point in self._ladders]
        return AutoChoice(sets[0], chosen, points, len(self.sets), trials)

    def _predict(self, candidates: Mapping[Point, CandidateSpec]) -> Prediction:
        specs = (candidate.spec for candidate in candidates.values())
        return self.predictor.predict(replace(self._choice, specs=(*self._choice.specs, *specs)))

    def _explain(self, point: Point, chosen: CompressorSet, trials: Sequence[CompressorSet]) -> PointChoice:
        """The choice at a point with what it saves, or the reason why nothing is chosen there."""
        seconds = chosen.prediction.seconds
        if point in chosen.candidates:
            without_point = {p: candidate for p, candidate in chosen.candidates.items() if p is not point}
            return PointChoice(point, chosen.candidates[point], self._predict(without_point).seconds - seconds)
        if not self._ladders[point]:
            return PointChoice(point, None, 0.0, f"each compressor costs more than {self._budget:g}% of loss")
        predictions = {
            candidate: self._predict({**chosen.candidates, point: candidate}) for candidate in self._ladders[point]
        }
        fastest = min(predictions, key=lambda candidate: predictions[candidate].seconds)
        saved_s = seconds - predictions[fastest].seconds
        name = fastest.spec.partition("=")[2]
        if saved_s <= 0.0:
            reason = "coding would take longer than it saves"
        elif saved_s <= WORTHWHILE * seconds:
            reason = f"{name} would save {saved_s:.3g} s, too little"
        elif predictions[fastest].memory_bytes > self._memory_limit:
            reason = f"{name} would save {saved_s:.3g} s, but does not fit into memory"
        elif fastest.increase > self._budget - chosen.increase:
            reason = f"{name} would save {saved_s:.3g} s, but costs up to {fastest.increase:.2f}% of loss"
        elif any(point in trial.candidates for trial in trials):
            reason = f"{name} was to save {saved_s:.3g} s, but trial steps show no gain"
        else:
            reason = f"{name} would save {saved_s:.3g} s, together with other points too little"
        return PointChoice(point, None, saved_s, reason)


def _mildest_of_fastest(sets: Sequence[CompressorSet]) -> CompressorSet:
    """The set with the lowest increase of the loss among those as fast as the fastest, within ``WORTHWHILE``."""
    fastest_s = min(candidate_set.seconds for candidate_set in sets)
    fast_sets = [candidate_set for candidate_set in sets if candidate_set.seconds * (1 - WORTHWHILE) <= fastest_s]
    return min(fast_sets, key=lambda s: (bool(s.candidates), s.increase, s.seconds))


def fit_together(sets: Sequence[CompressorSet], memory_gib: float) -> bool:
    """Whether the engines of all sets fit into a device's memory at the same time."""
    return sum(each.prediction.memory_bytes for each in sets) <= _MEMORY_SHARE * memory_gib * 2**30


def report(result: AutoChoice, budget: float, suggested: Sequence[str] = ()) -> str:
    """Table of the choice: for each point what was chosen, what it saves and costs, and the flags that repeat it.

    Args:
        result: the choice.
        budget: largest acceptable increase of the validation loss, in percent.
        suggested: other settings that would save time.
    """
    before_s, after_s = result.uncompressed.seconds, result.chosen.seconds
    lines = [
        f"--compress auto: {'measured' if result.trials else 'predicted'} {after_s:.3g} s an iteration, {before_s:.3g} "
        f"s without: {before_s / after_s:.2f} times as fast; validation loss at most {result.chosen.increase:.2f}% "
        f"higher (--max-loss-increase {budget:g}), as measured on a small GPT"
    ]
    for point in result.points:
        name = point.point.value
        if point.candidate is None:
            lines.append(f"  {name:<13} nothing: {point.reason}")
        else:
            cost = f"saves {point.saved_s:.3g} s, loss at most {point.candidate.increase:.2f}% higher"
            lines.append(f"  {name:<13} {point.candidate.spec.partition('=')[2]}: {cost}")
    for trial in result.trials:
        specs_text = " ".join(trial.specs) or "nothing"
        lines.append(f"  trial steps: {trial.seconds:.3g} s (predicted: {trial.prediction.seconds:.3g} s) {specs_text}")
    lines += [f"  not switched on: {suggestion}" for suggestion in suggested]
    if not result.points:
        lines.append(f"  {NOTHING_TO_CHOOSE}")
    elif result.chosen.candidates:
        lines.append(f"  the same by hand: {' '.join(f'--compress {spec}' for spec in result.chosen.specs)}")
    return "\n".join(lines)
