"""Costs of the pieces of a choice, from cached dry runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron.base.errors import UserError, first_line
from megatron.compression.api import Level
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec
from megatron.config.run import RunConfig
from megatron.distributed.nodes import positions_by_node
from megatron.distributed.policy import CompressionPlan
from megatron.planner.choice import Choice
from megatron.planner.cluster import CODING, Cluster, Wire, across_wire, hop_wire, inside_wire, site_wire, wire_between
from megatron.planner.dry_run import DryBackend, ExpertLoad
from megatron.planner.piece_costs import EMBEDDING, EXPERTS, HEAD, MessageCost, PieceCost, ReductionCost, kind_of
from megatron.planner.pieces import Pieces, run_message

_T = TypeVar("_T")

STEADY = 1 << 40
"""An iteration past every warm-up."""

Levels = Mapping[Level, tuple[Wire, int]]
"""Wire and number of ranks at each level of a hierarchical sum."""

TP_POINTS = (Point.TP_FWD, Point.TP_BWD)
INNER_POINTS = (*TP_POINTS, *EXPERT_POINTS)
"""Points inside a layer."""


@dataclass(frozen=True)
class Wires:
    """Wires of each kind of group.

    ``ep`` connects ranks that share experts, ``expert_dp`` ranks that hold equal experts, ``ends`` the first and the
    last stage, ``holders`` all replicas of these stages. ``hops`` is indexed by the pipeline rank of the sender.
    """

    tp: Wire
    dp: Wire
    ep: Wire
    expert_dp: Wire
    hops: tuple[Wire, ...]
    ends: Wire
    holders: Wire
    world: Wire


def wires_of(cluster: Cluster, choice: Choice) -> Wires:
    """Wires inside an island of a choice. The rank order is tensor-parallel fastest, then data-parallel, then
    pipeline."""
    cluster = cluster.split_over_islands(choice.islands)
    replica = choice.tp * choice.dp
    dp = wire_between(cluster, choice.dp, choice.tp)
    # The first and the last stage; if both are in the same node, all stages are.
    ends = hop_wire(cluster, replica, choice.pp - 1, choice.pp)
    holders = ends
    if ends.per_node == 1:
        # The holders of a stage are placed like its replicas.
        holders_per_node = min(dp.per_node, choice.dp)
        holders = across_wire(cluster, holders_per_node, min(replica, cluster.gpus_per_node) / holders_per_node)
        if ends.site is not None:
            per_site = min(max(cluster.site_gpus // choice.tp, 1), choice.dp)
            site = site_wire(cluster, per_site, min(replica, cluster.site_gpus) / per_site)
            holders = dataclasses.replace(holders, site=site)
    return Wires(
        tp=wire_between(cluster, choice.tp, 1),
        dp=dp,
        ep=wire_between(cluster, choice.ep, 1 if choice.folded else choice.tp),
        expert_dp=wire_between(cluster, choice.expert_dp, choice.expert_ranks),
        hops=tuple(hop_wire(cluster, replica, stage, choice.pp) for stage in range(choice.pp)),
        ends=ends,
        holders=holders,
        world=wire_between(cluster, choice.world_size, 1),
    )


class CostBook:
    """Costs by piece, computed on first use and cached.

    Args:
        config: resolved configuration; choices replace its layout and compressors.
        cluster: the cluster.
        vocab_size: entries of the vocabulary.
        imbalance: maximum over mean number of tokens per expert of a layer.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, vocab_size: int, imbalance: float = 1.0) -> None:
        self.config = config
        self.cluster = cluster
        self.vocab_size = vocab_size
        # The dry run is past all warm-ups, regardless of their length.
        self._length = RunLength(config.training.planned_iters or 1_000_000, lambda epochs: 1)
        self.imbalance = imbalance
        self._backend = DryBackend(cluster.device)
        self._specs: dict[str, tuple[Spec, ...]] = {}
        self._sets: dict[tuple[str, ...], dict[Point, Spec]] = {}
        self._costs: dict[object, Any] = {}
        self._levels: dict[object, Levels] = {}

    def specs(self, choice: Choice) -> dict[Point, Spec]:
        """Compressors of a choice, by point."""
        if choice.specs not in self._sets:
            for text in choice.specs:
                if text not in self._specs:
                    only = dataclasses.replace(self.config.compression, compress=[text])
                    self._specs[text] = tuple(only.specs(self._length).values())
            self._sets[choice.specs] = {spec.point: spec for text in choice.specs for spec in self._specs[text]}
        return self._sets[choice.specs]

    def _get_or_compute(self, key: tuple[object, ...], texts: tuple[str, ...], run: Callable[[], _T]) -> _T:
        """Return the cached cost of a dry run with the specs ``texts``, run on first use; see ``run_dry``."""
        if key not in self._costs:
            self._costs[key] = run_dry(texts, run)
        cost: _T = self._costs[key]
        return cost

    def spec_texts(self, choice: Choice, *points: Point) -> tuple[str, ...]:
        """Specs of a choice, as text, that serve any of the points."""
        self.specs(choice)
        return tuple(text for text in choice.specs if any(spec.point in points for spec in self._specs[text]))

    @staticmethod
    def _partition_key(choice: Choice, name: str) -> tuple[object, ...]:
        """Cache key of a piece's parameters and activations on a rank."""
        of_experts = (choice.ep, choice.folded) if kind_of(name) == EXPERTS else ()
        return choice.tp, choice.sequence_parallel, *of_experts

    def coding(self, choice: Choice, *points: Point) -> float:
        """Largest correction of the specs that serve the points."""
        corrections = [self.cluster.correction(CODING + text) for text in self.spec_texts(choice, *points)]
        return max(corrections, default=1.0)

    def _make_pieces(
        self, choice: Choice, specs: Mapping[Point, Spec], stage: int = 0, expert_load: ExpertLoad | None = None
    ) -> Pieces:
        config = choice.configure(self.config)
        plan = CompressionPlan(specs, stage, choice.pp)
        plan.begin_step(STEADY)
        return Pieces(config, self.vocab_size, self._backend, plan, STEADY, expert_load)

    def piece(self, choice: Choice, name: str, balanced: bool = False) -> PieceCost:
        """Cost of a piece's forward and backward, on the rank of the fullest expert or (``balanced``) on an average
        rank."""
        of_experts = kind_of(name) == EXPERTS
        points = INNER_POINTS if of_experts else TP_POINTS
        texts = self.spec_texts(choice, *points)
        recompute = choice.recompute if name not in (EMBEDDING, HEAD) else None
        expert_load = None
        if of_experts:
            levels = self.expert_levels(choice)
            nodes = levels[Level.ACROSS][1] if levels else 0
            expert_load = ExpertLoad(1.0 if balanced else self.imbalance, nodes)
        key = ("piece", name, *self._partition_key(choice, name), choice.micro_batch, recompute, texts, expert_load)
        if len(texts) > 1:  # one dry run per compressor, not per set of compressors
            return self._get_or_compute(key, texts, lambda: self._combined_piece(choice, name, balanced, texts))
        specs = {point: spec for point, spec in self.specs(choice).items() if point in points}
        return self._get_or_compute(
            key,
            texts,
            lambda: (
                self._make_pieces(choice, specs, expert_load=expert_load)
                .piece(name)
                .with_coding(self.coding(choice, *points))
            ),
        )

    def _combined_piece(self, choice: Choice, name: str, balanced: bool, texts: Sequence[str]) -> PieceCost:
        """Cost of a piece with several compressors inside layers."""
        exact, *changed = (
            self.piece(dataclasses.replace(choice, specs=specs), name, balanced)
            for specs in ((), *((text,) for text in texts))
        )
        return exact.with_changes(changed)

    def reduction(self, choice: Choice, name: str, stage: int, experts_only: bool = False) -> ReductionCost:
        """Cost of reducing a piece's gradients on a stage: over all replicas, or (``experts_only``) gradients of
        experts that not all replicas hold, over the replicas that do."""
        if (choice.ep == 1 or kind_of(name) != EXPERTS) and experts_only:
            return ReductionCost()
        specs = self.specs(choice)
        spec = specs.get(Point.DP_GRAD)
        covered = spec is not None and spec.activation.covers_stage(stage, choice.pp)
        texts = self.spec_texts(choice, Point.DP_GRAD) if covered else ()
        # Reduced by the fused embedding all-reduce, or with the embedding on the same rank.
        fused = name in (EMBEDDING, HEAD) and self.fused(choice)
        fused = fused or (self.tied and not choice.splits_tie and name == HEAD)
        size = choice.expert_dp if experts_only else choice.dp
        if size == 1:
            return ReductionCost()
        replicas, nodes = _simulated_ranks(
            spec if covered else None, size, self.levels(choice, Point.DP_GRAD, experts_only)
        )
        key = (
            Point.DP_GRAD,
            name,
            *self._partition_key(choice, name),
            choice.sharded,
            fused,
            texts,
            replicas,
            nodes,
            experts_only,
        )
        used = {Point.DP_GRAD: spec} if spec is not None and covered else {}
        return self._get_or_compute(
            key,
            texts,
            lambda: self._make_pieces(choice, used, stage).reduction(
                name, sharded=choice.sharded, fused=fused, replicas=replicas, nodes=nodes, experts_only=experts_only
            ),
        )

    def embedding_reduction(self, choice: Choice, shape: tuple[int, ...], elements: int) -> ReductionCost:
        """Cost of all-reducing the tied embedding's gradient over its holders."""
        texts = self.spec_texts(choice, Point.EMBED_GRAD)
        holders = 2 * choice.dp if self.fused(choice) else 2
        levels = self.levels(choice, Point.EMBED_GRAD)
        replicas, nodes = _simulated_ranks(self.specs(choice).get(Point.EMBED_GRAD), holders, levels)
        key = ("tied", shape, elements, texts, replicas, nodes)
        specs = {p: spec for p, spec in self.specs(choice).items() if not p.is_reduction or p is Point.EMBED_GRAD}
        return self._get_or_compute(
            key, texts, lambda: self._make_pieces(choice, specs).embedding_reduction(shape, elements, replicas, nodes)
        )

    def pseudo_gradient_reduction(
        self, choice: Choice, name: str, stage: int, experts_only: bool = False
    ) -> ReductionCost:
        """Cost of reducing a piece's pseudo-gradients over islands; ``experts_only`` as in ``reduction``."""
        spec = self.specs(choice)[Point.OUTER]
        covered = spec.activation.covers_stage(stage, choice.pp)
        # A tied embedding belongs to the stage with the word embeddings.
        fused = self.tied and name == HEAD
        # The traffic of a round does not depend on its length.
        sent = (spec.name, repr(spec.options), repr(spec.schedules), spec.feedback) if covered else ()
        key = (Point.OUTER, name, *self._partition_key(choice, name), choice.islands, fused, sent, experts_only)
        used = {Point.OUTER: spec} if covered else {}
        replicas, _ = _simulated_ranks(spec if covered else None, choice.islands, {})
        return self._get_or_compute(
            key,
            self.spec_texts(choice, Point.OUTER),
            lambda: self._make_pieces(choice, used, stage).reduction(
                name, fused=fused, replicas=replicas, experts_only=experts_only, point=Point.OUTER
            ),
        )

    def levels(self, choice: Choice, point: Point, experts_only: bool = False) -> Levels:
        """Wire and number of ranks at each level of a point's two-level sums; empty for single-level sums.

        With ``experts_only``, for ranks that hold equal experts.
        """
        spec = self.specs(choice).get(point)
        if spec is None or not spec.make_rounds().traits.levels:
            return {}
        layout = choice.mesh
        key = (point, layout, choice.islands, spec.fused, experts_only)
        if key not in self._levels:
            embeddings = layout.fused_embedding_groups if spec.fused else layout.embedding_groups
            replicas = layout.expert_dp_groups if experts_only else layout.dp_groups
            groups = list((replicas if point is Point.DP_GRAD else embeddings)())
            self._levels[key] = level_wires(self.cluster.split_over_islands(choice.islands), groups, layout.world_size)
        return self._levels[key]

    def expert_levels(self, choice: Choice) -> Levels:
        """Wire and number of ranks of each stage of a two-stage dispatch; empty for a single-stage dispatch."""
        if choice.ep == 1 or choice.two_stage == "off":
            return {}
        key = (EXPERTS, choice.mesh, choice.islands, choice.two_stage)
        if key not in self._levels:
            groups = list(choice.mesh.ep_groups())
            levels = level_wires(self.cluster.split_over_islands(choice.islands), groups, choice.world_size)
            (_, local_ranks), (_, nodes) = levels[Level.NODE], levels[Level.ACROSS]
            self._levels[key] = levels if nodes > 1 and (local_ranks > 1 or choice.two_stage == "on") else {}
        return self._levels[key]

    def message(self, choice: Choice, point: Point, compressed: bool) -> MessageCost:
        """Cost of a pipeline message."""
        texts = self.spec_texts(choice, point) if compressed else ()
        message_parts = choice.message_parts(self.config)
        model = self.config.model
        shape = torch.Size((model.seq_length // message_parts, choice.micro_batch, model.hidden_size))
        spec = self.specs(choice).get(point) if compressed else None
        dtype = model.residual_dtype(self.config.precision.params_dtype)
        return self._message(point, spec, choice.pp, texts, shape, dtype, choice.micro_batch, self.vocab_size)

    def _message(
        self, point: Point, spec: Spec | None, stages: int, texts: tuple[str, ...], shape: torch.Size, *content: Any
    ) -> MessageCost:
        def run() -> MessageCost:
            plan = CompressionPlan({} if spec is None else {point: spec}, 0, stages)
            plan.begin_step(STEADY)
            dtype, *samples = content
            return run_message(plan.codec(point), shape, dtype, self._backend, *samples)

        return self._get_or_compute((point, shape, texts), texts, run)

    def message_gather(self, choice: Choice, point: Point) -> MessageCost | None:
        """Cost of a rank's part of a pipeline message in the all-gather of the parts; None without an all-gather."""
        if not choice.configure(self.config).parallel.splits_messages:
            return None
        tp_point = Point.TP_FWD if point is Point.PP_FWD else Point.TP_BWD
        spec = self.specs(choice).get(tp_point)
        return self.message(choice, tp_point, spec is not None and spec.activation.is_active(STEADY))

    def param_gather(self, choice: Choice, elements: int, stage: int) -> MessageCost:
        """Cost of a replica's updated parameters on a stage, as a message to the other replicas."""
        spec = self.specs(choice).get(Point.PARAM_GATHER)
        covered = spec is not None and spec.activation.covers_stage(stage, choice.pp)
        texts = self.spec_texts(choice, Point.PARAM_GATHER) if covered else ()
        dtype = self.config.precision.params_dtype
        return self._message(Point.PARAM_GATHER, spec if covered else None, 1, texts, torch.Size((elements,)), dtype)

    def fused(self, choice: Choice) -> bool:
        """Whether a single fused all-reduce of the tied embedding's gradient spans all of its holders."""
        spec = self.specs(choice).get(Point.EMBED_GRAD)
        return spec is not None and spec.fused and choice.splits_tie and self.tied

    @property
    def tied(self) -> bool:
        """Whether the output projection shares the embedding's weights."""
        return self.config.model.ties_embeddings


def _simulated_ranks(spec: Spec | None, size: int, levels: Levels) -> tuple[int, int]:
    """Number of ranks and nodes to simulate in a dry run; 0 nodes for a group that is not split.

    Two ranks (or two nodes) are representative of any number, unless the compressor gathers every rank's data.
    """
    traits = None if spec is None else spec.make_rounds().traits
    if traits is not None and traits.levels and levels:
        nodes = min(levels[Level.ACROSS][1], 2)
        return levels[Level.NODE][1] * nodes, nodes
    return (size if traits is not None and traits.gathers else 2), 0


def level_wires(cluster: Cluster, groups: Sequence[tuple[int, ...]], world_size: int) -> Levels:
    """Wire and number of ranks at each level of groups that all communicate at the same time."""
    positions, _ = positions_by_node(groups, [str(rank // cluster.gpus_per_node) for rank in range(world_size)])
    flows = min(cluster.gpus_per_node, world_size)
    across = across_wire(cluster, 1, flows)
    sites = {rank // cluster.site_gpus for rank in groups[0]}
    if len(sites) > 1:
        across = dataclasses.replace(across, site=site_wire(cluster, len(positions) // len(sites), flows))
    return {
        Level.NODE: (inside_wire(cluster, len(positions[0])), len(positions[0])),
        Level.ACROSS: (across, len(positions)),
    }


def run_dry(texts: tuple[str, ...], run: Callable[[], _T]) -> _T:
    """Run a dry run.

    Raises:
        UserError: when a compressor fails, for example because it depends on the values of its input, which a dry run
            lacks.
    """
    try:
        return run()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if not texts:
            raise
        raise UserError(
            f"--compress {' '.join(texts)}: cannot be planned ({first_line(error)}); correct it, or if its messages "
            "depend on the values of the input, leave it out or time it in a short run"
        ) from error
