"""Measured times of the pipeline stages' reductions, and the ranks that fit into them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


def ranks_to_try(greatest: int) -> list[int]:
    """Powers of two below the highest rank, and the highest rank."""
    powers = [1 << power for power in range(1, greatest.bit_length()) if 1 << power < greatest]
    return [*powers, greatest]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each pipeline stage's reduction, exact and with several ranks.

    Args:
        ranks: measured PowerSGD ranks, ascending.
        exact_s: seconds of an exact reduction, by stage.
        tried_s: seconds for each of ``ranks``, by stage.
        ahead_s: seconds by which a stage begins its reduction before the first stage, by stage.
    """

    ranks: list[int]
    exact_s: list[float]
    tried_s: list[list[float]]
    ahead_s: list[float]

    @staticmethod
    def from_rows(ranks: Sequence[int], rows: Sequence[Sequence[float]]) -> StageTimes:
        """Combine the measurements of all processes.

        A stage's times are those of its slowest process, and its head start that of its latest process.

        Args:
            ranks: the measured PowerSGD ranks.
            rows: for each process: stage, seconds that it waited for the others before its reduction, seconds of an
                exact reduction, and seconds for each of ``ranks``.
        """
        stages = [[row[1:] for row in rows if row[0] == stage] for stage in range(int(max(r[0] for r in rows)) + 1)]
        waits_s = [min(row[0] for row in stage_rows) for stage_rows in stages]
        slowest_s = [[max(column) for column in list(zip(*stage_rows, strict=True))[1:]] for stage_rows in stages]
        return StageTimes(
            list(ranks),
            [seconds[0] for seconds in slowest_s],
            [seconds[1:] for seconds in slowest_s],
            [max(wait - waits_s[0], 0.0) for wait in waits_s],
        )

    def seconds(self, stage: int, rank: int) -> float:
        """Seconds of a stage's reduction with a rank, interpolated linearly between measured ranks.

        Times are made nondecreasing in the rank, because a decrease is measurement noise.
        """
        monotonic_s = list(accumulate(self.tried_s[stage], max))
        after = bisect_left(self.ranks, rank)
        if after == 0 or after == len(self.ranks):
            return monotonic_s[min(after, len(monotonic_s) - 1)]
        low, high = self.ranks[after - 1 : after + 1]
        share = (rank - low) / (high - low)
        return monotonic_s[after - 1] * (1 - share) + monotonic_s[after] * share

    def rank(self, stage: int, first: int, limits: tuple[int, int]) -> int | None:
        """Highest rank with which a stage finishes its reduction no later than the first stage; None if an exact
        reduction also does, or is no slower than a compressed reduction.

        Args:
            stage: the stage.
            first: rank of the first stage.
            limits: lowest and highest rank.
        """
        first_s = self.seconds(0, first)
        if stage == 0:
            return first if first_s < self.exact_s[0] else None
        budget = min(first_s, self.exact_s[0]) + self.ahead_s[stage]
        low, high = limits
        fits = bisect_right(range(low, high + 1), budget, key=lambda rank: self.seconds(stage, rank))
        rank = low + max(fits - 1, 0)
        exact = self.exact_s[stage]
        return rank if budget < exact and self.seconds(stage, rank) < exact else None

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> StageTimes:
        """Restore times from ``dataclasses.asdict``.

        Raises:
            TypeError, ValueError, LookupError: when the state is invalid.
        """
        ranks = [int(rank) for rank in state["ranks"]]
        exact_s, ahead_s = ([float(number) for number in state[name]] for name in ("exact_s", "ahead_s"))
        tried_s = [[float(number) for number in row] for row in state["tried_s"]]
        numbers = [*exact_s, *ahead_s, *(number for row in tried_s for number in row)]
        ascends = ranks == sorted(set(ranks)) and bool(ranks) and ranks[0] > 0
        fits = len(exact_s) == len(ahead_s) == len(tried_s) > 0 and all(len(row) == len(ranks) for row in tried_s)
        if not (ascends and fits and all(math.isfinite(number) and number >= 0 for number in numbers)):
            raise ValueError("the times of EDGC's probe are not those of a run")
        return StageTimes(ranks, exact_s, tried_s, ahead_s)
