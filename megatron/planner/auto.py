"""Choice of ``--compress auto``: the fastest compressors whose measured cost in loss fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron.compression.points import Point
from megatron.planner.candidates import CandidateSpec, Ladders, filter_by_budget
from megatron.planner.choice import Choice
from megatron.planner.costs import INNER_POINTS
from megatron.planner.predict import Prediction, Predictor

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

_PASS_POINTS = (Point.PP_FWD, Point.PP_BWD, *INNER_POINTS)
"""Points whose traffic is part of the forward and backward passes."""

_ROUNDING = 1e-9
"""Share by which rounding may raise a lower bound."""

NOTHING_TO_CHOOSE = (
    "--compress auto: no point without a spec has both traffic and a compressor to choose; a single process has no "
    "traffic (start several with tools/launch.py)"
)


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
        return _total_increase(self.candidates)

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


@dataclass(frozen=True)
class _PartialSet:
    """Compressors of some points, with a lower bound on the seconds that depend on them."""

    candidates: Mapping[Point, CandidateSpec]
    bound_s: float


class CompressorSearch:
    """The fastest sets of candidates within a budget, and the choice among them.

    Args:
        predictor: predictor of the model on the cluster.
        choice: the layout, with the specs of the user.
        ladders: candidates by point.
        budget: largest acceptable sum of increases of the validation loss, in percent.
        memory_gib: memory of a device. If the run exceeds it without compressors, sets may not exceed that.

    ``sets`` holds all sets that the choice can depend on: no compressors, the ``MAX_TRIALS`` fastest sets, and the one
    with the lowest increase among those as fast as the fastest, within ``WORTHWHILE``.

    They are found by exact branch and bound, since there may be 100,000 sets. The compressors inside layers and of
    pipeline messages determine the passes of an iteration; for each combination of them, ``Predictor.lower_bound``
    bounds their seconds in any order of passes. Compressors of the other points only determine what follows the last
    pass, bounded by ``Predictor.least_update_s``. So the sum of two bounds is below the seconds of every set that
    consists of the two parts, and parts whose sum exceeds the seconds of the sets found so far are left out.
    Combinations at fewer points have no bound of their own: messages share links, so that a compressor that makes a
    message faster can delay another one.

    Raises:
        UserError: when a set cannot be predicted.
    """

    def __init__(
        self, predictor: Predictor, choice: Choice, ladders: Ladders, budget: float, memory_gib: float
    ) -> None:
        self.predictor, self._choice, self._budget = predictor, choice, budget
        self._ladders = filter_by_budget(ladders, budget)
        uncompressed = self.predict_set({})
        self._memory_limit = max(memory_gib * 2**30, uncompressed.prediction.memory_bytes)
        self._passes = self._combine_candidates(predictor.lower_bound, lambda point: point in _PASS_POINTS)
        self._updates = self._combine_candidates(predictor.least_update_s, lambda point: point not in _PASS_POINTS)
        by_increase = sorted(
            (increase, first, second)
            for first, passes in enumerate(self._passes)
            for second, update in enumerate(self._updates)
            if (increase := _total_increase(self._merge(passes, update))) <= budget
        )
        self._passes_s = cache(lambda number: predictor.passes_s(self._apply(self._passes[number].candidates)))
        self.considered = len(by_increase)
        fastest = self._find_fastest()
        selected = [candidates for _, candidates in fastest]
        if fastest:
            lowest_set = self._find_lowest_increase(by_increase, fastest[0][0])
            selected = [lowest_set, *(candidates for candidates in selected if candidates != lowest_set)]
        self.sets = [uncompressed, *map(self.predict_set, selected)]

    def predict_set(self, candidates: Mapping[Point, CandidateSpec]) -> CompressorSet:
        """Predict an iteration with some candidates."""
        return CompressorSet(candidates, self.predictor.predict(self._apply(candidates)))

    def find_set(self, specs: Sequence[str]) -> CompressorSet:
        """Find the set with some candidates' specs."""
        for known_set in self.sets:
            if known_set.specs == specs:
                return known_set
        candidates = ((point, candidate) for point, ladder in self._ladders.items() for candidate in ladder)
        return self.predict_set({point: candidate for point, candidate in candidates if candidate.spec in specs})

    def _apply(self, candidates: Mapping[Point, CandidateSpec]) -> Choice:
        specs = (candidate.spec for candidate in candidates.values())
        return replace(self._choice, specs=(*self._choice.specs, *specs))

    def _combine_candidates(
        self, bound_s: Callable[[Choice], float], belongs: Callable[[Point], bool]
    ) -> list[_PartialSet]:
        """Combine candidates at some points in all ways within the budget; in the order of their bounds."""
        combinations: list[dict[Point, CandidateSpec]] = [{}]
        for point in filter(belongs, self._ladders):
            extended = ({**smaller, point: candidate} for smaller in combinations for candidate in self._ladders[point])
            combinations += [each for each in extended if _total_increase(each) <= self._budget]
        partial_sets = [_PartialSet(each, bound_s(self._apply(each)) * (1 - _ROUNDING)) for each in combinations]
        return sorted(partial_sets, key=lambda partial_set: partial_set.bound_s)

    def _merge(self, passes: _PartialSet, update: _PartialSet) -> dict[Point, CandidateSpec]:
        """Merge the candidates of two partial sets, in the order of the points."""
        candidates = {**passes.candidates, **update.candidates}
        return {point: candidates[point] for point in self._ladders if point in candidates}

    def _fits(self, candidates: Mapping[Point, CandidateSpec]) -> bool:
        """Whether a set fits into memory."""
        return self.predictor.memory_bytes(self._apply(candidates)) <= self._memory_limit

    def _find_fastest(self) -> list[tuple[float, dict[Point, CandidateSpec]]]:
        """Find up to ``MAX_TRIALS`` of the fastest sets with their seconds, the fastest first."""
        fastest: list[tuple[float, dict[Point, CandidateSpec]]] = []
        limit_s = math.inf
        for number, passes in enumerate(self._passes):
            if passes.bound_s + self._updates[0].bound_s >= limit_s:
                break
            passes_s = self._passes_s(number) * (1 - _ROUNDING)
            for update in self._updates:
                if passes_s + update.bound_s >= limit_s:
                    break
                candidates = self._merge(passes, update)
                if not candidates or _total_increase(candidates) > self._budget:
                    continue
                seconds = self._seconds(candidates)
                if seconds < limit_s and self._fits(candidates):
                    fastest.append((seconds, candidates))
                    fastest.sort(key=lambda pair: pair[0])
                    del fastest[MAX_TRIALS:]
                    limit_s = fastest[-1][0] if len(fastest) == MAX_TRIALS else math.inf
        return fastest

    def _find_lowest_increase(
        self, by_increase: Sequence[tuple[float, int, int]], fastest_s: float
    ) -> dict[Point, CandidateSpec]:
        """Find the set with the lowest increase among those as fast as the fastest; of several, the fastest."""
        lowest_set: dict[Point, CandidateSpec] = {}
        lowest_set_s, limit_s, lowest = math.inf, fastest_s / (1 - WORTHWHILE), math.inf
        for increase, first, second in by_increase:
            if increase > lowest:
                break
            passes, update = self._passes[first], self._updates[second]
            if passes.bound_s + update.bound_s > limit_s:
                continue
            if self._passes_s(first) * (1 - _ROUNDING) + update.bound_s > limit_s:
                continue
            candidates = self._merge(passes, update)
            seconds = self._seconds(candidates) if candidates else math.inf
            if seconds * (1 - WORTHWHILE) <= fastest_s and seconds < lowest_set_s and self._fits(candidates):
                lowest_set, lowest_set_s, lowest = candidates, seconds, increase
        return lowest_set

    def contenders(self) -> list[CompressorSet]:
        """Sets worth timing: no compressors and, if any are nearly as fast as the fastest prediction, up to
        ``MAX_TRIALS`` of them, or a single one if none is predicted to gain; empty if compressors cannot gain."""
        limit_s = min(candidate_set.seconds for candidate_set in self.sets) * (1 + TRIAL_MARGIN)
        fast_sets = [candidate_set for candidate_set in self.sets[1:] if candidate_set.seconds <= limit_s]
        if not fast_sets:
            return []
        lowest_set = _lowest_increase_of_fastest(fast_sets)
        fast_sets.remove(lowest_set)
        fast_sets.sort(key=lambda candidate_set: candidate_set.seconds)
        may_gain = limit_s <= self.sets[0].seconds * (1 - WORTHWHILE) * (1 + TRIAL_MARGIN)
        return [self.sets[0], lowest_set, *fast_sets[: MAX_TRIALS - 1 if may_gain else 0]]

    def choose(self, trials: Sequence[CompressorSet] = ()) -> AutoChoice:
        """Choose a set: none if that is as fast as the fastest set, within ``WORTHWHILE``; otherwise the set with the
        lowest increase among those that are.

        Args:
            trials: sets whose iterations were timed, the first without compressors, of which only those that gain may
                be chosen; empty to choose by prediction.
        """
        sets = trials or self.sets
        chosen = _lowest_increase_of_fastest([trial for trial in trials if trial.gains] or trials[:1] or self.sets)
        points = [self._explain(point, chosen, trials) for point in self._ladders]
        return AutoChoice(sets[0], chosen, points, self.considered, trials)

    def _seconds(self, candidates: Mapping[Point, CandidateSpec]) -> float:
        return self.predictor.seconds(self._apply(candidates))

    def _explain(self, point: Point, chosen: CompressorSet, trials: Sequence[CompressorSet]) -> PointChoice:
        """Explain the choice at a point: its savings, or why nothing is chosen there."""
        seconds = chosen.prediction.seconds
        if point in chosen.candidates:
            without_point = {p: candidate for p, candidate in chosen.candidates.items() if p is not point}
            return PointChoice(point, chosen.candidates[point], self._seconds(without_point) - seconds)
        if not self._ladders[point]:
            return PointChoice(point, None, 0.0, f"each compressor costs more than {self._budget:g}% of loss")
        seconds_with = {
            candidate: self._seconds({**chosen.candidates, point: candidate}) for candidate in self._ladders[point]
        }
        fastest = min(seconds_with, key=lambda candidate: seconds_with[candidate])
        saved_s = seconds - seconds_with[fastest]
        name = fastest.spec.partition("=")[2]
        if saved_s <= 0.0:
            reason = "coding would take longer than it saves"
        elif saved_s <= WORTHWHILE * seconds:
            reason = f"{name} would save {saved_s:.3g} s, too little"
        elif not self._fits({**chosen.candidates, point: fastest}):
            reason = f"{name} would save {saved_s:.3g} s, but does not fit into memory"
        elif fastest.increase > self._budget - chosen.increase:
            reason = f"{name} would save {saved_s:.3g} s, but costs up to {fastest.increase:.2f}% of loss"
        elif any(point in trial.candidates for trial in trials):
            reason = f"{name} was to save {saved_s:.3g} s, but trial steps show no gain"
        else:
            reason = f"{name} would save {saved_s:.3g} s, together with other points too little"
        return PointChoice(point, None, saved_s, reason)


