"""Rounds of trial steps: a step with each set of compressors, repeated until the gains are certain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, pvariance, variance

from megatron.planner.compressor_search import MAX_TRIALS, WORTHWHILE

MAX_SECONDS = 15.0
"""A gain counts as none if it is still uncertain after this many seconds, without those of the first round, and after
``_SETTLED_ROUNDS`` rounds."""

_MAX_SHARE = 0.017
"""Share of the run's time with the fastest set: no round begins after which the choice would have taken more.

Further steps of sets that gain, and the measurement of their losses, come on top: the choice and the checks during the
run are to take 2%.
"""

_SETTLED_SECONDS, _SETTLED_ROUNDS, _SETTLED_ROUNDS_AS_PREDICTED = 5.0, 5, 3
"""Gains above ``WORTHWHILE`` can be certain after ``_SETTLED_ROUNDS`` rounds or, if they were predicted, after
``_SETTLED_ROUNDS_AS_PREDICTED``; or after two, if these took at least ``_SETTLED_SECONDS`` or there is no time for a
third. Before that, only gains above ``_CLEAR`` can be certain."""

_CLEAR = 1 / 3
"""Share of an iteration. A gain above it can be certain after few steps, if it was also predicted.

Other processes can delay a single step to several times its usual time.
"""

_SCATTER, _SCATTER_WEIGHT = 0.05, 4
"""Assumed scatter of the ratio of two steps' times, and the number of rounds that this assumption counts as.

With a machine's usual other processes, the times of half-second steps scatter by 3 to 5%.
"""

_ERRORS_TO_GAIN, _ERRORS_TO_GAIN_AS_PREDICTED = 3.0, 2.0
"""Numbers of standard errors by which a gain must exceed ``WORTHWHILE`` to be certain: in general, and if at least
twice ``WORTHWHILE`` was predicted."""

_ERRORS_TO_GIVE_UP, _ERRORS_TO_GIVE_UP_AS_PREDICTED = 0.5, 1.0
"""The same, by which a gain must fall short of ``WORTHWHILE`` to be given up.

Choosing compressors that cost time is worse than missing a small gain.
"""

_BEYOND_PREDICTION_ERROR = 0.15
"""Predicted share of an iteration that is more than the planner's usual error. Such a gain can be certain by the second
round alone, without the warm-ups of the first, if there is no time for a third."""

_PREDICTION_ERROR, _PREDICTION_ERROR_SHARE = 0.1, 0.5
"""Assumed standard error of the logarithm of a predicted gain: the larger of a number and a share of it.

