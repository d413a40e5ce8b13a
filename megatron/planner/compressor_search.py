"""Exact search for the fastest sets of compressors whose measured cost in loss fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import MappingProxyType

from megatron.compression.points import Point
from megatron.planner.candidates import CandidateSpec, Ladders, filter_by_budget
from megatron.planner.choice import Choice
from megatron.planner.costs import INNER_POINTS
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.settings import Settings, apply_settings, flags_of

WORTHWHILE = 0.03
"""Share of an iteration that compressors and settings must save; sets this close to the fastest count as equally fast.

Neither predictions nor trial steps are more accurate than this.
"""

MAX_TRIALS = 2
"""Maximum number of sets that are timed, in addition to no compressors.

The planner is less accurate about the gain of compression than about differences between compressors.
"""

_PASS_POINTS = (Point.PP_FWD, Point.PP_BWD, *INNER_POINTS)
"""Points whose traffic is part of the forward and backward passes."""

_ROUNDING = 1e-9
"""Share by which rounding may raise a lower bound."""


@dataclass(frozen=True)
class CompressorSet:
    """Compressors and settings that a run may have beside those of the user.

    Args:
        candidates: the compressors by point; points without one are missing.
        prediction: prediction of an iteration with them and with the specs of the user.
        settings: settings that the user has not set.
        trial_s: measured seconds of an iteration; None if none was run.
        gains: whether trial steps have shown that it saves ``WORTHWHILE`` of an iteration.
    """

    candidates: Mapping[Point, CandidateSpec]
    prediction: Prediction
    settings: Settings = field(default_factory=dict)
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

    @property
    def flags(self) -> list[str]:
        """The flags that give a run these compressors and settings."""
        return [*(f"--compress {spec}" for spec in self.specs), *flags_of(self.settings)]


@dataclass(frozen=True)
class _PartialSet:
    """Compressors of some points, with a lower bound on the seconds that depend on them."""

    candidates: Mapping[Point, CandidateSpec]
    bound_s: float


class CompressorSearch:
    """The fastest sets of candidates within a budget.

    Args:
        predictor: predictor of the model on the cluster.
        choice: the layout, with the specs of the user.
        ladders: candidates by point.
        budget: largest acceptable sum of increases of the validation loss, in percent.
        memory_gib: memory of a device. If the run exceeds it without compressors, sets may not exceed that.
        settings: settings that the run has beside those of the user.

    ``sets`` are found by exact branch and bound, since there may be 100,000 sets. The compressors inside layers and of
    pipeline messages determine the passes of an iteration; for each combination of them, ``Predictor.lower_bound``
    bounds their seconds in any order of passes. Compressors of the other points only determine what follows the last
    pass, bounded by ``Predictor.least_update_s``. So the sum of two bounds is below the seconds of every set that
    consists of the two parts, and parts whose sum exceeds the seconds of the sets found so far are left out.
    Combinations at fewer points have no bound of their own: messages share links, so that a compressor that makes a
    message faster can delay another one.
    """

    def __init__(
        self,
        predictor: Predictor,
        choice: Choice,
        ladders: Ladders,
        budget: float,
        memory_gib: float,
        settings: Settings = MappingProxyType({}),
    ) -> None:
        self.predictor, self.settings, self.budget = predictor, settings, budget
        self._choice = apply_settings(choice, settings)
        self.ladders = filter_by_budget(ladders, budget)
        self._memory_limit = max(memory_gib * 2**30, predictor.memory_bytes(self._choice))
        self._passes_s = cache(lambda number: predictor.passes_s(self.apply(self._passes[number].candidates)))

    @cached_property
    def sets(self) -> list[CompressorSet]:
        """All sets that the choice can depend on: no compressors, the ``MAX_TRIALS`` fastest sets, and the one with the
        lowest increase among those as fast as the fastest, within ``WORTHWHILE``.

        Raises:
            UserError: when a set cannot be predicted.
        """
        fastest = self._find_fastest()
        selected = [candidates for _, candidates in fastest]
        if fastest:
            lowest_set = self._find_lowest_increase(fastest[0][0])
            selected = [lowest_set, *(candidates for candidates in selected if candidates != lowest_set)]
        return [self.predict_set({}), *map(self.predict_set, selected)]

    @property
    def considered(self) -> int:
        """Number of sets within the budget."""
        return len(self._by_increase)

    @cached_property
    def _passes(self) -> list[_PartialSet]:
        return self._combine_candidates(self.predictor.lower_bound, lambda point: point in _PASS_POINTS)

    @cached_property
    def _updates(self) -> list[_PartialSet]:
        return self._combine_candidates(self.predictor.least_update_s, lambda point: point not in _PASS_POINTS)

    @cached_property
    def _by_increase(self) -> list[tuple[float, int, int]]:
        """Increases of all sets within the budget, ascending, with the numbers of their two parts."""
        return sorted(
            (increase, first, second)
            for first, passes in enumerate(self._passes)
            for second, update in enumerate(self._updates)
            if (increase := _total_increase(self._merge(passes, update))) <= self.budget
        )

    def predict_set(self, candidates: Mapping[Point, CandidateSpec]) -> CompressorSet:
        """Predict an iteration with some candidates."""
        return CompressorSet(candidates, self.predictor.predict(self.apply(candidates)), self.settings)

    def find_set(self, specs: Sequence[str]) -> CompressorSet:
        """Find the set with some candidates' specs."""
        candidates = ((point, candidate) for point, ladder in self.ladders.items() for candidate in ladder)
        return self.predict_set({point: candidate for point, candidate in candidates if candidate.spec in specs})

    def apply(self, candidates: Mapping[Point, CandidateSpec]) -> Choice:
        """The layout with some candidates, beside the specs of the user."""
        specs = (candidate.spec for candidate in candidates.values())
        return replace(self._choice, specs=(*self._choice.specs, *specs))

    def _combine_candidates(
        self, bound_s: Callable[[Choice], float], belongs: Callable[[Point], bool]
    ) -> list[_PartialSet]:
        """Combine candidates at some points in all ways within the budget; in the order of their bounds."""
        combinations: list[dict[Point, CandidateSpec]] = [{}]
        for point in filter(belongs, self.ladders):
            extended = ({**smaller, point: candidate} for smaller in combinations for candidate in self.ladders[point])
            combinations += [each for each in extended if _total_increase(each) <= self.budget]
        partial_sets = [_PartialSet(each, bound_s(self.apply(each)) * (1 - _ROUNDING)) for each in combinations]
        return sorted(partial_sets, key=lambda partial_set: partial_set.bound_s)

    def _merge(self, passes: _PartialSet, update: _PartialSet) -> dict[Point, CandidateSpec]:
        """Merge the candidates of two partial sets, in the order of the points."""
        candidates = {**passes.candidates, **update.candidates}
        return {point: candidates[point] for point in self.ladders if point in candidates}

    def fits(self, candidates: Mapping[Point, CandidateSpec]) -> bool:
        """Whether a set fits into memory."""
        return self.predictor.memory_bytes(self.apply(candidates)) <= self._memory_limit

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
                if not candidates or _total_increase(candidates) > self.budget:
                    continue
                seconds = self.seconds(candidates)
                if seconds < limit_s and self.fits(candidates):
                    fastest.append((seconds, candidates))
                    fastest.sort(key=lambda pair: pair[0])
                    del fastest[MAX_TRIALS:]
                    limit_s = fastest[-1][0] if len(fastest) == MAX_TRIALS else math.inf
        return fastest

    def _find_lowest_increase(self, fastest_s: float) -> dict[Point, CandidateSpec]:
        """Find the set with the lowest increase among those as fast as the fastest; of several, the fastest."""
        lowest_set: dict[Point, CandidateSpec] = {}
        lowest_set_s, limit_s, lowest = math.inf, fastest_s / (1 - WORTHWHILE), math.inf
        for increase, first, second in self._by_increase:
            if increase > lowest:
                break
            passes, update = self._passes[first], self._updates[second]
            if passes.bound_s + update.bound_s > limit_s:
                continue
            if self._passes_s(first) * (1 - _ROUNDING) + update.bound_s > limit_s:
                continue
            candidates = self._merge(passes, update)
            seconds = self.seconds(candidates) if candidates else math.inf
            if seconds * (1 - WORTHWHILE) <= fastest_s and seconds < lowest_set_s and self.fits(candidates):
                lowest_set, lowest_set_s, lowest = candidates, seconds, increase
        return lowest_set

    def seconds(self, candidates: Mapping[Point, CandidateSpec]) -> float:
        """Predicted seconds of an iteration with some candidates."""
        return self.predictor.seconds(self.apply(candidates))


def _total_increase(candidates: Mapping[Point, CandidateSpec]) -> float:
    """Sum of the increases of the loss, in percent."""
    return sum(candidate.increase for candidate in candidates.values())
