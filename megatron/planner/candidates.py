"""Compressors that ``--compress auto`` may choose in a run, by point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.compression.api import SumTraits
from megatron.compression.ladder import MAX_NOISE
from megatron.compression.plugins import build_registry
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, named_points, read_specs
from megatron.config.check_compression import no_traffic_reason
from megatron.config.run import RunConfig
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster
from megatron.planner.costs import wires_of
from megatron.planner.search import refusal_reason


@dataclass(frozen=True)
class CandidateSpec:
    """A compressor that may be chosen.

    Args:
        spec: value of ``--compress``.
        increase: upper end of its measured increase of the validation loss in a run of this length, in percent.
        mean_increase: mean of that increase.
        residual: norm of the residual over that of the gradient, as measured; None without error feedback.
    """

    spec: str
    increase: float
    mean_increase: float = 0.0
    residual: float | None = None


Ladders = Mapping[Point, Sequence[CandidateSpec]]
"""Candidates by point."""


def read_ladders(config: RunConfig, choice: Choice, cluster: Cluster) -> Ladders:
    """Read the candidates that compressors declare for each point with traffic in a choice and no spec of the user.

    Sums in two levels are candidates where several nodes have several replicas each. Compressors that quantize with
    more noise than ``MAX_NOISE`` are none.

    Args:
        config: resolved configuration; its own specs are those of the user.
        choice: the layout.
        cluster: the numbers of devices and nodes.

    Raises:
        UserError: when a compressor declares options that it cannot read.
    """
    registry = build_registry(config.compression.compress_module)
    length = RunLength(config.training.planned_iters or 1_000_000)
    boundaries = choice.pp * choice.chunks - 1
    two_levels = 1 < wires_of(cluster, choice).dp.per_node < choice.dp
    user_points = named_points(choice.specs)
    ladders: dict[Point, list[CandidateSpec]] = {}
    for point in Point:
        if not point.compressible or point is Point.OUTER or point.value in user_points:
            continue
        if no_traffic_reason(config.model, config.parallel, choice.world_size, point):
            continue
        for name in registry.names:
            for candidate in list_candidates(registry, name, point, config.model.hidden_size, length, boundaries):
                spec = read_specs([candidate.spec], registry, length)[point]
                fits_nodes = two_levels or not sum_traits(spec).levels
                if fits_nodes and not is_noisy(candidate, spec) and accepts_candidate(config, choice, candidate):
                    ladders.setdefault(point, []).append(candidate)
    return ladders


def sum_traits(spec: Spec) -> SumTraits:
    """Properties of a spec's sums; the defaults at points of messages."""
    return spec.make_rounds().traits if spec.point.is_reduction else SumTraits()


def is_noisy(candidate: CandidateSpec, spec: Spec) -> bool:
    """Whether a compressor quantizes sums of gradients with more noise than ``MAX_NOISE``, as declared."""
    return sum_traits(spec).quantizes and (candidate.residual or 0.0) > MAX_NOISE


def accepts_candidate(config: RunConfig, choice: Choice, candidate: CandidateSpec) -> bool:
    """Whether training accepts a compressor in a run."""
    return refusal_reason(config, replace(choice, specs=(*choice.specs, candidate.spec))) is None


def list_candidates(
    registry: Registry, name: str, point: Point, hidden_size: int, length: RunLength, boundaries: int
) -> list[CandidateSpec]:
    """List the settings of a compressor that may be chosen at a point, with their costs in a run of a length.

    Costs of pipeline messages were measured between two stages; those of ``boundaries`` between virtual stages add up.
    """
    iterations, factor = length.train_iters, boundaries if point in (Point.PP_FWD, Point.PP_BWD) else 1
    return [
        CandidateSpec(
            rung.spec(point, name, hidden_size),
            factor * rung.highest_increase(iterations),
            factor * rung.mean_increase(iterations),
            rung.residual,
        )
        for rung in registry[name].ladder.get(point, ())
    ]


def filter_by_budget(ladders: Ladders, budget: float) -> Ladders:
    """Filter the candidates by a budget for the increase of the loss; a point without such candidates keeps none."""
    return {
        point: [candidate for candidate in candidates if candidate.increase <= budget]
        for point, candidates in ladders.items()
    }


def candidate_specs(ladders: Ladders) -> list[str]:
    """Specs of all candidates."""
    return [candidate.spec for candidates in ladders.values() for candidate in candidates]
