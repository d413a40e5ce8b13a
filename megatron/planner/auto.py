"""Choice of ``--compress auto``: compressors and settings of the fastest run whose cost in loss fits a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from megatron.compression.points import Point
from megatron.planner.candidates import CandidateSpec, Ladders, accepts_candidate
from megatron.planner.choice import Choice
from megatron.planner.compressor_search import MAX_TRIALS, WORTHWHILE, CompressorSearch, CompressorSet
from megatron.planner.predict import Predictor
from megatron.planner.settings import Settings, apply_settings, find_settings, flags_of

TRIAL_MARGIN = 0.15
"""Sets predicted to take longer than the fastest by more than this share are not timed."""

_MEMORY_SHARE = 0.8
"""Share of a device's memory that the engines of all timed sets may need at the same time."""

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
        saved_s: predicted seconds per iteration that the candidate saves in the chosen set; if there is none, that the
            fastest candidate would save in addition.
        reason: reason why nothing is chosen; empty if something is.
    """

    point: Point
    candidate: CandidateSpec | None
    saved_s: float
    reason: str = ""


@dataclass(frozen=True)
class SettingChoice:
    """The choice of a setting that was predicted to gain.

    Args:
        flag: the flag that switches it on.
        saved_s: predicted seconds per iteration that it saves beside the chosen compressors.
        is_on: whether it is switched on.
    """

    flag: str
    saved_s: float
    is_on: bool


@dataclass(frozen=True)
class MeasuredTraffic:
    """Measured traffic of a point in a step, averaged over the ranks.

    Args:
        sent_bytes: bytes that a rank sends.
        waits: share of the step that a rank waits for it.
    """

    sent_bytes: float
    waits: float


@dataclass(frozen=True)
class LossEstimate:
    """Expected increase of the validation loss with a set, as estimated after its trial steps.

    Args:
        specs: specs that fit the budget: those of the set, or gentler settings.
        increase: the expected increase with them, in percent.
        measured: the part of it that was measured; None if nothing can be measured.
        check_s: seconds of a check.
    """

    specs: Sequence[str]
    increase: float
    measured: float | None
    check_s: float


@dataclass(frozen=True)
class AutoChoice:
    """The chosen compressors and settings.

    Args:
        plain: the run with the specs and settings of the user alone.
        chosen: the chosen set.
        search: the search that found the sets.
        trials: sets whose iterations were timed; empty if the choice is by prediction.
        traffic: traffic of the trial steps without compressors, by point; empty if there were none.
        estimate: the estimated loss of the chosen set; None if it has no compressors.
        bolder: the set that was timed, if it costs too much loss and a gentler one is chosen; None otherwise.
        took_s: seconds that the choice took.
    """

    plain: CompressorSet
    chosen: CompressorSet
    search: AutoSearch
    trials: Sequence[CompressorSet] = ()
    traffic: Mapping[Point, MeasuredTraffic] = field(default_factory=dict)
    estimate: LossEstimate | None = None
    bolder: CompressorSet | None = None
    took_s: float = 0.0

    @property
    def increase(self) -> float:
        """Largest expected increase of the validation loss, in percent, as declared or as estimated."""
        return max(self.chosen.increase, 0.0 if self.estimate is None else self.estimate.increase)

    @cached_property
    def points(self) -> list[PointChoice]:
        """Choice at each point that has traffic and no spec of the user."""
        search = self.search.search_with(self.chosen.settings)
        return [_explain(search, point, self) for point in search.ladders]

    @cached_property
    def settings(self) -> list[SettingChoice]:
        """Choice of each setting that was predicted to gain."""
        settings = self.search.searches[-1].settings
        return [
            SettingChoice(flag, self.search.saved_s(self.chosen, name), name in self.chosen.settings)
            for name, flag in zip(settings, flags_of(settings), strict=True)
        ]

    @property
    def considered(self) -> int:
        """Number of sets of compressors within the budget."""
        return sum(search.considered for search in self.search.searches)


class AutoSearch:
    """The fastest sets of compressors, with and without other settings, and the choice among them.

    The search begins when ``sets`` or the reasons of a choice are read. A rank that only needs sets found by another
    rank does not search.

    Args:
        predictor, choice, ladders, budget, memory_gib: see ``CompressorSearch``.
        free_settings: settings that may be switched on.

    ``searches`` are the search with the settings of the user alone, and any with other settings.
    """

    def __init__(
        self,
        predictor: Predictor,
        choice: Choice,
        ladders: Ladders,
        budget: float,
        memory_gib: float,
        free_settings: Settings,
    ) -> None:
        self.predictor, self._choice, self._ladders = predictor, choice, ladders
        self._budget, self._memory_gib, self._free_settings = budget, memory_gib, free_settings
        self.searches = [CompressorSearch(predictor, choice, ladders, budget, memory_gib)]

    @cached_property
    def sets(self) -> list[CompressorSet]:
        """All sets that the choice can depend on, the run as it is first.

        Raises:
            UserError: when a set cannot be predicted.
        """
        predictions = [candidate_set.prediction for candidate_set in self.searches[0].sets]
        settings = find_settings(self.predictor, predictions, self._free_settings, WORTHWHILE)
        if settings:
            self.search_with(settings)
        return [candidate_set for search in self.searches for candidate_set in search.sets]

    def find_set(self, specs: Sequence[str], settings: Settings) -> CompressorSet:
        """Find the set with some candidates' specs and some settings."""
        return self.search_with(settings).find_set(specs)

    def contenders(self, most: int = MAX_TRIALS) -> list[CompressorSet]:
        """Sets worth timing: the run as it is and up to ``most`` sets that are nearly as fast as the fastest
        prediction, or a single one if none is predicted to gain; empty if nothing can gain. If the first of them has
        settings, the best without settings is timed as well, in case the settings save less than predicted; but not
        with fewer sets than ``MAX_TRIALS``, or if it is to gain less than twice ``WORTHWHILE``, which would take many
        rounds to become certain."""
        plain = self.sets[0]
        limit_s = min(candidate_set.seconds for candidate_set in self.sets) * (1 + TRIAL_MARGIN)
        fast_sets = [candidate_set for candidate_set in self.sets[1:] if candidate_set.seconds <= limit_s]
        if not fast_sets:
            return []
        selected = [plain, _lowest_increase_of_fastest(fast_sets)]
        if limit_s > plain.seconds * (1 - WORTHWHILE) * (1 + TRIAL_MARGIN):
            return selected
        if selected[1].settings and most == MAX_TRIALS:
            without_settings = _lowest_increase_of_fastest(self.searches[0].sets)
            if without_settings.seconds <= plain.seconds * (1 - 2 * WORTHWHILE):
                selected.append(without_settings)
                most += 1
        fast_sets.sort(key=lambda candidate_set: candidate_set.seconds)
        selected += fast_sets[:MAX_TRIALS]
        distinct = [each for number, each in enumerate(selected) if each not in selected[:number]]
        return distinct[: 1 + most]

    def calibrate(self, contenders: Sequence[CompressorSet], seconds: Sequence[float]) -> list[CompressorSet]:
        """Multiply all later predictions by the median ratio of trial steps to predictions.

        Ranks that wait for each other, and other programs, slow whole iterations more than the short operations that
        the predictions are based on. The median, since a single step can be delayed.

        Args:
            contenders: timed sets.
            seconds: measured seconds of an iteration with each set.

        Returns:
            The sets with new predictions.
        """
        ratios = [s / each.prediction.seconds for s, each in zip(seconds, contenders, strict=True)]
        self.predictor.slowdown *= median(ratios)
        return [self.find_set(each.specs, each.settings) for each in contenders]

    def choose(self, trials: Sequence[CompressorSet] = ()) -> AutoChoice:
        """Choose among the sets as fast as the fastest, within ``WORTHWHILE``: the run as it is, if it is among them,
        otherwise the set with the lowest increase.

        Args:
            trials: sets whose iterations were timed, the first without compressors. Only those that gain may be chosen.
                Empty to choose by prediction.
        """
        chosen = _lowest_increase_of_fastest([trial for trial in trials if trial.gains] or trials[:1] or self.sets)
        return AutoChoice((trials or self.sets)[0], chosen, self, trials)

    def ease(self, result: AutoChoice, estimate: LossEstimate) -> AutoChoice:
        """Choose gentler settings if the timed set does not fit the budget, as estimated; nothing if they gain too
        little, by the time of the trial steps and predictions."""
        timed, plain = result.chosen, result.plain
        if list(estimate.specs) == timed.specs:
            return replace(result, estimate=estimate)
        eased = self.find_set(estimate.specs, timed.settings)
        eased_s = timed.seconds * eased.prediction.seconds / timed.prediction.seconds
        result = replace(result, bolder=timed)
        if eased_s > plain.seconds * (1 - WORTHWHILE):
            return replace(result, chosen=plain)
        chosen = replace(eased, trial_s=eased_s, gains=True)
        return replace(result, chosen=chosen, estimate=estimate if chosen.candidates else None)

    def search_with(self, settings: Settings) -> CompressorSearch:
        """The search with some settings."""
        for search in self.searches:
            if search.settings == settings:
                return search
        changed = apply_settings(self._choice, settings)
        usable = {
            point: [each for each in ladder if accepts_candidate(self.predictor.config, changed, each)]
            for point, ladder in self._ladders.items()
        }
        limits = self._budget, self._memory_gib
        self.searches.append(CompressorSearch(self.predictor, self._choice, usable, *limits, settings))
        return self.searches[-1]

    def saved_s(self, chosen: CompressorSet, name: str) -> float:
        """Predicted seconds that a setting saves beside the chosen compressors and settings."""
        choice = self.searches[0].apply(chosen.candidates)
        with_setting = {**chosen.settings, name: self.searches[-1].settings[name]}
        without_setting = {key: value for key, value in chosen.settings.items() if key != name}
        seconds = [self.predictor.seconds(apply_settings(choice, each)) for each in (without_setting, with_setting)]
        return seconds[0] - seconds[1]


