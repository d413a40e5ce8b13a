"""Settings besides compressors that would make a run faster, by prediction."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from megatron.compression.points import Point
from megatron.compression.spec import point_name
from megatron.planner.choice import Choice
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.settings import predict_gain

_MIN_GAIN, _MIN_GAIN_OF_DELAY, _MIN_GAIN_OF_ISLANDS = 0.03, 0.1, 0.2
"""Shares of an iteration that a setting must save: more if it changes the training."""

_NOTE_ON_DELAY = " (every gradient is applied a step late, which costs loss: see the guide on delayed gradients)"
_ISLANDS_SPEC = "outer=fixpoint,bits=4,outer-preset=streaming,every=30"


def suggestions(predictor: Predictor, prediction: Prediction, considered: Collection[str] = ()) -> list[str]:
    """Describe the settings that would save enough time.

    Args:
        predictor: predictor of the model on the cluster.
        prediction: prediction of the run as it is.
        considered: fields of ``ParallelConfig`` that were chosen already; see ``list_free_settings``.
    """
    lines = []
    for flags, note, choice, least_gain in _alternatives(predictor, prediction.choice, considered):
        gain = predict_gain(predictor, prediction, choice)
        if gain >= least_gain:
            lines.append(f"{flags} would save {gain:.0%} of an iteration{note}")
    return lines


def _alternatives(
    predictor: Predictor, choice: Choice, considered: Collection[str]
) -> Iterator[tuple[str, str, Choice, float]]:
    """Flags, a note on them, the choice with them, and the share of an iteration that they must save."""
    if choice.dp > 1 and not choice.overlaps_reduction and "overlap_grad_reduce" not in considered:
        yield "--overlap-grad-reduce", "", replace(choice, overlap=True), _MIN_GAIN
    if choice.dp > 1 and not choice.delay:
        flags = "--delay 1 in place of --overlap-grad-reduce" if choice.overlap else "--delay 1"
        yield flags, _NOTE_ON_DELAY, replace(choice, delay=1, overlap=False), _MIN_GAIN_OF_DELAY
    if choice.flush and choice.can_overlap_steps:
        eager = replace(choice, schedule="eager-1f1b", flush=False)
        yield "--no-pipeline-flush --pipeline-schedule eager-1f1b", "", eager, _MIN_GAIN
    elif choice.flush and replace(choice, delay=1).can_overlap_steps:
        eager = replace(choice, schedule="eager-1f1b", delay=1, overlap=False, flush=False)
        flags = "--delay 1 --no-pipeline-flush --pipeline-schedule eager-1f1b"
        yield flags, _NOTE_ON_DELAY, eager, _MIN_GAIN_OF_DELAY
    if choice.pp > 1 and choice.chunks == 1 and choice.schedule == "1f1b":
        if "pipeline_schedule" not in considered:
            yield "--pipeline-schedule zb-h1", "", replace(choice, schedule="zb-h1"), _MIN_GAIN
        if predictor.config.model.num_layers % (2 * choice.pp) == 0:
            yield "--pipeline-schedule zb-v", "", replace(choice, schedule="zb-v", chunks=2), _MIN_GAIN
    nodes = predictor.cluster.gpus // predictor.cluster.gpus_per_node
    has_length = predictor.config.training.planned_iters is not None
    if nodes > 1 and choice.islands == 1 and choice.dp % nodes == 0 and has_length:
        dp = choice.dp // nodes
        specs = [spec for spec in choice.specs if dp > 1 or point_name(spec) != Point.DP_GRAD.value]
        islands = replace(
            choice, dp=dp, islands=nodes, specs=(*specs, _ISLANDS_SPEC), overlap=choice.overlap and dp > 1
        )
        note = " (in place of auto, and at a cost in loss that is not in the budget: see the guide on islands)"
        yield f"--islands {nodes} --compress {_ISLANDS_SPEC}", note, islands, _MIN_GAIN_OF_ISLANDS
