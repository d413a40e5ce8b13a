"""Name -> compressor. Registering is one call; an unknown name lists the choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.cast import CastCodec, CastConfig, CastRounds
from megatron.compression.delta import DeltaCodec, DeltaConfig, DeltaLowBitsConfig
from megatron.compression.edgc import EDGCConfig
from megatron.compression.fixpoint import FixpointCodec, FixpointConfig, FixpointRounds
from megatron.compression.identity import IdentityCodec, IdentityConfig, IdentityRounds
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.options import SpecError
from megatron.compression.points import Point
from megatron.compression.powersgd import PowerSGD, PowerSGDConfig
from megatron.compression.quantized_adam import QuantizedAdam, QuantizedAdamConfig
from megatron.compression.topk import StableTopK, StableTopKConfig, TopK, TopKConfig


@dataclass(frozen=True)
class Entry:
    """One registered compressor: its options and the contracts that it fulfils (None where it does not).

    Args:
        config: the options, a frozen dataclass made of ``opt`` fields; its docstring says what the compressor is.
        codec: for messages and gathers.
        rounds: for sums.
        feedback: the residual it has unless ``error-feedback`` says otherwise, by point; "off" where not named.
        no_feedback: why it can have no residual; empty when it can.
        points: where it may serve; None for everywhere that its contracts fit.
        remembers_samples: it gains from samples that come again, and from those alone: not in evaluation.
        needs_warmup: it changes how the whole model is trained, after a warm-up: at all stages.
        problem: why options that are right one by one cannot be right together; empty when they can.
        tuned_limits: least and greatest value of each option that is found while the run goes on.
        advice: what to use instead at the other points.
    """

    config: type[Any]
    codec: type[Codec] | None = None
    rounds: type[RoundCompressor] | None = None
    feedback: Mapping[Point, str] = field(default_factory=dict)
    no_feedback: str = ""
    points: frozenset[Point] | None = None
    remembers_samples: bool = False
    needs_warmup: bool = False
    problem: Callable[[Any], str] | None = None
    tuned_limits: Callable[[Any], dict[str, tuple[float, float]]] | None = None
    advice: str = ""

    def check(self, point: Point, name: str) -> None:
        """Raises SpecError when the compressor cannot serve a point, with the reason and what can."""
        advice = f"; {self.advice}" if self.advice else ""
        if self.points is not None and point not in self.points:
            allowed = ", ".join(sorted(p.value for p in self.points))
            raise SpecError(f"{name} cannot serve {point.value}, only {allowed}{advice}")
        if point.sums and self.rounds is None:
            raise SpecError(f"{point.value} sums over ranks, but {name} only carries messages between two{advice}")
        if not point.sums and self.codec is None:
            raise SpecError(f"{point.value} carries messages, but {name} only computes sums over ranks{advice}")


class Registry:
    """Names of compressors. A run builds its own from ``BUILTIN`` and may add to it."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def register(self, name: str, entry: Entry) -> None:
        """Adds a compressor.

        Raises:
            ValueError: when the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"a compressor named {name!r} is registered already; choose another name")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(f"no compressor is named {name!r}; the choices are: {', '.join(self.names)}")
        return self._entries[name]


def _edgc_problem(options: EDGCConfig) -> str:
    if options.min_rank > options.rank:
        return f"min-rank={options.min_rank} is above rank={options.rank}, the greatest; lower it"
    return ""


def _edgc_limits(options: EDGCConfig) -> dict[str, tuple[float, float]]:
    return {"rank": options.limits}


_NONE = Entry(IdentityConfig, codec=IdentityCodec, rounds=IdentityRounds, no_feedback="leaves no error")
_OWN_MEMORY = "makes up for what it left out when the sample comes again"

BUILTIN: Mapping[str, Entry] = MappingProxyType(
    {
        "none": _NONE,
        "identity": _NONE,
        "fixpoint": Entry(
            FixpointConfig,
            codec=FixpointCodec,
            rounds=FixpointRounds,
            points=frozenset(Point) - {Point.CONTROL},
        ),
        "cast": Entry(
            CastConfig,
            codec=CastCodec,
            rounds=CastRounds,
            points=frozenset(Point) - {Point.CONTROL},
        ),
        "lowrank": Entry(
            LowRankConfig,
            codec=LowRankCodec,
            feedback={Point.PP_BWD: "lazy"},
            points=frozenset({Point.PP_FWD, Point.PP_BWD}),
            advice="for sums use powersgd",
        ),
        "delta": Entry(
            DeltaConfig,
            codec=DeltaCodec,
            points=frozenset({Point.PP_FWD}),
            advice="samples are met again in activations only; use fixpoint",
            remembers_samples=True,
            no_feedback=_OWN_MEMORY,
        ),
        "delta-lowbits": Entry(
            DeltaLowBitsConfig,
            codec=DeltaCodec,
            points=frozenset({Point.PP_FWD}),
            advice="samples are met again in activations only; use fixpoint",
            remembers_samples=True,
            no_feedback=_OWN_MEMORY,
        ),
        "edgc": Entry(
            EDGCConfig,
            rounds=PowerSGD,
            feedback={Point.DP_GRAD: "local"},
            points=frozenset({Point.DP_GRAD}),
            problem=_edgc_problem,
            tuned_limits=_edgc_limits,
            advice="elsewhere use powersgd with rank=64@0/32@1000",
        ),
        "quantized-adam": Entry(
            QuantizedAdamConfig,
            rounds=QuantizedAdam,
            points=frozenset({Point.DP_GRAD}),
            needs_warmup=True,
            no_feedback="has a residual of its own",
            advice="use fixpoint with error-feedback=on",
        ),
        "topk": Entry(
            TopKConfig,
            rounds=TopK,
            feedback={Point.DP_GRAD: "local", Point.EMBED_GRAD: "local"},
            points=frozenset({Point.DP_GRAD, Point.EMBED_GRAD}),
            advice="for messages use fixpoint or lowrank",
        ),
        "stable-topk": Entry(
            StableTopKConfig,
            rounds=StableTopK,
            feedback={Point.DP_GRAD: "local", Point.EMBED_GRAD: "local"},
            points=frozenset({Point.DP_GRAD, Point.EMBED_GRAD}),
            advice="only sums of gradients share one choice of coordinates",
        ),
        "powersgd": Entry(
            PowerSGDConfig,
            rounds=PowerSGD,
            feedback={Point.DP_GRAD: "local", Point.EMBED_GRAD: "local"},
            points=frozenset({Point.DP_GRAD, Point.EMBED_GRAD, Point.TP_FWD, Point.TP_BWD}),
            advice="for messages use lowrank",
        ),
    }
)
"""The compressors that come with the package."""
