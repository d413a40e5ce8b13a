"""Draws the losses of the paired runs, by the kind of residual."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.training.plots import COLORS, MARKERS, new_figure, save_figure

NAMES = {"dense": "not compressed", "none": "no error feedback"}
"""Names of kinds in the picture, where they differ from their own."""


def draw_losses(losses: Mapping[str, Sequence[Mapping[int, float]]], path: Path) -> Path:
    """Draws the mean over the seeds of each kind's training loss, and the range of the seeds.

    Args:
        losses: losses by kind; for each seed the loss by iteration.
        path: path of the picture.
    """
    figure = new_figure(8, 4.4)
    axes = figure.add_subplot()
    for (kind, runs), color, marker in zip(losses.items(), COLORS, MARKERS, strict=False):
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        each = [[run[step] for run in runs] for step in steps]
        label = f"{NAMES.get(kind, kind)} ({len(runs)} seeds)"
        axes.plot(steps, [statistics.fmean(one) for one in each], color=color, marker=marker, markersize=4, label=label)
        axes.fill_between(steps, [min(one) for one in each], [max(one) for one in each], color=color, alpha=0.15)
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return save_figure(figure, path)
