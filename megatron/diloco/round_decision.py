"""Membership of a round of islands: decided by a single island, read by all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from megatron.optimizer.step_summary import ExitReason

OUTLIER_RATIO = 100.0
"""A pseudo-gradient is left out of the sum if its norm is more than this many times the (lower) median norm."""


@dataclass(frozen=True)
class RoundReport:
    """An island's report to a round.

    Args:
        norm: L2 norm of its pseudo-gradient.
        loss: its training loss; nan if unknown.
        stop: its most urgent reason to end the run; 0 for none.
    """

    norm: float
    loss: float
    stop: int = 0

    def encode(self) -> list[Any]:
        return [repr(self.norm), repr(self.loss), self.stop]

    @staticmethod
    def decode(value: Sequence[Any]) -> RoundReport:
        """Decode a report; raise ValueError if it is malformed."""
        norm, loss, stop = value
        if not 0 <= int(stop) <= max(ExitReason):
            raise ValueError(f"{stop} is no reason to end a run")
        return RoundReport(float(norm), float(loss), int(stop))


class RoundOutcome(str, Enum):
    """The outcome of an attempt of a round, the same on all islands."""

    COUNTS = "counts"
    FAILED = "failed"
    """The attempt failed on some rank, and must be repeated."""
    SPOILED = "spoiled"
    """The received mean is not finite, or far larger than the pseudo-gradients."""


@dataclass(frozen=True)
class Vote:
    """A member's vote on an attempt.

    Args:
        failed: whether something failed there.
        mean_norm: L2 norm of the mean that it received.
        usual_norm: the norm of the member's pseudo-gradient, or that of the last mean if larger: residuals delay part
            of a pseudo-gradient.
    """

    failed: bool
    mean_norm: float = 0.0
    usual_norm: float = 0.0

    def encode(self) -> list[Any]:
        return [self.failed, repr(self.mean_norm), repr(self.usual_norm)]

    @staticmethod
    def decode(value: Sequence[Any]) -> Vote:
        """Decode a vote; raise ValueError if it is malformed."""
        failed, mean_norm, usual_norm = value
        return Vote(bool(failed), float(mean_norm), float(usual_norm))


def check_mean(votes: Sequence[Vote]) -> RoundOutcome:
    """Check an attempt by the norms of the means that all members received, against the norms that are usual."""
    if any(vote.failed for vote in votes):
        return RoundOutcome.FAILED
    norms = [vote.usual_norm for vote in votes if math.isfinite(vote.usual_norm)]
    # Of two norms, either may be the outlier.
    usual = (statistics.median_low(norms) if len(norms) > 2 else max(norms)) if norms else 0.0
    spoiled = any(not math.isfinite(vote.mean_norm) or vote.mean_norm > OUTLIER_RATIO * usual > 0 for vote in votes)
    return RoundOutcome.SPOILED if spoiled else RoundOutcome.COUNTS


@dataclass(frozen=True)
class Decision:
    """Membership of a round; the same on all islands.

    Args:
        members: numbers of the islands whose pseudo-gradients are summed.
        arrivals: the reports of the islands, by number.
        left_out: reasons why islands that reported take no part, by number.
        excluded_island: an island that is left out only to see whether it spoils the mean; None for none.
    """

    members: tuple[int, ...]
    arrivals: Mapping[int, RoundReport] = field(default_factory=dict)
    left_out: Mapping[int, str] = field(default_factory=dict)
    excluded_island: int | None = None

    @property
    def mean_loss(self) -> float:
        """Mean of the finite losses of the members; nan if there are none."""
        losses = [self.arrivals[island].loss for island in self.members]
        losses = [loss for loss in losses if math.isfinite(loss)]
        return statistics.fmean(losses) if losses else math.nan

    def leave_out(self, island: int | None) -> Decision:
        """The decision without an island, if it is one of several members."""
        if island not in self.members or len(self.members) == 1:
            return self
        return replace(self, members=tuple(k for k in self.members if k != island), excluded_island=island)

    @property
    def stop(self) -> int:
        """The most urgent reason to end the run among the islands that reported; 0 for none."""
        return max((arrival.stop for arrival in self.arrivals.values()), default=0)

    def encode(self) -> dict[str, Any]:
        return {
            "members": self.members,
            "arrivals": {str(k): a.encode() for k, a in self.arrivals.items()},
            "left_out": {str(k): why for k, why in self.left_out.items()},
            "without": self.excluded_island,
        }

    @staticmethod
    def decode(value: Mapping[str, Any]) -> Decision:
        """Decode a decision; raise ValueError if it is malformed."""
        without, members = value["without"], tuple(map(int, value["members"]))
        arrivals = {int(k): RoundReport.decode(arrival) for k, arrival in value["arrivals"].items()}
        if not members or not arrivals.keys() >= set(members):
            raise ValueError(f"of its members {members} only {sorted(arrivals)} have come")
        return Decision(
            members,
            arrivals,
            {int(k): str(why) for k, why in value["left_out"].items()},
            None if without is None else int(without),
        )


def select_members(
    arrivals: Mapping[int, RoundReport], last_norm: float = 0.0, outer_param_norm: float = 0.0
) -> Decision:
    """Decide which pseudo-gradients are summed: those that are finite and not absurdly large.

    Args:
        arrivals: the reports of the islands, by number.
        last_norm: norm of the last mean, as a reference for the pseudo-gradients of only two islands; 0 before the
            first mean.
        outer_param_norm: norm of the outer parameters, the reference before the first mean; 0 where unknown.

    Raises:
        ValueError: when no pseudo-gradient is finite.
    """
    finite = {k: a.norm for k, a in arrivals.items() if math.isfinite(a.norm)}
    left_out = {k: "its difference is not finite" for k in arrivals if k not in finite}
    if not finite:
        raise ValueError("no island has a finite difference")
    usual, reference = statistics.median_low(finite.values()), "the median"
    if len(finite) == 2:  # either may be the outlier, unless a common norm is known
        common_norm, reference = (
            (last_norm, "that of the last mean") if last_norm else (outer_param_norm, "that of the parameters")
        )
        usual = max(usual, common_norm) if common_norm else 0.0
    for k, norm in finite.items():
        if norm > OUTLIER_RATIO * usual > 0:
            left_out[k] = f"the norm of its difference is {norm:.3g}, {norm / usual:.3g} times {reference}"
    return Decision(tuple(sorted(k for k in finite if k not in left_out)), dict(sorted(arrivals.items())), left_out)
