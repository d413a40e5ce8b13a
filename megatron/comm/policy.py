"""Which compressor serves which traffic: pure functions, so that two ends can never disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.identity import IdentityCodec, IdentityRounds
from megatron.compression.points import Point
from megatron.compression.schedule import Activation
from megatron.compression.spec import Spec


@dataclass(frozen=True)
class Position:
    """Everything a decision about one pipeline message may depend on; both of its ends know it.

    Args:
        iteration: training iteration, 0-based; -1 in evaluation.
        boundary: number of the boundary between two virtual stages: that of the earlier one.
        micro_batch: number of the micro-batch within the step.
        num_micro_batches: micro-batches of the step.
        epilogue: sent after the sender's last forward of the step, when nothing is left to hide it.
    """

    iteration: int
    boundary: int
    micro_batch: int
    num_micro_batches: int
    epilogue: bool = False


class CompressionPlan:
    """The compressor of each point.

    Args:
        specs: by point; a point that is not named sends its traffic as it is.
        stage, stages: this rank's pipeline stage, and their number.
    """

    def __init__(self, specs: Mapping[Point, Spec], stage: int = 0, stages: int = 1) -> None:
        self.specs = dict(specs)
        self.stage = stage
        self.stages = stages

    def activation(self, point: Point) -> Activation:
        """When the point's traffic is compressed."""
        return self.specs[point].activation if point in self.specs else Activation()

    def compressed(self, point: Point) -> bool:
        """Whether anything but the identity serves a point."""
        spec = self.specs.get(point)
        return spec is not None and spec.entry.rounds is not IdentityRounds

    def covers(self, point: Point, sender_stage: int) -> bool:
        """Whether what a stage sends is ever compressed."""
        return self.compressed(point) and self.activation(point).covers_stage(sender_stage, self.stages)

    @property
    def fused_embedding(self) -> bool:
        """One embedding collective over the replicas of both stages."""
        spec = self.specs.get(Point.EMBED_GRAD)
        return spec is not None and spec.fused

    def rounds(self, point: Point) -> RoundCompressor:
        """A new compressor for sums at a point."""
        return self.specs[point].rounds() if point in self.specs else IdentityRounds()

    def codec(self, point: Point) -> Codec:
        """A new codec for messages at a point."""
        return self.specs[point].codec() if point in self.specs else IdentityCodec()
