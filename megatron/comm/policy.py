"""Decides which compressor serves which traffic, by pure functions, so that both ends of a message agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.error_feedback import RESIDUAL, LastResidual, SumResidual
from megatron.compression.identity import IdentityCodec, IdentityRounds
from megatron.compression.points import Point
from megatron.compression.schedule import Activation
from megatron.compression.spec import Spec
from megatron.compression.state import CompressorState

_EXACT_ROUNDS = IdentityRounds()
_EXACT_CODEC = IdentityCodec()


@dataclass(frozen=True)
class Position:
    """All that the compression of a pipeline message may depend on; both of its ends know it.

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
        specs: the specs by point; a point that is not named sends its traffic as it is.
        stage, stages: this rank's pipeline stage, and their number.

    ``skipped`` is the number of the run's steps whose update was skipped.
    """

    def __init__(self, specs: Mapping[Point, Spec], stage: int = 0, stages: int = 1) -> None:
        self.specs = dict(specs)
        self.stage = stage
        self.stages = stages
        self.skipped = 0
        self._iteration = 0
        self._tuned: dict[Point, dict[str, float]] = {}
        self._exact: set[Point] = set()
        self._rounds: dict[tuple[Point, Any], RoundCompressor] = {}
        self._codecs: dict[tuple[Point, Any], Codec] = {}

    def activation(self, point: Point) -> Activation:
        """The iterations and stages in which the point's traffic is compressed."""
        return self.specs[point].activation if point in self.specs else Activation()

    def on(self, point: Point, iteration: int) -> bool:
        """Whether an iteration's reductions at a point are compressed; -1 in evaluation.

        The warm-up of a compressor that freezes the optimizer's second moments counts updates: skipped steps have
        measured nothing.
        """
        counts_updates = iteration >= 0 and self.rounds(point).traits.freezes_variance
        return self.activation(point).on(iteration - self.skipped if counts_updates else iteration)

    def compressed(self, point: Point) -> bool:
        """Whether anything but the identity serves a point."""
        spec = self.specs.get(point)
        return spec is not None and not spec.identity

    def covers(self, point: Point, sender_stage: int) -> bool:
        """Whether what a stage sends is ever compressed."""
        return self.compressed(point) and self.activation(point).covers_stage(sender_stage, self.stages)

    @property
    def fused_embedding(self) -> bool:
        """Whether one all-reduce of a tied embedding's gradient spans the replicas of all stages that hold it."""
        spec = self.specs.get(Point.EMBED_GRAD)
        return spec is not None and spec.fused

    def begin(self, iteration: int) -> None:
        """Begins a step, whose iteration selects options that change over the run; evaluations (-1) do not."""
        if iteration >= 0:
            self._iteration = iteration

    def tune(self, point: Point, values: Mapping[str, float] | None) -> None:
        """Sets options of a point that a controller has chosen, or None for exact reductions on this stage; all ranks
        that take part call this alike."""
        self._tuned[point] = dict(values or {})
        self._exact = self._exact - {point} if values is not None else self._exact | {point}

    def exact(self, point: Point) -> bool:
        """Whether a controller lets this stage reduce exactly, whatever the other stages do."""
        return point in self._exact

    def trial(self, point: Point, values: Mapping[str, float] | None) -> CompressionPlan:
        """A plan that reduces at one point, compressed in every iteration with these options; None: exactly."""
        if values is None:
            return CompressionPlan({}, self.stage, self.stages)
        spec = self.specs[point]
        options = spec.options_at(self._iteration, {**self._tuned.get(point, {}), **values})
        activation = replace(spec.activation, warmup_iters=0)
        fixed = replace(spec, options=options, activation=activation, schedules={})
        return CompressionPlan({point: fixed}, self.stage, self.stages)

    def options(self, point: Point) -> Any:
        """The options of this iteration at a point; None where nothing is ever compressed."""
        spec = self.specs.get(point)
        return None if spec is None else spec.options_at(self._iteration, self._tuned.get(point))

    def ever_compresses(self, point: Point, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> bool:
        """Whether tensors of this shape are worth compressing with any options that the point's may become.

        ``dtype`` is that of messages; reductions are compared in fp32.
        """
        spec = self.specs.get(point)
        if spec is None:
            return False
        if point.is_reduction:
            return any(spec.rounds(options).should_compress(shape) for options in spec.variants())
        return any(spec.codec(options).should_compress(torch.Size(shape), dtype) for options in spec.variants())

    def rounds(self, point: Point) -> RoundCompressor:
        """The compressor of reductions at a point, with the options of this iteration; without state."""
        if point not in self.specs:
            return _EXACT_ROUNDS
        options = self.options(point)
        if (point, options) not in self._rounds:
            self._rounds[point, options] = self.specs[point].rounds(options)
        return self._rounds[point, options]

    def serving(self, point: Point, shape: tuple[int, ...] | None, state: CompressorState) -> RoundCompressor | None:
        """The compressor of one tensor in an iteration in which the point is on; None for an exact reduction.

        A residual that is left of earlier iterations goes along with the first exact reduction.

        Args:
            point: the point.
            shape: shape of the parameters; None for anything that the compressor was given as a whole.
            state: the state of the tensor.
        """
        compressor = self.rounds(point)
        if point not in self._exact and (shape is None or compressor.should_compress(shape)):
            return compressor
        kind = self.specs[point].feedback
        left = kind != "off" and RESIDUAL in state.tensors
        return LastResidual(compressor, cast(SumResidual, kind)) if left else None

    def codec(self, point: Point) -> Codec:
        """The codec of messages at a point, with the options of this iteration; without state."""
        if point not in self.specs:
            return _EXACT_CODEC
        options = self.options(point)
        if (point, options) not in self._codecs:
            self._codecs[point, options] = self.specs[point].codec(options)
        return self._codecs[point, options]
