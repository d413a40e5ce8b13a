"""Registry of compressors. A compressor's file registers it with a single call; an unknown name lists the choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.base.errors import UserError
from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.points import Point


@dataclass(frozen=True)
class Registration:
    """A compressor's options, its implementations (None for an interface that it does not implement), and its points.

    Args:
        config: options class, a frozen dataclass of ``opt`` fields; its docstring describes the compressor.
        codec: creates the codec of messages and gathers from the options.
        rounds: compressor of reductions.
        points: points that it may serve; None for all points that its interfaces fit.
        feedback: default residual by point; "off" for points not listed.
        no_feedback: why it cannot have a residual; empty if it can.
        advice: why it does not serve the other points; empty if its interfaces are the reason.
        instead: alternatives for the other points, as specs without the point, best first. An error message names the
            first that the point accepts.
        needs: flags that it requires, for ``--list-compressors``; ``Compressor.check`` enforces them.
        source: the paper or specification.
        example: a spec with the point, as ``--compress`` takes it.
        identity: it does not change the traffic.
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
    source: str = ""
    example: str = ""
    identity: bool = False

    def usual_feedback(self, point: Point) -> str:
        """Default residual at a point; for differences at ``outer``, the default for gradients."""
        return self.feedback.get(point, self.feedback.get(Point.DP_GRAD, "off") if point is Point.OUTER else "off")

    def check_point(self, point: Point, name: str) -> None:
        """Check that the compressor can serve a point.

        Raises:
            UserError: when it cannot, with the reason.
        """
        advice = f"; {self.advice}" if self.advice else ""
        if point is Point.OUTER:
            self._check_outer(name)
        # Compressors of gradient sums also serve sums of differences.
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
        """Check that it depends only on the summed tensor: a difference of many steps has no gradient and no update.

        Raises:
            UserError: when it depends on more.
        """
        if self.rounds is None:
            return
        traits = self.rounds.traits
        for depends, reason in (
            (traits.observes, "chooses by the optimizer's update"),
            (traits.freezes_variance or traits.clips_first, "is a part of the inner optimizer"),
            (self.rounds.controller is not RoundCompressor.controller, "is tuned by gradients"),
        ):
            if depends:
                raise UserError(f"outer carries differences of many steps, but {name} {reason}; use it at dp-grad")


class Registry:
    """Compressors by name. A run's registry starts with the built-in compressors and may be extended."""

    def __init__(self, entries: Mapping[str, Registration] | None = None) -> None:
        self._entries = dict(entries or {})

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def register(self, name: str, registration: Registration) -> None:
        """Add a compressor.

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
