"""Comparison of islands with a single run over all devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.base.errors import UserError
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.run import RunConfig
from megatron.planner.choice import Choice
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.report import table, verdict
from megatron.planner.search import Found, divisors, has_outer, search

MOST_LOSS = 2.0
"""Maximum predicted loss increase of islands, in percent."""


def without_outer(config: RunConfig, specs: Sequence[str]) -> tuple[str, ...]:
    """Remove the specs of ``outer``, which apply only to islands, from a set of compressors.

    Raises:
        UserError: when a removed spec cannot be parsed.
    """
    outer = [spec for spec in specs if has_outer([spec])]
    dataclasses.replace(config.compression, compress=outer).specs(RunLength(config.training.planned_iters))
    return tuple(spec for spec in specs if spec not in outer)


def outer_specs(
    predictor: Predictor, spec_sets: Sequence[tuple[str, ...]], most: float
) -> tuple[dict[int, list[str]], str]:
    """The specs of ``outer`` to search for each number of islands, and the reason if there are none.

    Specs named in the sets of compressors are searched regardless of their cost; the default specs are searched only if
    none is named.

    Args:
        predictor: predictor of the run.
        spec_sets: sets of compressors.
        most: maximum predicted loss increase, in percent.
    """
    config, sites = predictor.config, predictor.cluster.sites
    iterations = config.training.planned_iters
    counts = [k for k in divisors(sites) if k > 1 and config.training.global_batch_size % k == 0]
    if iterations is None:
        return {}, "islands need --train-iters"
    if not counts:
        return {}, f"no number of islands divides {sites} sites and the global batch"
    named = list(dict.fromkeys(spec for specs in spec_sets for spec in specs if has_outer([spec])))
    if named:
        return dict.fromkeys(counts, named), ""
    candidates: dict[int, list[str]] = {}
    costs: list[float] = []
    losses = predictor.losses
    texts = losses.specs(config.optimizer.optimizer == "muon", config.model.num_layers)
    for text, k in ((text, k) for k in counts for text in texts):
        spec = predictor.book.specs(Choice(1, 1, 1, specs=(text,), islands=k))[Point.OUTER]
        if spec.outer.every > iterations - spec.activation.warmup_iters:
            continue
        penalty = losses.of_spec(spec, k, iterations)
        costs += [] if penalty is None else [penalty.percent]
        if penalty is not None and penalty.percent <= most:
            candidates.setdefault(k, []).append(text)
    if not costs:
        return {}, "the run is shorter than a round" if texts else "no measured method has this optimizer"
    return candidates, f"none is predicted to cost at most {most:g}% of the loss; the least is {min(costs):.1f}%"


def search_all(predictor: Predictor, sets: Sequence[tuple[str, ...]], top: int, most: float) -> tuple[Found, str]:
    """Search single runs, and islands where the cluster has sites.

    Returns the fastest of all, and a line that says whether islands are worth it.

    Args:
        predictor: predictor of the run.
        sets: sets of compressors to search.
        top: number of layouts to return.
        most: maximum predicted loss increase of islands, in percent.

    Raises:
        UserError: when nothing fits.
    """
    single = search(predictor, sets, top)
    if predictor.cluster.sites == 1:
        return single, ""
    outers, no_islands = outer_specs(predictor, sets, most)
    islands: Found | None = None
    try:
        islands = search(predictor, sets, top, outers=outers) if outers else None
    except UserError as error:
        no_islands = str(error)
    verdict_line = f"{verdict(single.best[0], islands.best[0] if islands else None, no_islands)}\n"
    if islands is None:
        return single, verdict_line
    predictions = sorted([*single.best, *islands.best], key=lambda prediction: prediction.seconds)
    sums = [getattr(single, name) + getattr(islands, name) for name in ("considered", "predicted", "too_large")]
    return Found(predictions[:top], *sums), verdict_line


def compare_with_one_node(predictor: Predictor, best: Prediction) -> str:
    """Compare the fastest run on a single node with the fastest on all; "" for a cluster of a single node.

    Args:
        predictor: predictor of the run.
        best: the fastest run on the whole cluster.
    """
    cluster = predictor.cluster
    if cluster.gpus <= cluster.gpus_per_node:
        return ""
    node = dataclasses.replace(cluster, gpus=cluster.gpus_per_node, sites=1)
    try:
        single = search(
            Predictor(predictor.config, node, predictor.vocab_size, predictor.book.imbalance), [()], 1
        ).best[0]
    except UserError as error:
        return f"one node alone: {error}\n"
    ratio = single.seconds / best.seconds
    comparison = f"all {cluster.gpus} devices are {ratio:.2f} x as fast"
    if ratio < 1:
        comparison = f"{1 / ratio:.2f} x as fast as all {cluster.gpus} devices: leave the other nodes out"
    return f"\none node alone, with the same global batch: {comparison}\n{table([single], cluster.device.memory_gib)}\n"
