"""Choice of ``--compress auto``: the fastest compressors by prediction whose measured cost in loss fits a budget."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import point_name, read_specs
from megatron.config.check_compression import why_no_traffic
from megatron.config.run import RunConfig
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster
from megatron.planner.costs import wires_of
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.search import refusal_reason

WORTHWHILE = 0.03
"""Share of an iteration that compression must save; also, sets this close to the fastest count as equally fast.

Predictions are not more accurate than this.
"""


NOTHING_TO_CHOOSE = "--compress auto: no point without a spec has both traffic and a compressor to choose"


@dataclass(frozen=True)
class CandidateSpec:
    """A compressor that may be chosen.

    Args:
        spec: value of ``--compress``.
        increase: upper end of its measured increase of the validation loss, in percent.
    """

    spec: str
    increase: float


Ladders = Mapping[Point, Sequence[CandidateSpec]]
"""Candidates by point."""


@dataclass(frozen=True)
class PointChoice:
    """The choice at a point.

    Args:
        point: the point.
        candidate: the chosen compressor; None for none.
        saved_s: predicted seconds per iteration that it saves in the chosen set; without one, that the fastest
            candidate would save in addition.
        reason: reason why nothing is chosen; empty where something is.
    """

    point: Point
    candidate: CandidateSpec | None
    saved_s: float
    reason: str = ""


@dataclass(frozen=True)
class AutoChoice:
    """The chosen compressors.

    Args:
        uncompressed: prediction with the specs of the user alone.
        chosen: prediction with the chosen compressors, too.
        points: choice at each point that has traffic and no spec of the user.
        increase: largest expected increase of the validation loss, in percent: the sum over the points.
        considered: number of sets of compressors within the budget.
    """

    uncompressed: Prediction
    chosen: Prediction
    points: Sequence[PointChoice]
    increase: float
    considered: int


def read_ladders(config: RunConfig, choice: Choice, cluster: Cluster) -> Ladders:
    """Candidates of each point that has traffic in a choice and no spec of the user, as the compressors declare them.

    Sums in two levels are candidates where several nodes have several replicas each.

    Args:
        config: resolved configuration; its own specs are those of the user.
        choice: the layout.
        cluster: the numbers of devices and nodes.

    Raises:
        UserError: when a compressor declares options that it cannot read.
    """
    registry = build_registry(config.compression.compress_module)
    length = RunLength(config.training.planned_iters or 1_000_000)
    two_levels = 1 < wires_of(cluster, choice).dp.per_node < choice.dp
    user_points = {point_name(spec) for spec in choice.specs}
    ladders: dict[Point, list[CandidateSpec]] = {}
    for point in Point:
        if not point.compressible or point is Point.OUTER or point.value in user_points:
            continue
        if why_no_traffic(config.model, config.parallel, choice.world_size, point):
            continue
        for name in registry.names:
            for rung in registry[name].ladder.get(point, ()):
                text = rung.spec(point, name, config.model.hidden_size)
                spec = read_specs([text], registry, length)[point]
                refused = refusal_reason(config, replace(choice, specs=(*choice.specs, text))) is not None
                if not refused and (two_levels or not (point.is_reduction and spec.make_rounds().traits.levels)):
                    ladders.setdefault(point, []).append(CandidateSpec(text, rung.highest_increase))
    return ladders


def candidate_specs(ladders: Ladders) -> list[str]:
    """Specs of all candidates."""
    return [candidate.spec for candidates in ladders.values() for candidate in candidates]


def choose(predictor: Predictor, choice: Choice, ladders: Ladders, budget: float, memory_gib: float) -> AutoChoice:
    """Choose compressors by predicting every set within the budget, so the choice is exact.

    Nothing is chosen if that is as fast as the fastest set, within ``WORTHWHILE``; otherwise the set with the lowest
    increase among those that are.

    Args:
        predictor: predictor of the model on the cluster.
        choice: the layout, with the specs of the user.
        ladders: candidates by point.
        budget: largest acceptable sum of increases of the validation loss, in percent.
        memory_gib: memory of a device. If the run exceeds it without compressors, sets may not exceed that.

    Raises:
        UserError: when a set cannot be predicted.
    """
    uncompressed = predictor.predict(choice)
    limit = max(memory_gib * 2**30, uncompressed.memory_bytes)
    sets: list[tuple[float, dict[Point, CandidateSpec], Prediction]] = [(0.0, {}, uncompressed)]
    for members in itertools.product(*([None, *candidates] for candidates in ladders.values())):
        chosen = {point: member for point, member in zip(ladders, members, strict=True) if member is not None}
        increase = sum(member.increase for member in chosen.values())
        if chosen and increase <= budget:
            prediction = predictor.predict(_with_specs(choice, chosen))
            if prediction.memory_bytes <= limit:
                sets.append((increase, chosen, prediction))
    fastest_s = min(prediction.seconds for _, _, prediction in sets)
    fast = [entry for entry in sets if entry[2].seconds * (1 - WORTHWHILE) <= fastest_s]
    increase, chosen, prediction = sets[0] if sets[0] in fast else min(fast, key=lambda s: (s[0], s[2].seconds))
    points = [
        _point_choice(predictor, choice, chosen, prediction, point, candidates, budget - increase, limit)
        for point, candidates in ladders.items()
    ]
    return AutoChoice(uncompressed, prediction, points, increase, len(sets))


def _with_specs(choice: Choice, chosen: Mapping[Point, CandidateSpec]) -> Choice:
    return replace(choice, specs=(*choice.specs, *(candidate.spec for candidate in chosen.values())))


def _point_choice(
    predictor: Predictor,
    choice: Choice,
    chosen: Mapping[Point, CandidateSpec],
    prediction: Prediction,
    point: Point,
    candidates: Sequence[CandidateSpec],
    remaining_budget: float,
    limit: float,
) -> PointChoice:
    """The choice at a point with what it saves, or the reason why nothing is chosen there."""
    if point in chosen:
        others = {other: candidate for other, candidate in chosen.items() if other is not point}
        saved_s = predictor.predict(_with_specs(choice, others)).seconds - prediction.seconds
        return PointChoice(point, chosen[point], saved_s)
    predictions = {
        candidate: predictor.predict(_with_specs(choice, {**chosen, point: candidate})) for candidate in candidates
    }
    fastest = min(candidates, key=lambda candidate: predictions[candidate].seconds)
    saved_s = prediction.seconds - predictions[fastest].seconds
    if saved_s <= 0.0:
        return PointChoice(point, None, saved_s, "coding would take longer than it saves")
    would_save = f"{fastest.spec.partition('=')[2]} would save {saved_s:.3g} s"
    if saved_s <= WORTHWHILE * prediction.seconds:
        return PointChoice(point, None, saved_s, f"{would_save}, too little")
    if predictions[fastest].memory_bytes > limit:
        return PointChoice(point, None, saved_s, f"{would_save}, but does not fit into memory")
    if fastest.increase > remaining_budget:
        return PointChoice(point, None, saved_s, f"{would_save}, but costs up to {fastest.increase:.2f}% of loss")
    return PointChoice(point, None, saved_s, f"{would_save}, together with other points too little")


def report(result: AutoChoice, budget: float) -> str:
    """Table of the choice: for each point what was chosen, what it saves and costs, and the flags that repeat it."""
    before_s, after_s = result.uncompressed.seconds, result.chosen.seconds
    lines = [
        f"--compress auto: predicted {after_s:.3g} s an iteration, {before_s:.3g} s without: {before_s / after_s:.2f} "
        f"times as fast; validation loss at most {result.increase:.2f}% higher (--max-loss-increase {budget:g}), as "
        "measured on a small GPT"
    ]
    for point in result.points:
        name = point.point.value
        if point.candidate is None:
            lines.append(f"  {name:<13} nothing: {point.reason}")
        else:
            cost = f"saves {point.saved_s:.3g} s, loss at most {point.candidate.increase:.2f}% higher"
            lines.append(f"  {name:<13} {point.candidate.spec.partition('=')[2]}: {cost}")
    specs = [point.candidate.spec for point in result.points if point.candidate is not None]
    if not result.points:
        lines.append(f"  {NOTHING_TO_CHOOSE}")
    elif specs:
        lines.append(f"  the same by hand: {' '.join(f'--compress {spec}' for spec in specs)}")
    return "\n".join(lines)