def _total_increase(candidates: Mapping[Point, CandidateSpec]) -> float:
    """Sum of the increases of the loss, in percent."""
    return sum(candidate.increase for candidate in candidates.values())


def _lowest_increase_of_fastest(sets: Sequence[CompressorSet]) -> CompressorSet:
    """The set with the lowest increase of the loss among those as fast as the fastest, within ``WORTHWHILE``."""
    fastest_s = min(candidate_set.seconds for candidate_set in sets)
    fast_sets = [candidate_set for candidate_set in sets if candidate_set.seconds * (1 - WORTHWHILE) <= fastest_s]
    return min(fast_sets, key=lambda s: (bool(s.candidates), s.increase, s.seconds))


def fit_together(sets: Sequence[CompressorSet], memory_gib: float) -> bool:
    """Whether the engines of all sets fit into a device's memory at the same time."""
    return sum(each.prediction.memory_bytes for each in sets) <= _MEMORY_SHARE * memory_gib * 2**30


def report(result: AutoChoice, budget: float, suggested: Sequence[str] = ()) -> str:
    """Table of the choice: each point's compressor, its savings and costs, and the flags that repeat the choice.

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
            cost = f"predicted to save {point.saved_s:.3g} s, loss at most {point.candidate.increase:.2f}% higher"
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
