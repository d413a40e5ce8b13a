"""Who takes part in a round of islands, as one of them decides and all of them read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ABSURD = 100.0
"""A difference whose norm is this many times the (lower) median of all is left out of the sum."""


@dataclass(frozen=True)
class Arrival:
    """What an island says of itself when it comes to a round.

    Args:
        norm: L2 norm of its difference.
        loss: its training loss.
        stop: greatest reason that it has to end the run; 0 for none.
    """

    norm: float
    loss: float
    stop: int = 0

    def encode(self) -> list[Any]:
        return [repr(self.norm), repr(self.loss), self.stop]

    @staticmethod
    def decode(value: Sequence[Any]) -> Arrival:
        norm, loss, stop = value
        return Arrival(float(norm), float(loss), int(stop))


@dataclass(frozen=True)
class Decision:
    """Who takes part in a round; the same on all islands.

    Args:
        members: numbers of the islands whose differences are summed.
        arrivals: what those that came said, by number.
        left_out: why others that came take no part.
    """

    members: tuple[int, ...]
    arrivals: Mapping[int, Arrival] = field(default_factory=dict)
    left_out: Mapping[int, str] = field(default_factory=dict)

    @property
    def mean_loss(self) -> float:
        """Mean of the members' losses."""
        return statistics.fmean(self.arrivals[island].loss for island in self.members)

    @property
    def stop(self) -> int:
        """The greatest reason of an island that came to end the run, for all of them; 0 for none."""
        return max((arrival.stop for arrival in self.arrivals.values()), default=0)

    def encode(self) -> dict[str, Any]:
        return {
            "members": self.members,
            "arrivals": {str(k): a.encode() for k, a in self.arrivals.items()},
            "left_out": {str(k): why for k, why in self.left_out.items()},
        }

    @staticmethod
    def decode(value: Mapping[str, Any]) -> Decision:
        return Decision(
            tuple(value["members"]),
            {int(k): Arrival.decode(one) for k, one in value["arrivals"].items()},
            {int(k): why for k, why in value["left_out"].items()},
        )


def judge(arrivals: Mapping[int, Arrival]) -> Decision:
    """Decides whose differences are summed: those that are finite and not absurdly large.

    Raises:
        ValueError: when no difference is finite.
    """
    finite = {k: a.norm for k, a in arrivals.items() if math.isfinite(a.norm)}
    left_out = {k: "its difference is not finite" for k in arrivals if k not in finite}
    if not finite:
        raise ValueError("no island has a finite difference")
    usual = statistics.median_low(finite.values())
    for k, norm in finite.items() if len(finite) > 2 else ():  # of two nobody knows which one is odd
        if norm > ABSURD * usual > 0:
            left_out[k] = f"the norm of its difference is {norm:.3g}, {norm / usual:.3g} times the median"
    return Decision(tuple(sorted(k for k in finite if k not in left_out)), dict(sorted(arrivals.items())), left_out)
