"""Registry of compressors. The file of each compressor registers it with a single call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.base.errors import UserError
from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.ladder import MAX_RUNGS, Rung
from megatron.compression.points import Point


@dataclass(frozen=True)
class Registration:
    """A compressor's options, implementations, and communication points.

    Args:
        config: options class, a frozen dataclass of ``opt`` fields; its docstring describes the compressor.
        codec: factory of the codec for messages and gathers, called with the options; None without a codec.
        rounds: class of the compressor of reductions; None without such a compressor.
        points: points that it may serve; None for all points with traffic of the kinds that it implements.
        feedback: default residual by point; "off" for points not listed.
        no_feedback: reason why it cannot have a residual; empty if it can.
        advice: reason why it does not serve other points; empty if the missing implementation is the reason.
        alternatives: compressors for other points, as specs without the point, best first. An error message suggests
            the first that the point accepts.
        needs: required flags, shown by ``--list-compressors`` and enforced by ``Compressor.check``.
        source: the paper or specification.
        example: a complete value of ``--compress``.
        identity: the compressor does not change the traffic.
        ladder: settings that ``--compress auto`` may choose, by point, at most eight each.
    """

    config: type[Any]
    codec: Callable[[Any], Codec] | None = None
    rounds: type[RoundCompressor] | None = None
    points: frozenset[Point] | None = None
    feedback: Mapping[Point, str] = field(default_factory=dict)
    no_feedback: str = ""
    advice: str = ""
    alternatives: tuple[str, ...] = ()
    needs: str = ""
    source: str = ""
    example: str = ""
    identity: bool = False
    ladder: Mapping[Point, tuple[Rung, ...]] = field(default_factory=dict)

    def default_feedback(self, point: Point) -> str:
        """Default residual at a point. The default at ``outer`` is the default at ``dp-grad``."""
        return self.feedback.get(point, self.feedback.get(Point.DP_GRAD, "off") if point is Point.OUTER else "off")

    def check_serves(self, point: Point, name: str) -> None:
        """Check that the compressor can serve a point.

        Raises:
            UserError: with the reason, when the compressor cannot serve the point.
        """
        advice = f"; {self.advice}" if self.advice else ""
        if point is Point.OUTER and self.rounds is not None:
            # Pseudo-gradients come from no gradient and no optimizer update.
            traits = self.rounds.traits
            for depends, reason in (
                (traits.observes, "needs the optimizer's update"),
                (traits.freezes_variance or traits.clips_first, "is part of the inner optimizer"),
                (self.rounds.controller is not RoundCompressor.controller, "is tuned by gradients"),
            ):
                if depends:
                    raise UserError(f"outer carries pseudo-gradients, but {name} {reason}; use it at dp-grad")
        # Compressors of gradients also serve pseudo-gradients.
        listed_point = Point.DP_GRAD if point is Point.OUTER else point
        if self.points is not None and listed_point not in self.points:
            allowed = ", ".join(sorted(p.value for p in self.points))
            raise UserError(f"{name} cannot serve {point.value}, only {allowed}{advice}")
        if point.is_reduction and self.rounds is None:
            raise UserError(f"{point.value} is an all-reduce, but {name} only compresses messages{advice}")
        if not point.is_reduction and self.codec is None:
            raise UserError(f"{point.value} carries messages, but {name} only compresses all-reduces{advice}")
        tuned = self.rounds is not None and self.rounds.controller is not RoundCompressor.controller
        if tuned and point not in (Point.DP_GRAD, Point.EMBED_GRAD):
            raise UserError(f"{point.value}: {name} is tuned by reduced gradients; use it at dp-grad or embedding")


class Registry:
    """Compressors by name. Plug-ins may add to the built-in compressors."""

    def __init__(self, entries: Mapping[str, Registration] | None = None) -> None:
        self._entries = dict(entries or {})

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def register(self, name: str, registration: Registration) -> None:
        """Add a compressor.

        Raises:
            ValueError: when the name is taken or cannot be written in a spec, or a ladder is too long or no ladder.
        """
        if re.fullmatch("[a-z0-9][a-z0-9_.-]*", name) is None:
            raise ValueError(f"the name {name!r}: use lower-case letters, digits and hyphens, such as my-compressor")
        if name in self._entries:
            raise ValueError(f"a compressor named {name!r} is registered already; choose another name")
        for point, rungs in registration.ladder.items():
            if not isinstance(point, Point) or not all(isinstance(rung, Rung) for rung in rungs):
                raise ValueError(f"{name}: a ladder has tuples of Rung by Point, not {point!r}: {rungs!r}")
            if len(rungs) > MAX_RUNGS:
                raise ValueError(f"{name} has {len(rungs)} rungs at {point.value}; declare at most {MAX_RUNGS}")
        self._entries[name] = registration

    def __getitem__(self, name: str) -> Registration:
        if name not in self._entries:
            raise KeyError(f"no compressor is named {name!r}; the choices are: {', '.join(self.names)}")
        return self._entries[name]
