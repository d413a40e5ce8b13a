"""Points whose compressors ``--compress auto`` has chosen, and what they are measured to cost in loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.base.values import Values
from megatron.compression.points import Point
from megatron.compression.spec import Spec
from megatron.planner.candidates import CandidateSpec

EXACT = CandidateSpec("", 0.0)
"""Exact traffic: the position after the gentlest setting."""

MAX_BREAKS = 2
"""A setting that has exceeded the budget this many times is not taken again."""


@dataclass
class GuardedPoint:
    """A point with a chosen compressor.

    Args:
        settings: declared settings with their specs, from the one that was chosen to the gentlest.
        position: index of the setting in use; one past the last for exact traffic.
        breaks: how many times each setting has exceeded the budget.
        calm_checks: latest successive checks that found room for the next bolder setting.
    """

    settings: list[tuple[CandidateSpec, Spec]]
    position: int
    breaks: list[int]
    calm_checks: int = 0

    @property
    def candidate(self) -> CandidateSpec:
        """The setting in use, as declared."""
        return self.settings[self.position][0] if self.position < len(self.settings) else EXACT

    @property
    def bolder(self) -> CandidateSpec | None:
        """The next bolder setting; None if it has exceeded the budget too often, or none was chosen."""
        position = self.position - 1
        return self.settings[position][0] if position >= 0 and self.breaks[position] < MAX_BREAKS else None


@dataclass
class LossMeasurement:
    """Measured increases of the loss, in percent.

    Args:
        costs: by point, with the settings in use.
        bolder_costs: by point, with the next bolder setting.
        joint_cost: of all compressed forward points together; None if there are fewer than two.
        joint_points: these points.
    """

    costs: dict[Point, float]
    bolder_costs: dict[Point, float]
    joint_cost: float | None = None
    joint_points: list[Point] = field(default_factory=list)

    def total(self, costs: Mapping[Point, float]) -> float:
        """Expected increase at all points: the sum of their costs, or more if the forward points together cost more
        than each by itself."""
        joint = 0.0 if self.joint_cost is None else self.joint_cost
        others = [cost for point, cost in costs.items() if point not in self.joint_points]
        return max(sum(costs.values()), joint + sum(others))


def guard_point(
    ladder: Sequence[tuple[CandidateSpec, Spec]], text: str, is_exact: bool, saved: Values | None
) -> GuardedPoint:
    """A point with its settings and the results of earlier checks.

    Args:
        ladder: the compressor's declared settings.
        text: the setting in use, or that in use before exact traffic.
        is_exact: whether the traffic is exact.
        saved: the point's state in the checkpoint; None for a setting that was chosen now.
    """
    increases = {candidate.spec: candidate.increase for candidate, _ in ladder}
    chosen = text if saved is None else saved.text("chosen")
    if chosen not in increases or increases[chosen] < increases[text]:
        chosen = text  # the settings are of an earlier version
    settings = [pair for pair in ladder if pair[0].spec == chosen or pair[0].increase < increases[chosen]]
    settings.sort(key=lambda pair: pair[0].increase, reverse=True)
    texts = [candidate.spec for candidate, _ in settings]
    position = len(settings) if is_exact else texts.index(text)
    breaks = [] if saved is None else saved.integers("breaks")
    if saved is None or len(breaks) != len(settings):
        return GuardedPoint(settings, position, [0] * len(settings))
    return GuardedPoint(settings, position, breaks, saved.integer("calm_checks", minimum=0))