A predicted gain of at least twice ``WORTHWHILE`` is averaged with the measured gain, weighted by the inverse squares of
their errors, before it is certain or given up. By itself it is never certain, however large.
"""


class TrialRounds:
    """Times of trial steps without compressors (set 0) and with sets of them, and conclusions from these times.

    The steps of a round are consecutive, so that anything that slows the machine for longer than a step slows all sets.
    Gains are means over the rounds of the logarithm of the ratio. In the first round, kept engines warm up. Steps
    without compressors come last in it, when memory and libraries are warm, so once there are three rounds, it counts
    only for a set, never against it.

    Sets that are certainly slower than a set that gains are not chosen, so they leave the comparison.

    Args:
        predicted_s: predicted seconds of an iteration with each set.
        train_iters: iterations of the run.
        spent_s: seconds that the choice has taken before.
        keeps_engines: whether engines are built in the first round only, not for each step.
    """

    def __init__(
        self, predicted_s: Sequence[float], train_iters: int, spent_s: float = 0.0, keeps_engines: bool = True
    ) -> None:
        self._predicted_s, self._train_iters, self._spent_s = predicted_s, train_iters, spent_s
        self._keeps_engines = keeps_engines
        self._building_s = 0.0  # in the next round
        self._rounds: list[dict[int, float]] = []
        self._given_up: set[int] = set()

    def add(self, seconds: Mapping[int, float], round_s: float) -> None:
        """Add a round: the time of the step with each set, and of all with their engines and warm-ups."""
        self._rounds.append(dict(seconds))
        self._spent_s += round_s
        if not self._keeps_engines:
            self._building_s = max(round_s - sum(seconds.values()), 0.0)
        for number in self._uncertain_sets():
            values, is_predicted = self._log_gains(number)[1:], self._is_gain_predicted(number)
            if len(values) > 1:
                gain, error = self._estimate_gain(number, values)
                errors = _ERRORS_TO_GIVE_UP_AS_PREDICTED if is_predicted else _ERRORS_TO_GIVE_UP
                if gain + errors * error < _log_gain(WORTHWHILE):
                    self._given_up.add(number)

    def next_round(self) -> list[int]:
        """Return the sets of the next round, in order; empty when the comparison has ended."""
        gaining, uncertain = (self._drop_slower(sets) for sets in (self.gaining(), self._uncertain_sets()))
        seconds = _total_seconds(self._rounds[1:])
        has_settled = len(self._rounds) >= _SETTLED_ROUNDS and seconds >= MAX_SECONDS
        compared = [*sorted(gaining + uncertain), 0]
        if uncertain and not has_settled and (not self._rounds or not self._takes_too_long(compared)):
            return compared
        # Steps after the first have no warm-up. Several sets with short steps are compared by two such steps.
        steps = 3 if len(gaining) > 1 and _total_seconds(self._rounds) < _SETTLED_SECONDS else 2
        return gaining if any(len(self._times(number)) < steps for number in gaining) else []

    def _takes_too_long(self, compared: Sequence[int]) -> bool:
        """Whether the choice would take more than ``_MAX_SHARE`` of the run after a round with some sets."""
        run_s = self._train_iters * min(self.typical_s(number) for number in range(len(self._predicted_s)))
        round_s = self._building_s + sum(self.typical_s(number) for number in compared)
        return self._spent_s + round_s > _MAX_SHARE * run_s

    def gaining(self) -> list[int]:
        """The sets that certainly save ``WORTHWHILE`` of an iteration."""
        return [number for number in range(1, len(self._predicted_s)) if self._is_gain_certain(number)]

    def typical_s(self, number: int) -> float:
        """Median seconds of a set's steps; without the first if there are more."""
        times = self._times(number)
        return median(times[1:] or times)

    def _times(self, number: int) -> list[float]:
        return [seconds[number] for seconds in self._rounds if number in seconds]

    def _uncertain_sets(self) -> list[int]:
        return sorted({*range(1, len(self._predicted_s))}.difference(self._given_up, self.gaining()))

    def _drop_slower(self, numbers: Sequence[int]) -> list[int]:
        """Those of the sets that are not certainly slower than a set that gains."""
        gaining = self.gaining()
        return [number for number in numbers if not any(self._is_slower(number, fast) for fast in gaining)]

    def _is_slower(self, number: int, fast: int) -> bool:
        values = self._log_gains(fast, base=number)
        return bool(values) and fmean(values) - _ERRORS_TO_GAIN * _standard_error(values) >= _log_gain(WORTHWHILE)

    def _log_gains(self, number: int, base: int = 0) -> list[float]:
        """Logarithm of the ratio of the times with sets ``base`` and ``number``, in each round with both."""
        return [
            math.log(seconds[base] / seconds[number]) for seconds in self._rounds if {base, number} <= seconds.keys()
        ]

    def _is_gain_certain(self, number: int) -> bool:
        log_gains = self._log_gains(number)
        if not log_gains:
            return False
        predicted_share, count = self._predicted_share(number), len(log_gains)
        is_last = count > 1 and self._takes_too_long([*self._rounds[-1].keys() | {number, 0}])
        took_long = count > 1 and _total_seconds(self._rounds) >= _SETTLED_SECONDS
        is_settled = count >= _SETTLED_ROUNDS_AS_PREDICTED or took_long or is_last
        if count >= _SETTLED_ROUNDS or (is_settled and predicted_share >= WORTHWHILE):
            least = WORTHWHILE
        elif predicted_share >= _CLEAR:
            least = _CLEAR
        else:
            return False
        errors = _ERRORS_TO_GAIN_AS_PREDICTED if self._is_gain_predicted(number) else _ERRORS_TO_GAIN
        may_ignore_first = self._keeps_engines and (
            count > 2 or (is_last and predicted_share >= _BEYOND_PREDICTION_ERROR)
        )
        for values in [log_gains, log_gains[1:]] if may_ignore_first else [log_gains]:
            gain, error = self._estimate_gain(number, values)
            if gain - errors * error >= _log_gain(least):
                return True
        return False

    def _predicted_share(self, number: int) -> float:
        """Share of an iteration that a set is predicted to save."""
        return 1.0 - self._predicted_s[number] / self._predicted_s[0]

    def _is_gain_predicted(self, number: int) -> bool:
        """Whether the prediction of a set's gain counts as a measurement."""
        return self._predicted_share(number) >= 2 * WORTHWHILE

    def _estimate_gain(self, number: int, log_gains: Sequence[float]) -> tuple[float, float]:
        """Logarithm of a set's gain, from measured ones and from the prediction if it counts; and its error."""
        gain, error = fmean(log_gains), _standard_error(log_gains)
        if not self._is_gain_predicted(number):
            return gain, error
        predicted = _log_gain(self._predicted_share(number))
        weight = (error / max(_PREDICTION_ERROR, _PREDICTION_ERROR_SHARE * predicted)) ** 2
        return (gain + weight * predicted) / (1.0 + weight), error / math.sqrt(1.0 + weight)


def num_sets_to_time(step_s: float, train_iters: int, spent_s: float) -> int:
    """Number of sets, at least one, for which enough rounds fit into the choice's share of the run.

    Args:
        step_s: predicted seconds of an iteration with the fastest set.
        train_iters: iterations of the run.
        spent_s: seconds that the choice has taken so far.
    """
    steps_per_round = (_MAX_SHARE * train_iters - spent_s / step_s) / _SETTLED_ROUNDS
    return min(max(int(steps_per_round) - 1, 1), MAX_TRIALS)


def _total_seconds(rounds: Sequence[Mapping[int, float]]) -> float:
    return sum(sum(seconds.values()) for seconds in rounds)


def _log_gain(saved_share: float) -> float:
    return -math.log(1.0 - saved_share)


def _standard_error(values: Sequence[float]) -> float:
    """Standard error of a mean, from the assumed scatter or that of the values, whichever is larger.

    The deviation of few values may be too small by chance, so it is scaled up.
    """
    count = len(values)
    squares = (_SCATTER_WEIGHT * _SCATTER**2 + count * pvariance(values)) / (_SCATTER_WEIGHT + count - 1)
    if count > 1:
        squares = max(squares, variance(values) * (count + 1) / (count - 1))
    return math.sqrt(squares / count)
