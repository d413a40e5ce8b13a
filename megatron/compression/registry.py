"""The registry of compressors. Registering is one call, in the compressor's file; an unknown name lists the choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.base.errors import UserError
from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.points import Point


@dataclass(frozen=True)
class Registration:
    """One compressor: its options, its implementations (None for a contract that it does not fulfill), and its points.

    Args:
        config: the options, a frozen dataclass made of ``opt`` fields; its docstring says what the compressor is.
        codec: codec of messages and gathers, made of the options.
        rounds: compressor of reductions.
        points: points that it may serve; None for all that its contracts fit.
        feedback: the default residual by point; "off" where not named.
        no_feedback: why it cannot have a residual; empty when it can.
        advice: why the other points are none for it; empty where its contracts say it.
        instead: what to use at the other points: specs without the point, the best first. A refusal names the first
            that the point takes.
        needs: which flags it works with alone, for ``--list-compressors``; ``Compressor.check`` refuses the others.
        identity: it leaves the traffic as it is.
    """

    config: type[Any]
    codec: Callable[[Any], Codec] | None = None
    rounds: type[RoundCompressor] | None = None
    points: frozenset[Point] | None = None
    feedback: Mapping[Point, str] = field(default_factory=dict)
    no_feedback: str = ""
    advice: str = ""
    instead: tuple[str, ...] = ()
    needs: str = ""
    identity: bool = False

    def usual_feedback(self, point: Point) -> str:
        """The default residual at a point; differences have that of gradients."""
        return self.feedback.get(point, self.feedback.get(Point.DP_GRAD, "off") if point is Point.OUTER else "off")

    def check(self, point: Point, name: str) -> None:
        """Checks that the compressor can serve a point.

        Raises:
            UserError: when it cannot, with the reason.
        """
        advice = f"; {self.advice}" if self.advice else ""
        if point is Point.OUTER:
            self._check_outer(name)
        # What sums gradients also sums differences.
        at = Point.DP_GRAD if point is Point.OUTER else point
        if self.points is not None and at not in self.points:
            allowed = ", ".join(sorted(p.value for p in self.points))
            raise UserError(f"{name} cannot serve {point.value}, only {allowed}{advice}")
        if point.is_reduction and self.rounds is None:
            raise UserError(f"{point.value} is an all-reduce, but {name} only compresses messages{advice}")
        if not point.is_reduction and self.codec is None:
            raise UserError(f"{point.value} carries messages, but {name} only compresses all-reduces{advice}")
        tuned = self.rounds is not None and self.rounds.controller is not RoundCompressor.controller
        if tuned and point not in (Point.DP_GRAD, Point.EMBED_GRAD):
            raise UserError(f"{point.value}: {name} is tuned by reduced gradients, which are at dp-grad and embedding")

    def _check_outer(self, name: str) -> None:
        """Checks that it looks at nothing but what it sums: a difference of many steps has no gradient and no update.

        Raises:
            UserError: when it does.
        """
        if self.rounds is None:
            return
        traits = self.rounds.traits
        for asks, what in (
            (traits.observes, "chooses by the optimizer's update"),
            (traits.freezes_variance or traits.clips_first, "is a part of the inner optimizer"),
            (self.rounds.controller is not RoundCompressor.controller, "is tuned by gradients"),
        ):
            if asks:
                raise UserError(f"outer carries differences of many steps, but {name} {what}; use it at dp-grad")


class Registry:
    """Compressors by name. A run builds its own from those that come with the package and may add to it."""

    def __init__(self, entries: Mapping[str, Registration] | None = None) -> None:
        self._entries = dict(entries or {})

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def register(self, name: str, registration: Registration) -> None:
        """Adds a compressor.

        Raises:
            ValueError: when the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"a compressor named {name!r} is registered already; choose another name")
        self._entries[name] = registration

    def __getitem__(self, name: str) -> Registration:
        if name not in self._entries:
            raise KeyError(f"no compressor is named {name!r}; the choices are: {', '.join(self.names)}")
        return self._entries[name]
