"""Exact search for the fastest sets of compressors whose measured cost in loss fits a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from megatron.compression.points import EXPERT_POINTS, Point
from megatron.planner.candidates import CandidateSpec, Ladders, filter_by_budget
from megatron.planner.choice import Choice
from megatron.planner.costs import TP_POINTS
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

PASS_GROUPS: Sequence[tuple[Point, ...]] = (
    (Point.PP_FWD,),
    (Point.PP_BWD,),
    TP_POINTS,
    *((point,) for point in EXPERT_POINTS),
)
"""Points whose traffic is part of the passes; changes of ``Predictor.pass_bounds_s`` add up over the groups."""

_PASS_POINTS = [point for group in PASS_GROUPS for point in group]

_BEAM, _BEAM_TRIALS = 256, 8
"""Number of combinations of passes with low bounds that the search begins with, and of those that are predicted."""

_ROUNDING = 1e-9
"""Share by which rounding may raise a lower bound."""

Floats = NDArray[np.float64]


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
class _PartialSets:
    """Sets of candidates at some points that may be part of a set to find.

    Args:
        members: the sets.
        bounds_s: for each, a lower bound on the seconds that depend on it.
        increases: for each, the increase of the validation loss, in percent.
    """

    members: Sequence[Mapping[Point, CandidateSpec]]
    bounds_s: Floats
    increases: Floats


class CompressorSearch:
    """The fastest sets of candidates within a budget.

    Args:
        predictor: predictor of the model on the cluster.
        choice: the layout, with the specs of the user.
        ladders: candidates by point.
        budget: largest acceptable sum of increases of the validation loss, in percent.
        memory_gib: memory of a device. If the run exceeds it without compressors, sets may not exceed that.
        settings: settings that the run has beside those of the user.

    ``sets`` are found by exact branch and bound, since there may be billions of sets. The compressors inside layers and
    of pipeline messages determine the passes of an iteration, whose seconds in any order are bounded by the largest of
    ``Predictor.pass_bounds_s``. What a compressor changes in each of these bounds does not depend on the compressors of
    other points, so the bounds of all sets are sums; and with the largest savings at the points that are still open,
    those of all sets that a part of them can become. Compressors of the other points only determine what follows the
    last pass, bounded by ``Predictor.least_update_s``, for those that the rest of the budget allows. So the sum of both
    bounds is below the seconds of every set with these parts. Parts are left out whose sum exceeds the seconds of known
    sets, at first of a few with low bounds.

    The order of the passes depends on all compressors of messages: these share links, so that a compressor that makes
    a message faster can delay another one. Therefore only bounds are added up; seconds are those of a simulation.
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
        self._passes_s = cache(lambda number: predictor.passes_s(self.apply(self._passes.members[number])))

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

    @cached_property
    def considered(self) -> int:
        """Number of sets within the budget."""
        points = list(self.ladders)
        halves = (self._list_increases(points[: len(points) // 2]), self._list_increases(points[len(points) // 2 :]))
        first, second = (np.sort(increases) for increases in halves)
        return int(np.searchsorted(first, self.budget * (1 + _ROUNDING) - second, side="right").sum())

    def _list_increases(self, points: Sequence[Point]) -> Floats:
        """Increases of all sets of candidates at some points."""
        increases = np.zeros(1)
        for point in points:
            steps = np.array([0.0, *(candidate.increase for candidate in self.ladders[point])])
            increases = np.add.outer(increases, steps).ravel()
        return increases

    @cached_property
    def _updates(self) -> _PartialSets:
        points = [point for point in self.ladders if point not in _PASS_POINTS]
        members = self._combine(points)
        bounds_s = np.array([self.predictor.least_update_s(self.apply(each)) for each in members])
        order = np.argsort(bounds_s, kind="stable")
        members = [members[number] for number in order]
        return _PartialSets(members, bounds_s[order] * (1 - _ROUNDING), np.array(list(map(_total_increase, members))))

    @cached_property
    def _passes(self) -> _PartialSets:
        """Passes of the sets that may be as fast as the fastest ones found among few of them."""
        seconds_s = [math.inf] * MAX_TRIALS
        few, update_increases = self._combine_passes(width=_BEAM), self._updates.increases
        for passes, increase in list(zip(few.members, few.increases, strict=True))[:_BEAM_TRIALS]:
            second = int(np.argmax(update_increases <= self.budget - increase))  # the one with the lowest bound
            candidates = self._in_order({**passes, **self._updates.members[second]})
            if candidates and _total_increase(candidates) <= self.budget and self.fits(candidates):
                seconds_s.append(self.seconds(candidates))
        seconds_s.sort()
        limit_s = max(seconds_s[0] / (1 - WORTHWHILE), seconds_s[MAX_TRIALS - 1])
        return self._combine_passes(limit_s=limit_s * (1 + _ROUNDING))

    def _combine_passes(self, limit_s: float = math.inf, width: int | None = None) -> _PartialSets:
        """Combine candidates at the points of passes, in the order of the bounds of the fastest sets with them.

        Args:
            limit_s: seconds above which sets are left out.
            width: number of combinations to keep at each point, those with the lowest bounds; None for all.
        """
        bounds, chosen, increases = self._pass_bounds[np.newaxis], np.zeros((1, 0), dtype=np.int16), np.zeros(1)
        totals_s = np.zeros(1)
        for number, (members, change) in enumerate(self._pass_options):
            steps = np.array(list(map(_total_increase, members)))
            sums = np.add.outer(increases, steps)
            kept, added = np.nonzero(sums <= self.budget * (1 + _ROUNDING))
            increases, bounds = sums[kept, added], bounds[kept] + change[added]
            open_savings = sum(later.min(axis=0) for _, later in self._pass_options[number + 1 :])
            totals_s = (bounds + open_savings).max(axis=1) * (1 - _ROUNDING) + self._least_update_s(increases)
            order = np.argsort(totals_s, kind="stable")[:width]
            order = order[totals_s[order] <= limit_s]
            totals_s, increases, bounds = totals_s[order], increases[order], bounds[order]
            chosen = np.column_stack((chosen[kept[order]], added[order]))
        sets = [
            {
                point: each
                for (members, _), n in zip(self._pass_options, row, strict=True)
                for point, each in members[n].items()
            }
            for row in chosen
        ]
        return _PartialSets(sets, bounds.max(axis=1) * (1 - _ROUNDING), increases)

    @cached_property
    def _pass_bounds(self) -> Floats:
        """Bounds on the seconds of the passes without candidates."""
        return np.array(self.predictor.pass_bounds_s(self.apply({})))

    @cached_property
    def _pass_options(self) -> list[tuple[Sequence[Mapping[Point, CandidateSpec]], Floats]]:
        """Sets of candidates at each group of points, and what they change in each of the bounds."""
        groups = [self._combine([point for point in self.ladders if point in group]) for group in PASS_GROUPS]
        return [
            (
                members,
                np.array([self.predictor.pass_bounds_s(self.apply(each)) for each in members]) - self._pass_bounds,
            )
            for members in groups
        ]

    def _least_update_s(self, increases: Floats) -> Floats:
        """Lower bounds on the seconds after passes with these increases: with what the budget leaves."""
        updates = self._updates
        order = np.argsort(updates.increases, kind="stable")
        least_s = np.minimum.accumulate(updates.bounds_s[order])
        remaining = self.budget * (1 + 2 * _ROUNDING) - increases
        result: Floats = least_s[np.searchsorted(updates.increases[order], remaining, side="right") - 1]
        return result

    def _combine(self, points: Sequence[Point]) -> list[dict[Point, CandidateSpec]]:
        """Combine candidates at some points in all ways within the budget."""
        combinations: list[dict[Point, CandidateSpec]] = [{}]
        for point in points:
            extended = ({**smaller, point: candidate} for smaller in combinations for candidate in self.ladders[point])
            combinations += [each for each in extended if _total_increase(each) <= self.budget * (1 + _ROUNDING)]
        return combinations

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

    def _in_order(self, candidates: Mapping[Point, CandidateSpec]) -> dict[Point, CandidateSpec]:
        """The candidates in the order of the points."""
        return {point: candidates[point] for point in self.ladders if point in candidates}

    def _merge(self, first: int, second: int) -> dict[Point, CandidateSpec]:
        """Merge the candidates of the passes and of the update with these numbers."""
        return self._in_order({**self._passes.members[first], **self._updates.members[second]})

    def fits(self, candidates: Mapping[Point, CandidateSpec]) -> bool:
        """Whether a set fits into memory."""
        return self.predictor.memory_bytes(self.apply(candidates)) <= self._memory_limit

    def _find_fastest(self) -> list[tuple[float, dict[Point, CandidateSpec]]]:
        """Find up to ``MAX_TRIALS`` of the fastest sets with their seconds, the fastest first."""
        fastest: list[tuple[float, dict[Point, CandidateSpec]]] = []
        limit_s, updates_s = math.inf, self._updates.bounds_s.tolist()
        totals_s = self._passes.bounds_s + self._least_update_s(self._passes.increases)
        for first in range(len(totals_s)):
            if totals_s[first] >= limit_s:
                break
            passes_s = self._passes_s(first) * (1 - _ROUNDING)
            for second, update_s in enumerate(updates_s):
                if passes_s + update_s >= limit_s:
                    break
                candidates = self._merge(first, second)
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
        passes, updates = self._passes, self._updates
        increases = np.add.outer(passes.increases, updates.increases)
        is_possible = np.add.outer(passes.bounds_s, updates.bounds_s) <= limit_s
        first_numbers, second_numbers = np.nonzero(is_possible & (increases <= self.budget * (1 + _ROUNDING)))
        for number in np.argsort(increases[first_numbers, second_numbers], kind="stable"):
            first, second = int(first_numbers[number]), int(second_numbers[number])
            if increases[first, second] > lowest:
                break
            if self._passes_s(first) * (1 - _ROUNDING) + updates.bounds_s[second] > limit_s:
                continue
            candidates = self._merge(first, second)
            if not candidates or _total_increase(candidates) > self.budget:
                continue
            seconds = self.seconds(candidates)
            if seconds * (1 - WORTHWHILE) <= fastest_s and seconds < lowest_set_s and self.fits(candidates):
                lowest_set, lowest_set_s, lowest = candidates, seconds, float(increases[first, second])
        return lowest_set

    def seconds(self, candidates: Mapping[Point, CandidateSpec]) -> float:
        """Predicted seconds of an iteration with some candidates."""
        return self.predictor.seconds(self.apply(candidates))


def _total_increase(candidates: Mapping[Point, CandidateSpec]) -> float:
    """Sum of the increases of the loss, in percent."""
    return sum(candidate.increase for candidate in candidates.values())
