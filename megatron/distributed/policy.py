"""Selection of compressors: a pure function of the message, so that sender and receiver agree."""

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
    """Position of a pipeline message in the run, known to sender and receiver.

    Args:
        iteration: training iteration, 0-based; -1 in evaluation.
        boundary: boundary between two virtual stages, by the number of the earlier stage.
        micro_batch: index of the micro-batch in the step.
        epilogue: whether the message follows the sender's last forward of the step, so that no computation hides it.
    """

    iteration: int
    boundary: int
    micro_batch: int
    epilogue: bool = False


@dataclass
class SkippedSteps:
    """Number of steps with a skipped update."""

    skipped: int = 0


class CompressionPlan:
    """Compressors of all points.

    Args:
        specs: specs by point; other points are not compressed.
        stage, stages: this rank's pipeline stage, and the number of stages.

    ``steps`` counts skipped updates; a run assigns its ``Progress``. ``evaluation_overrides`` holds, by point, whether
    evaluations compress regardless of the spec; ``substitutes`` the values of ``--compress`` set by ``substitute``.
    """

    def __init__(self, specs: Mapping[Point, Spec], stage: int = 0, stages: int = 1) -> None:
        self.specs = dict(specs)
        self.stage = stage
        self.stages = stages
        self.steps = SkippedSteps()
        self.evaluation_overrides: dict[Point, bool] = {}
        self._iteration = 0
        self._tuned: dict[Point, dict[str, float]] = {}
        self._exact: set[Point] = set()
        self._turned_off: set[Point] = set()
        self.substitutes: dict[Point, str] = {}
        self._rounds: dict[tuple[Point, Any], RoundCompressor] = {}
        self._codecs: dict[tuple[Point, Any], Codec] = {}

    def activation(self, point: Point) -> Activation:
        """Iterations and stages with compression at a point."""
        activation = self.specs[point].activation if point in self.specs else Activation()
        in_evaluation = self.evaluation_overrides.get(point)
        return activation if in_evaluation is None else replace(activation, evaluation=in_evaluation)

    @property
    def warmup_iters(self) -> int:
        """Iterations until all compressors are active."""
        return max((spec.activation.warmup_iters for spec in self.specs.values()), default=0)

    def is_active(self, point: Point, iteration: int) -> bool:
        """Whether reductions at a point are compressed in an iteration (-1 in evaluation).

        The warm-up of a compressor that freezes the optimizer's second moments does not count skipped steps, since
        they do not update the moments.
        """
        counts_updates = iteration >= 0 and self.rounds(point).traits.freezes_variance
        return self.activation(point).is_active(iteration - self.steps.skipped if counts_updates else iteration)

    def is_compressed(self, point: Point) -> bool:
        """Whether a point has a compressor that changes its traffic."""
        spec = self.specs.get(point)
        return spec is not None and not spec.identity

    def covers(self, point: Point, sender_stage: int) -> bool:
        """Whether messages from a stage are compressed in any iteration."""
        return self.is_compressed(point) and self.activation(point).covers_stage(sender_stage, self.stages)

    def compresses(self, point: Point, iteration: int) -> bool:
        """Whether traffic of this stage at a point is compressed in an iteration (-1 in evaluation)."""
        covered = self.covers(point, self.stage) and not self.is_turned_off(point)
        return covered and self.activation(point).is_active(iteration)

    @property
    def fused_embedding(self) -> bool:
        """Whether a single all-reduce sums a tied embedding's gradient over all replicas of all stages with a copy."""
        spec = self.specs.get(Point.EMBED_GRAD)
        return spec is not None and spec.fused

    def begin_step(self, iteration: int) -> None:
        """Begin a step. The iteration selects scheduled options; evaluations (-1) keep the last options."""
        if iteration >= 0:
            self._iteration = iteration

    def tune(self, point: Point, values: Mapping[str, float] | None) -> None:
        """Set the options that a controller has chosen; None means exact reductions on this stage. All ranks of the
        reduction must make the same call."""
        self._tuned[point] = dict(values or {})
        self._exact = self._exact - {point} if values is not None else self._exact | {point}

    def substitute(self, point: Point, spec: Spec | None, text: str = "") -> None:
        """Replace a point's compressor from the next step on. All ranks must make the same call.

        Args:
            point: a point with a compressor.
            spec: the same compressor with other options, which also ends exact traffic; None for exact traffic.
            text: the value of ``--compress``; unused for exact traffic.
        """
        if spec is None:
            self._turned_off.add(point)
            return
        self._turned_off.discard(point)
        self.substitutes[point] = text
        assert spec.name == self.specs[point].name
        self.specs[point] = spec
        for cache in (self._rounds, self._codecs):
            for key in [key for key in cache if key[0] is point]:
                del cache[key]

    def is_turned_off(self, point: Point) -> bool:
        """Whether ``substitute`` has replaced the point's compressor with exact traffic."""
        return point in self._turned_off

    def make_trial_plan(self, point: Point, values: Mapping[str, float] | None) -> CompressionPlan:
        """Make a plan for a single point that compresses in every iteration with these options; exact if None."""
        if values is None:
            return CompressionPlan({}, self.stage, self.stages)
        spec = self.specs[point]
        options = spec.options_at(self._iteration, {**self._tuned.get(point, {}), **values})
        activation = replace(spec.activation, warmup_iters=0)
        fixed = replace(spec, options=options, activation=activation, schedules={})
        return CompressionPlan({point: fixed}, self.stage, self.stages)

    def options(self, point: Point, iteration: int = -1) -> Any:
        """Options of a point in an iteration (-1 for this one); None for a point without a compressor."""
        spec = self.specs.get(point)
        at = self._iteration if iteration < 0 else iteration
        return None if spec is None else spec.options_at(at, self._tuned.get(point))

    def ever_compresses(self, point: Point, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> bool:
        """Whether the point compresses tensors of this shape with any of its options during the run.

        ``dtype`` is the dtype of messages; reductions use fp32.
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
        """Compressor of a point's reductions with this iteration's options; it holds no state."""
        if point not in self.specs:
            return _EXACT_ROUNDS
        options = self.options(point)
        if (point, options) not in self._rounds:
            self._rounds[point, options] = self.specs[point].make_rounds(options)
        return self._rounds[point, options]

    def select_compressor(
        self, point: Point, shape: tuple[int, ...] | None, state: CompressorState
    ) -> RoundCompressor | None:
        """Select the compressor of a tensor while the point is active; None for an exact reduction.

        The first exact reduction adds the residual of earlier iterations.

        Args:
            point: point of the reduction.
            shape: shape of each parameter; None for a whole bucket.
            state: state of the tensor.
        """
        compressor = self.rounds(point)
        is_exact = point in self._exact or self.is_turned_off(point)
        if not is_exact and (shape is None or compressor.should_compress(shape)):
            return compressor
        kind = self.specs[point].feedback
        has_residual = kind != "off" and RESIDUAL in state.tensors
        return LastResidual(compressor, cast(SumResidual, kind)) if has_residual else None

    def codec(self, point: Point, iteration: int = -1) -> Codec:
        """Codec of a point's messages with the options of an iteration (-1 for this one); it holds no state."""
        if point not in self.specs or self.is_turned_off(point):
            return _EXACT_CODEC
        options = self.options(point, iteration)
        if (point, options) not in self._codecs:
            self._codecs[point, options] = self.specs[point].make_codec(options)
        return self._codecs[point, options]
