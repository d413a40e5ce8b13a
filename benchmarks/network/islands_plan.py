"""What the planner says of the islands that the benchmark measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import runs
from benchmarks.network.islands_cases import STAGES, IslandsRun, bench_of
from benchmarks.network.run import PAYLOAD, STEP_SECONDS, workers
from megatron.config.flags import parse_args
from megatron.planner.choice import choice_of, of_first_island
from megatron.planner.cluster import Cluster, LinkSpec, write_cluster
from megatron.planner.measure import described
from megatron.planner.predict import Predictor


def measured_hosts(hosts: int, specs: Sequence[str], out: Path) -> Cluster:
    """The hosts as the planner's cluster, each a node; also written to the folder ``out``.

    Args:
        hosts: number of hosts.
        specs: compressors to be timed.
        out: the folder.

    Raises:
        LabError: when the ranks fail.
    """
    with workers(bench_of(hosts, STAGES)) as (_, ranks):
        (rates,) = ranks.ask(STEP_SECONDS, do="measure", specs=list(specs), ranks_per_host=STAGES)
    cluster = described(rates, Cluster("hosts", hosts * STAGES, STAGES))
    (out / "cluster.yaml").write_text(write_cluster(cluster))
    return cluster


def predicted(run: IslandsRun, cluster: Cluster, rate: float) -> tuple[float | None, float | None]:
    """The planner's seconds of an iteration in step, and of a mean local one; None for steps that a run has not, and
    for data parallelism, whose ranks are not in the planner's order.

    Args:
        run: a whole run.
        cluster: the hosts.
        rate: bits per second of the slowest link between them, which a sum over all takes.
    """
    if not run.case.has_islands:
        return None, None
    across = cluster.across
    link = LinkSpec(min(across.gbit_per_s, rate / 1e9 * PAYLOAD), across.latency_us)
    config = parse_args([*run.words()[1:], "--islands", str(run.hosts)]).config
    resolved = of_first_island(config).resolve(STAGES, cuda_available=False)
    predictor = Predictor(resolved, replace(cluster, sites=run.hosts, between_sites=link), runs.VOCAB_SIZE)
    found = predictor.predict(choice_of(resolved, cluster.gpus))
    outer = found.outer
    assert outer is not None
    step = found.seconds - outer.mean_in_step_s - outer.mean_rounds_s
    return (
        step + outer.in_step_s if outer.in_step else None,
        step + outer.round_s / outer.every if outer.local else None,
    )
