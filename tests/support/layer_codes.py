"""A plug-in compressor that ``--compress auto`` may choose at points inside layers; its costs are made up."""

from __future__ import annotations

from pathlib import Path

from megatron.compression.fixpoint import FixpointCodec, FixpointRounds, FixpointSumConfig
from megatron.compression.ladder import Rung
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.registry import Registration, Registry

MODULE = str(Path(__file__).resolve())
"""The value of ``--compress-module``."""

TP_POINTS = (Point.TP_FWD, Point.TP_BWD)


def register(registry: Registry) -> None:
    """Register ``codes``."""
    rungs = Rung("bits=8", {1000: (0.001, 0.001)}), Rung("bits=4", {1000: (0.002, 0.002)})
    ladder = dict.fromkeys((*TP_POINTS, *EXPERT_POINTS), rungs)
    codes = Registration(FixpointSumConfig, codec=FixpointCodec, rounds=FixpointRounds, ladder=ladder)
    registry.register("codes", codes)