def _explain(search: CompressorSearch, point: Point, result: AutoChoice) -> PointChoice:
    """Explain the choice at a point: its savings, or why nothing is chosen there."""
    chosen = result.chosen
    seconds = chosen.prediction.seconds
    if point in chosen.candidates:
        without_point = {p: candidate for p, candidate in chosen.candidates.items() if p is not point}
        return PointChoice(point, chosen.candidates[point], search.seconds(without_point) - seconds)
    if not search.ladders[point]:
        return PointChoice(point, None, 0.0, f"each compressor costs more than {search.budget:g}% of loss")
    seconds_with = {each: search.seconds({**chosen.candidates, point: each}) for each in search.ladders[point]}
    fastest = min(seconds_with, key=lambda candidate: seconds_with[candidate])
    saved_s = seconds - seconds_with[fastest]
    name = fastest.spec.partition("=")[2]
    if saved_s <= 0.0:
        reason = "coding would take longer than it saves"
    elif saved_s <= WORTHWHILE * seconds:
        reason = f"{name} would save {saved_s:.3g} s, too little"
    elif not search.fits({**chosen.candidates, point: fastest}):
        reason = f"{name} would save {saved_s:.3g} s, but does not fit into memory"
    elif fastest.increase > search.budget - result.increase:
        reason = f"{name} would save {saved_s:.3g} s, but costs up to {fastest.increase:.2f}% of loss"
    elif result.bolder is not None and point in result.bolder.candidates:
        reason = f"{name} would save {saved_s:.3g} s, but costs too much loss, as measured"
    elif any(point in trial.candidates for trial in result.trials):
        reason = f"{name} was to save {saved_s:.3g} s, but trial steps do not confirm this"
    else:
        reason = f"{name} would save {saved_s:.3g} s, together with other points too little"
    return PointChoice(point, None, saved_s, reason)


def _lowest_increase_of_fastest(sets: Sequence[CompressorSet]) -> CompressorSet:
    """The set with the lowest increase of the loss, and the fewest settings, among those as fast as the fastest, within
    ``WORTHWHILE``."""
    fastest_s = min(candidate_set.seconds for candidate_set in sets)
    fast_sets = [candidate_set for candidate_set in sets if candidate_set.seconds * (1 - WORTHWHILE) <= fastest_s]
    return min(fast_sets, key=lambda s: (bool(s.candidates), s.increase, len(s.settings), s.seconds))


def fit_together(sets: Sequence[CompressorSet], memory_gib: float) -> bool:
    """Whether the engines of all sets fit into a device's memory at the same time."""
    return sum(each.prediction.memory_bytes for each in sets) <= _MEMORY_SHARE * memory_gib * 2**30
