"""Content of a card: figures from the finished runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.convergence import bytes_per_iteration
from benchmarks.safety.behavior import (
    compare_predictions,
    heldout_windows,
    mean_change,
    mean_pairwise_change,
    measure_canaries,
    measure_places,
)
from benchmarks.safety.canaries import heldout_canaries
from benchmarks.safety.law import Gap, GapLaw
from benchmarks.safety.link import LinkSpeed
from benchmarks.safety.settings import TEXT_MODEL
from benchmarks.safety.statistics import MARGIN, paired_difference
from benchmarks.safety.training import CardRun, Planner

Content = dict[str, Any]
"""Figures by name, as in the card's JSON."""


def gap_of(run: CardRun) -> Gap:
    """Return the gap of a run to its dense twin."""
    return Gap(run.parameters, run.tokens, paired_difference([run.loss], [run.dense.loss]).percents[0])


def loss_section(compressed: Sequence[CardRun]) -> Content:
    """Return the paired difference of the main size."""
    losses, dense_losses = [run.loss for run in compressed], [run.dense.loss for run in compressed]
    difference = paired_difference(losses, dense_losses)
    return {
        "losses": losses,
        "dense_losses": dense_losses,
        "percents": list(difference.percents),
        "mean": difference.mean,
        "interval_95": difference.interval(),
        "interval_90": difference.interval(0.9),
        "margin": MARGIN,
        "equivalence_p": difference.equivalence_p(),
        "equivalent": difference.is_equivalent(),
        "verdict": difference.verdict,
    }


def law_section(by_size: Mapping[Any, Sequence[CardRun]], heldout: Sequence[CardRun]) -> Content:
    """Return the law of the gap, its prediction of the held-out size, and what was measured there."""
    gaps = [gap_of(run) for runs in by_size.values() for run in runs]
    return {
        "gaps": [
            {"width": size.width, "iterations": size.iterations, **asdict(gap_of(run))}
            for size, runs in by_size.items()
            for run in runs
        ],
        **law_figures(gaps, [gap_of(run) for run in heldout]),
        "heldout_width": heldout[0].values["hidden-size"],
        "heldout_iterations": heldout[0].values["train-iters"],
    }


def law_figures(gaps: Sequence[Gap], heldout: Sequence[Gap]) -> Content:
    """Law of some gaps, and its prediction beside the mean of held-out gaps of a single size."""
    law = GapLaw(gaps)
    predicted = law.predict(heldout[0].parameters, heldout[0].tokens, len(heldout))
    measured = statistics.fmean(gap.percent for gap in heldout)
    return {
        "is_power": law.is_power,
        "formula": law.formula,
        "exponents": law.exponents(),
        "freedom": law.freedom,
        "heldout": [asdict(gap) for gap in heldout],
        "predicted": asdict(predicted),
        "measured": measured,
        "within": predicted.low <= measured <= predicted.high,
    }


def canary_section(compressed: Sequence[CardRun], prompts: int) -> Content:
    """Exact match by task, means over the seeds, compressed and dense."""
    canaries = heldout_canaries(prompts)

    def shares(runs: Sequence[CardRun]) -> dict[str, float]:
        measured = [measure_canaries(run.checkpoint, canaries, run.file(f".canaries{prompts}")) for run in runs]
        return {task: statistics.fmean(each[task] for each in measured) for task in canaries}

    exact, dense_exact = shares(compressed), shares([run.dense for run in compressed])
    return {
        "seeds": len(compressed),
        "prompts": prompts,
        "exact": exact,
        "dense_exact": dense_exact,
        "mastered": all(share >= 0.95 for share in dense_exact.values()),
    }


def behavior_section(compressed: Sequence[CardRun], heldout: Path, places: int) -> Content:
    """Flips and KL to the dense twins, beside those between dense seeds."""
    windows = heldout_windows(heldout, places, TEXT_MODEL["seq-length"])
    ours, dense = (
        [measure_places(run.checkpoint, windows, run.file(f".places{places}.npy")) for run in runs]
        for runs in (compressed, [run.dense for run in compressed])
    )
    twins = mean_change([compare_predictions(reference, other) for reference, other in zip(dense, ours, strict=True)])
    between = mean_pairwise_change(dense)
    return {
        "places": int(windows.size),
        "flips": twins.flips,
        "kl": twins.kl,
        "dense_flips": between.flips,
        "dense_kl": between.kl,
    }


def bytes_section(run: CardRun) -> Content:
    """Bytes of an iteration, compressed and dense, by the ledger and by the kernel's counters."""
    sections = {}
    for name, each in (("compressed", run), ("dense", run.dense)):
        span, by_point = each.traffic, bytes_per_iteration(each.records)
        iterations = span.until - span.after
        sections[name] = {
            "by_point": by_point,
            "total": sum(by_point.values()),
            "ledger": sum(span.ledger.values()) / iterations,
            "connections": None if span.connections is None else span.connections / iterations,
            "interfaces": None if span.interfaces is None else span.interfaces / iterations,
            "names": list(span.names),
            "reason": span.reason,
        }
    return sections


def content_of(
    planner: Planner,
    header: Mapping[str, object],
    speed: LinkSpeed | None,
    link: str | None,
    say: Callable[[str], None],
) -> Content:
    """Return all figures of a card, from its finished runs."""
    form = planner.form
    say("answers to canaries, and probabilities of held-out tokens")
    heldout = planner.text_data / "data" / "heldout_text_document"
    costs = [run.cost for run in planner.all_runs]
    return {
        "spec": planner.text,
        "form": form.name,
        "layout": planner.layout.name,
        "ranks": planner.layout.ranks,
        "header": dict(header),
        "main": {**asdict(form.main), "tokens": planner.main_runs[0].tokens, "layers": form.layers},
        "loss": loss_section(planner.main_runs),
        "law": law_section(planner.law_runs, planner.heldout_runs),
        "canaries": canary_section(planner.canary_runs, form.prompts),
        "behavior": behavior_section(planner.main_runs, heldout, form.places),
        "bytes": bytes_section(planner.main_runs[0]),
        "speed": None if speed is None else {**asdict(speed), "ratio": speed.ratio, "link": link},
        "cost": {
            "runs": len(costs),
            "hours": sum(cost.wall_s for cost in costs) / 3600,
            "cpu_hours": sum(cost.cpu_s for cost in costs) / 3600,
            # Other cards of the layout share the dense runs.
            "dense_hours": sum(run.cost.wall_s for run in planner.all_runs if not run.text) / 3600,
        },
    }
