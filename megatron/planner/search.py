"""Search for the fastest layouts, schedules and compressors that fit into memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.base.errors import UserError
from megatron.compression.points import EXPERT_LEGS, EXPERT_POINTS, Point
from megatron.config.curriculum import lengths_of
from megatron.config.model import ModelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.planner.choice import Choice, make_choice
from megatron.planner.cluster import Cluster
from megatron.planner.predict import Prediction, Predictor

SPEC_SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("pp-forward=fixpoint,bits=8", "pp-backward=fixpoint,bits=8"),
    ("pp-forward=float8", "pp-backward=float8"),
    ("pp-forward=fixpoint,bits=4,grid=minmax", "pp-backward=fixpoint,bits=6"),
    ("dp-grad=powersgd,rank=32",),
    ("dp-grad=powersgd,rank=32,factors=fixpoint8",),
    ("dp-grad=powersgd,rank=32,factors=fixpoint8", "param-gather=fixpoint,bits=4,group=2048"),
    ("dp-grad=fixpoint,bits=4,error-feedback=on",),
    ("dp-grad=fixpoint,bits=2,rotation=64,error-feedback=on",),
    ("dp-grad=fixpoint,levels=8/4,error-feedback=on",),
    ("dp-grad=fixpoint,levels=8/4,error-feedback=on", "param-gather=fixpoint,bits=4,group=2048"),
    ("pp-backward=lowrank,rank=16,when=epilogue", "dp-grad=powersgd,rank=128", "embedding=fused"),
    ("pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8", "dp-grad=powersgd,rank=32", "embedding=fused"),
    (
        "pp-forward=fixpoint,bits=4,grid=minmax",
        "pp-backward=fixpoint,bits=6",
        "dp-grad=powersgd,rank=32,factors=fixpoint8",
        "embedding=fused",
    ),
    (
        "pp-forward=fixpoint,bits=4,grid=minmax",
        "pp-backward=fixpoint,bits=6",
        "dp-grad=fixpoint,levels=8/4,error-feedback=on",
        "param-gather=fixpoint,bits=4,group=2048",
    ),
)
"""Default sets of compressors to search."""

_EIGHT = "fixpoint,bits=8,group=64"
_FOUR = "fixpoint,bits=4,group=64,rotation=64"
EXPERT_SETS: tuple[tuple[str, ...], ...] = (
    (f"ep-dispatch-forward={_EIGHT}", f"ep-combine-backward={_EIGHT}"),
    (f"ep-dispatch={_EIGHT}", f"ep-combine={_EIGHT}"),
    (f"ep-dispatch-forward={_FOUR}", f"ep-combine-forward={_EIGHT}", f"ep-dispatch-backward={_EIGHT}",
     f"ep-combine-backward={_FOUR}"),
)  # fmt: skip
"""Additional sets of compressors for models with experts."""

_BESIDE_EXPERTS: tuple[tuple[str, ...], ...] = (
    (),
    ("dp-grad=powersgd,rank=32",),
    ("dp-grad=fixpoint,levels=8/4,error-feedback=on",),
)
"""Compressors combined with each set of ``EXPERT_SETS``."""

MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (2, 3, 4, 6, 8)

_RECOMPUTE = (RecomputeConfig(), RecomputeConfig(recompute_granularity="full", recompute_method="uniform"))
"""Selective recomputation is not searched: fused attention leaves it nothing to save."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        best: the fastest choice of each of the fastest layouts, fastest first.
        considered: number of choices.
        predicted: number of choices that were not ruled out by their lower bound.
        too_large: number of choices that do not fit into memory.
    """

    best: Sequence[Prediction]
    considered: int
    predicted: int
    too_large: int


def enumerate_choices(config: RunConfig, cluster: Cluster, spec_sets: Sequence[tuple[str, ...]]) -> Iterator[Choice]:
    """Enumerate all choices for a model on a cluster that divide evenly.

    Args:
        config: resolved configuration, for everything that a choice does not change.
        cluster: the cluster; all devices are used, divided equally among the islands.
        spec_sets: sets of compressors that may be used together.
    """
    islands = config.islands.islands
    model, world, batch = config.model, cluster.gpus // islands, config.training.global_batch_size // islands
    lengths = lengths_of(config.curriculum, model.seq_length).lengths
    max_tp = max(cluster.gpus_per_node, config.parallel.tensor_model_parallel_size)
    of_experts = (model.moe_ffn_hidden_size, model.moe_shared_expert_intermediate_size) if model.has_experts else ()
    split_widths = [width for width in (model.ffn_hidden_size, *of_experts) if width]
    for tp in divisors(world):
        splits_heads = model.num_attention_heads % tp == 0 and model.num_query_groups % tp == 0
        if tp > max_tp or not splits_heads or any(width % tp for width in split_widths):
            continue
        for pp in divisors(world // tp):
            dp = world // (tp * pp)
            if model.num_layers % pp or batch % dp:
                continue
            sequence_parallel = tp > 1 and not any(length % tp for length in lengths)
            for micro_batch in sorted({*MICRO_BATCHES, config.training.micro_batch_size}):
                if batch // dp % micro_batch:
                    continue
                count = batch // dp // micro_batch
                plain = Choice(
                    tp,
                    pp,
                    dp,
                    micro_batch=micro_batch,
                    micro_batches=count,
                    islands=islands,
                    sequence_parallel=sequence_parallel,
                    overlap=dp > 1 and not config.parallel.delay,
                    delay=config.parallel.delay,
                    two_stage=config.parallel.moe_two_stage,
                )
                for base in _enumerate_schedules(model.num_layers, plain):
                    if config.parallel.no_pipeline_flush and base.can_overlap_steps:
                        base = replace(base, flush=False)
                    yield from _enumerate_variants(model, base, spec_sets)


def _enumerate_variants(model: ModelConfig, base: Choice, spec_sets: Sequence[tuple[str, ...]]) -> Iterator[Choice]:
    """Enumerate expert parallelism, recomputation, sharding and compressors for a layout and schedule."""
    counts = model.expert_layers.values()
    splits = [(ep, False) for ep in divisors(base.dp)]
    splits += [(base.tp * ep, True) for ep in divisors(base.dp) if base.tp > 1]
    fitting = [(ep, folded) for ep, folded in splits if counts and not any(count % ep for count in counts)]
    for ep, folded in fitting or [(1, False)]:
        for recompute in _RECOMPUTE:
            for sharded in (True, False) if base.dp > 1 else (False,):
                variant = replace(base, ep=ep, folded=folded, recompute=recompute, sharded=sharded)
                for specs in _drop_silent_specs(spec_sets, variant):
                    yield replace(variant, specs=specs)


def _enumerate_schedules(layers: int, plain: Choice) -> Iterator[Choice]:
    yield plain
    if plain.pp > 1:
        yield replace(plain, schedule="eager-1f1b")
        yield replace(plain, schedule="zb-h1")
        if layers % (2 * plain.pp) == 0:
            yield replace(plain, schedule="zb-v", chunks=2)
        yield replace(plain, schedule="gpipe")
        for chunks in CHUNKS:
            if layers // plain.pp % chunks == 0 and plain.micro_batches % plain.pp == 0:
                yield replace(plain, chunks=chunks)


def _drop_silent_specs(spec_sets: Sequence[tuple[str, ...]], choice: Choice) -> list[tuple[str, ...]]:
    """Drop the compressors of points that send nothing in this choice; return the distinct sets."""
    silent = [
        *((Point.OUTER.value,) if choice.islands == 1 else ()),
        *(("pp-forward", "pp-backward") if choice.pp == 1 else ()),
        *(() if choice.splits_tie else ("embedding",)),
        *(("dp-grad",) if choice.dp == 1 else ()),
        *(("param-gather",) if not choice.sharded else ("embedding",)),
        *(("tp-forward", "tp-backward") if choice.tp == 1 else ()),
        *((point.value for point in EXPERT_POINTS) if choice.ep == 1 else ()),
        *(EXPERT_LEGS if choice.ep == 1 else ()),
    ]
    useful_sets = [tuple(spec for spec in specs if spec.split("=")[0] not in silent) for specs in spec_sets]
    return list(dict.fromkeys(useful_sets))


def add_expert_sets(model: ModelConfig, spec_sets: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Add ``EXPERT_SETS``, alone and combined with other compressors, for a model with experts."""
    expert_sets = [(*of_experts, *other_specs) for of_experts in EXPERT_SETS for other_specs in _BESIDE_EXPERTS]
    return [*spec_sets, *(expert_sets if model.has_experts else ())]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def search(
    predictor: Predictor,
    spec_sets: Sequence[tuple[str, ...]] = SPEC_SETS,
    top: int = 10,
) -> SearchResult:
    """Find the fastest layouts that fit, each with its fastest settings, by exact branch and bound.

    Args:
        predictor: predictor of the model on the cluster.
        spec_sets: sets of compressors that may be used together.
        top: number of layouts to return.

    Raises:
        UserError: when nothing fits.
    """
    config, cluster = predictor.config, predictor.cluster
    memory_limit = cluster.device.memory_gib * 2**30
    possible = dict.fromkeys(enumerate_choices(config, cluster, spec_sets))
    configured = make_choice(config, cluster.gpus)
    configured = replace(configured, specs=_drop_silent_specs([configured.specs], configured)[0])
    if configured.world_size * configured.islands == cluster.gpus and refusal_reason(config, configured) is None:
        possible[configured] = None  # whether or not the enumeration includes it
    queue = [(predictor.lower_bound(choice), number, choice) for number, choice in enumerate(possible)]
    considered = len(queue)
    heapq.heapify(queue)
    best: dict[tuple[int, int, int], Prediction] = {}  # by layout
    predicted, too_large, smallest = 0, 0, math.inf
    why_refused: str | None = None
    while queue:
        bound, _, choice = heapq.heappop(queue)
        # Seconds that a new layout must undercut to be among the fastest.
        limit_s = sorted(prediction.seconds for prediction in best.values())[top - 1] if len(best) >= top else math.inf
        if bound >= limit_s:
            break
        incumbent = best.get(choice.layout)
        if incumbent is not None and bound >= incumbent.seconds:
            continue
        # Compressor state adds to this; it is computed only if the rest fits.
        needed = predictor.memory_bytes(replace(choice, specs=()))
        if needed <= memory_limit and choice.specs:
            needed = predictor.memory_bytes(choice)
        smallest = min(smallest, needed)
        if needed > memory_limit:
            too_large += 1
            continue
        predicted += 1
        prediction = predictor.predict(choice)
        if prediction.seconds >= (limit_s if incumbent is None else incumbent.seconds):
            continue
        if (refused := refusal_reason(config, choice)) is None:
            best[choice.layout] = prediction
        why_refused = refused or why_refused
    if not considered:
        raise UserError(
            f"no layout of {cluster.gpus} devices divides {config.model.num_layers} layers, "
            f"{config.model.num_attention_heads} heads and a global batch of {config.training.global_batch_size}; "
            "change --global-batch-size, or gpus in the cluster file"
        )
    if not best and why_refused is not None:
        raise UserError(f"training would reject every choice that fits: {why_refused}")
    if not best:
        raise UserError(
            f"nothing fits into {memory_limit / 2**30:.0f} GiB: the smallest of {considered} choices needs "
            f"{smallest / 2**30:.0f} GiB a device; use more or larger devices"
        )
    fastest = sorted(best.values(), key=lambda candidate: candidate.seconds)
    return SearchResult(fastest[:top], considered, predicted, too_large)


def refusal_reason(config: RunConfig, choice: Choice) -> str | None:
    """Find the reason why training would reject a choice; None if it would not."""
    try:
        choice.resolve(config)
    except UserError as error:
        return str(error)
    return None
