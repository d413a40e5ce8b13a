"""Selection of the compressor for each message, by pure functions, so that sender and receiver agree."""

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
    """The inputs to compression decisions for a pipeline message, known to sender and receiver.

    Args:
        iteration: training iteration, 0-based; -1 in evaluation.
        boundary: number of the boundary between two virtual stages: the number of the earlier stage.
        micro_batch: number of the micro-batch within the step.
        num_micro_batches: micro-batches of the step.
        epilogue: sent after the sender's last forward of the step, when no compute is left to hide it.
    """

    iteration: int
    boundary: int
    micro_batch: int
    num_micro_batches: int
    epilogue: bool = False


@dataclass
class SkippedSteps:
    """Count of the steps of a run whose update was skipped."""

    skipped: int = 0


class CompressionPlan:
    """Compressors of all points.

    Args:
        specs: the specs by point; traffic of other points is not compressed.
        stage, stages: this rank's pipeline stage, and the number of stages.

    ``steps`` counts skipped updates; a run has its ``Progress`` count them.
    """

    def __init__(self, specs: Mapping[Point, Spec], stage: int = 0, stages: int = 1) -> None:
        self.specs = dict(specs)
        self.stage = stage
        self.stages = stages
        self.steps = SkippedSteps()
        self._iteration = 0
        self._tuned: dict[Point, dict[str, float]] = {}
        self._exact: set[Point] = set()
        self._rounds: dict[tuple[Point, Any], RoundCompressor] = {}
        self._codecs: dict[tuple[Point, Any], Codec] = {}

    def activation(self, point: Point) -> Activation:
        """Iterations and stages in which the point's traffic is compressed."""
        return self.specs[point].activation if point in self.specs else Activation()

    def on(self, point: Point, iteration: int) -> bool:
        """Whether an iteration's reductions at a point are compressed; -1 in evaluation.

        The warm-up of a compressor that freezes the optimizer's second moments counts updates, since skipped steps do
        not contribute to the moments.
        """
        counts_updates = iteration >= 0 and self.rounds(point).traits.freezes_variance
        return self.activation(point).on(iteration - self.steps.skipped if counts_updates else iteration)

    def compressed(self, point: Point) -> bool:
        """Whether a point has a compressor other than the identity."""
        spec = self.specs.get(point)
        return spec is not None and not spec.identity

    def covers(self, point: Point, sender_stage: int) -> bool:
        """Whether messages from a stage are ever compressed."""
        return self.compressed(point) and self.activation(point).covers_stage(sender_stage, self.stages)

    @property
    def fused_embedding(self) -> bool:
        """Whether a single all-reduce of a tied embedding's gradient spans all replicas of the stages that hold it."""
        spec = self.specs.get(Point.EMBED_GRAD)
        return spec is not None and spec.fused

    def begin_step(self, iteration: int) -> None:
        """Begin a step; the iteration selects scheduled options, except in evaluations (-1)."""
        if iteration >= 0:
            self._iteration = iteration

    def tune(self, point: Point, values: Mapping[str, float] | None) -> None:
        """Set a point's options as chosen by a controller, or None for exact reductions on this stage. All ranks that
        take part must make the same call."""
        self._tuned[point] = dict(values or {})
        self._exact = self._exact - {point} if values is not None else self._exact | {point}

    def exact(self, point: Point) -> bool:
        """Whether a controller has set this stage to exact reductions, independent of other stages."""
        return point in self._exact

    def trial(self, point: Point, values: Mapping[str, float] | None) -> CompressionPlan:
        """A plan for a single point that compresses in every iteration with these options; exact if None."""
        if values is None:
            return CompressionPlan({}, self.stage, self.stages)
        spec = self.specs[point]
        options = spec.options_at(self._iteration, {**self._tuned.get(point, {}), **values})
        activation = replace(spec.activation, warmup_iters=0)
        fixed = replace(spec, options=options, activation=activation, schedules={})
        return CompressionPlan({point: fixed}, self.stage, self.stages)

    def options(self, point: Point) -> Any:
        """This iteration's options of a point; None for a point without a compressor."""
        spec = self.specs.get(point)
        return None if spec is None else spec.options_at(self._iteration, self._tuned.get(point))

    def ever_compresses(self, point: Point, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> bool:
        """Whether tensors of this shape are worth compressing with any options that the point may take during the run.

        ``dtype`` is the dtype of messages; reductions are compared in fp32.
        """
        spec = self.specs.get(point)
        if spec is None:
            return False
        if point.is_reduction:
            return any(spec.make_rounds(options).should_compress(shape) for options in spec.extreme_options())
        return any(
            spec.make_codec(options).should_compress(torch.Size(shape), dtype) for options in spec.extreme_options()
        )

    def rounds(self, point: Point) -> RoundCompressor:
        """Stateless compressor of a point's reductions, with this iteration's options."""
        if point not in self.specs:
            return _EXACT_ROUNDS
        options = self.options(point)
        if (point, options) not in self._rounds:
            self._rounds[point, options] = self.specs[point].make_rounds(options)
        return self._rounds[point, options]

    def serving(self, point: Point, shape: tuple[int, ...] | None, state: CompressorState) -> RoundCompressor | None:
        """Compressor of a tensor in an iteration in which the point is on; None for an exact reduction.

        A residual left from earlier iterations is added to the first exact reduction.

        Args:
            point: the point.
            shape: shape of the parameters; None for a whole bucket.
            state: the state of the tensor.
        """
        compressor = self.rounds(point)
        if point not in self._exact and (shape is None or compressor.should_compress(shape)):
            return compressor
        kind = self.specs[point].feedback
        has_residual = kind != "off" and RESIDUAL in state.tensors
        return LastResidual(compressor, cast(SumResidual, kind)) if has_residual else None

    def codec(self, point: Point) -> Codec:
        """Stateless codec of a point's messages, with this iteration's options."""
        if point not in self.specs:
            return _EXACT_CODEC
        options = self.options(point)
        if (point, options) not in self._codecs:
            self._codecs[point, options] = self.specs[point].make_codec(options)
        return self._codecs[point, options]
