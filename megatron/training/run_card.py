"""The safety card of a run with ``--compress auto``: a page, a picture and JSON about the effects of its compressors.

The card has what a single run can know: the increases of the loss that were predicted and estimated during the run,
bytes, speed, and the checks of its messages. Paired seeds, canaries and other sizes are on the cards of
``make safety-card``, which trains small models for them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.base.atomic import write_whole
from megatron.base.errors import UserError
from megatron.base.figures import COLORS, label_iterations, new_figure, save_figure
from megatron.base.markdown import markdown_table
from megatron.checkpoint.certificate import MAX_INCREASE, AutoDecision, Statements
from megatron.config.memory import format_bytes
from megatron.config.run import RunConfig
from megatron.distributed.layout import Layout
from megatron.planner.auto_report import make_card_command

FOLDER = "safety-card"
"""Name of the card's folder, in the folder of ``--save``."""


def write_run_card(
    save_folder: Path, config: RunConfig, layout: Layout, statements: Statements, log: Callable[[str], None]
) -> None:
    """Write ``card.json``, ``card.md`` and ``card.svg`` for a run that has chosen compressors.

    Args:
        save_folder: folder of ``--save``.
        config, layout: configuration and layout of the run.
        statements: statements of the run's newest checkpoint.
        log: prints lines for the user. A card that cannot be written is a line, not an error: the run has ended well.
    """
    auto, folder = statements.auto, save_folder / FOLDER
    if auto is None or not (auto.specs or auto.increases):
        return
    content: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "model": asdict(config.model),
        "layout": asdict(layout),
    }
    content |= {"max_loss_increase": config.compression.max_loss_increase, "statements": statements.to_dict()}
    try:
        folder.mkdir(exist_ok=True)
        write_whole(folder / "card.json", (json.dumps(content, indent=1) + "\n").encode())
        write_whole(folder / "card.md", card_page(auto, statements, config, layout).encode())
        draw_card(auto, statements, config.compression.max_loss_increase, folder / "card.svg")
    except (OSError, UserError) as error:
        log(f"warning: the run's safety card in {folder} is not complete: {error}")
    else:
        log(f"safety card of this run: {folder / 'card.md'}")


def card_page(auto: AutoDecision, statements: Statements, config: RunConfig, layout: Layout) -> str:
    """The card as Markdown."""
    model, user_specs = config.model, config.compression.without_choice().spec_texts
    command = make_card_command(auto.specs)
    head = [
        f"# {_title(auto)}",
        f"{time.strftime('%Y-%m-%d')}, torch {statements.torch}, code {statements.code[:12]}: "
        f"{model.model_type} with {model.num_layers} layers, width {model.hidden_size}, {model.seq_length} tokens a "
        f"sample; {layout.world_size} ranks (tensor-parallel {layout.tp}, pipeline {layout.pp}, data-parallel "
        f"{layout.dp}), global batch {config.training.global_batch_size}; {_iterations(statements)}.",
        "**Short form**, written by the run itself, without a run to compare it with: increases of the loss are "
        "predicted from paired runs of a small GPT, and estimated during the run."
        + (f" For paired seeds, canaries and flips on small models: `{command}`." if command else ""),
        "![The card as a picture](card.svg)",
    ]
    others = [*(f"`{spec}` (given by the user)" for spec in user_specs), *(f"`{flag}`" for flag in auto.settings)]
    if others:
        head.insert(2, f"The run also has {', '.join(others)}.")
    sections = [
        _describe_loss(auto, config.compression.max_loss_increase),
        _describe_speed(auto),
        _describe_bytes(auto, statements),
        _describe_messages(statements),
    ]
    return "\n\n".join([*head, *sections]) + "\n"


def _title(auto: AutoDecision) -> str:
    return f"`{' '.join(auto.specs)}`" if auto.specs else "No compressor is left"


def _iterations(statements: Statements) -> str:
    spans = [f"{span.after + 1} to {span.until}" for span in statements.traffic if span.until > span.after]
    return f"iterations {', '.join(spans)}" if spans else "no iteration"


def _describe_loss(auto: AutoDecision, budget: float) -> str:
    lines = ["## Loss", ""]
    if auto.increases:
        rows = [[f"`{spec}`", f"{increase:.2f}%"] for spec, increase in auto.increases.items()]
        rows.append(["total", f"{sum(auto.increases.values()):.2f}%"])
        lines += [markdown_table(["chosen", "predicted increase of the validation loss, at most"], rows), ""]
    lines.append(f"The budget is `--max-loss-increase {budget:g}`: {budget:g}%.")
    if not auto.checks:
        return "\n".join([*lines, "The run has not checked the loss (`--loss-check-interval`)."])
    increases = [check.increase for check in auto.checks]
    eased = [f"iteration {check.iteration} ({check.eased})" for check in auto.checks if check.eased]
    lines.append(
        f"Checks during the run: {len(increases)}, after iterations {auto.checks[0].iteration} to "
        f"{auto.checks[-1].iteration}. Expected increase: {_percent(min(increases))} to {_percent(max(increases))}, "
        f"{_percent(increases[-1])} at the last."
    )
    lines.append(
        f"Gentler settings, or none, were taken after {', '.join(eased)}." if eased else "No setting was replaced."
    )
    replaced = [f"`{spec}`" for spec in auto.increases if spec not in auto.specs]
    if replaced:
        lines.append(f"No longer in use at the end: {', '.join(replaced)}.")
    return "\n".join(lines)


def _percent(increase: float) -> str:
    return "not finite" if increase >= MAX_INCREASE else f"{increase:.2f}%"


def _describe_speed(auto: AutoDecision) -> str:
    rows = [[name, f"{seconds:.3g}"] for name, seconds in _speeds(auto).items()]
    lines = ["## Speed", "", markdown_table(["an iteration", "seconds"], rows)]
    if auto.trial_s and auto.uncompressed_trial_s:
        lines += ["", f"In trial steps {auto.uncompressed_trial_s / auto.trial_s:.2f} times as fast as without."]
    return "\n".join(lines)


def _speeds(auto: AutoDecision) -> dict[str, float]:
    speeds = {
        "without the choice, predicted": auto.uncompressed_s,
        "without the choice, trial steps": auto.uncompressed_trial_s,
        "predicted": auto.predicted_s,
        "trial steps": auto.trial_s,
        "measured": auto.measured_s,
    }
    return {name: seconds for name, seconds in speeds.items() if seconds is not None}


def _bytes_by_point(auto: AutoDecision, statements: Statements) -> dict[str, tuple[float, float]]:
    """Bytes that all ranks sent in an iteration since the choice, and would have sent without compression, by point."""
    sent, uncompressed, iterations = Counter[str](), Counter[str](), 0
    for span in statements.traffic:
        if span.uncompressed and span.after >= auto.after:  # not known of earlier versions' iterations
            sent.update(span.ledger)
            uncompressed.update(span.uncompressed)
            iterations += span.until - span.after
    return {
        point: (sent[point] / max(iterations, 1), uncompressed[point] / max(iterations, 1)) for point in sorted(sent)
    }


def _describe_bytes(auto: AutoDecision, statements: Statements) -> str:
    by_point = _bytes_by_point(auto, statements)
    if not by_point:
        return "## Bytes\n\nNo bytes are known."
    rows = [[point, *map(format_bytes, map(round, pair))] for point, pair in by_point.items()]
    totals = [round(sum(column)) for column in zip(*by_point.values(), strict=True)]
    rows.append(["total", *map(format_bytes, totals)])
    lines = [
        "## Bytes",
        "",
        markdown_table(["point", "sent", "without compression"], rows),
        "",
        f"Of an iteration, all ranks, by the run's own count from iteration {auto.after + 1} on, with evaluations.",
    ]
    for span in statements.traffic:
        label, counted = f"- Iterations {span.after + 1} to {span.until}:", max(sum(span.ledger.values()), 1)
        if span.interfaces is None:
            lines += ["", f"{label} not compared with the interfaces: {span.reason}."]
            continue
        ratios = f"{', '.join(span.names)} sent {span.interfaces / counted:.4f} times as many bytes"
        if span.connections is not None:
            ratios += f", the ranks' connections {span.connections / counted:.4f} times"
        lines += ["", f"{label} {ratios}."]
    return "\n".join(lines)


def _describe_messages(statements: Statements) -> str:
    lines = ["## Messages and replicas", ""]
    for entry in statements.samples:
        content = "message plus residual" if entry.residual else "the message, which has no residual"
        lines.append(
            f"- {entry.point}: relative error of {content}: at most {entry.worst_error:.2g}, in {entry.samples} samples"
        )
    lines += [f"- {point}: not sampled: {reason}" for point, reason in statements.not_sampled.items()]
    differences = f"differ: {statements.differences[0]}" if statements.differences else "agree bit by bit"
    lines.append(f"- Ranks that must hold the same numbers {differences}.")
    lines += ["", "`megatron-cc-verify` checks these statements against the checkpoint."]
    return "\n".join(lines)


def draw_card(auto: AutoDecision, statements: Statements, budget: float, path: Path) -> None:
    """Draw a card: the expected increase of the loss, seconds of an iteration, and bytes by point.

    Raises:
        UserError: when matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure(10.0, 2.9)
    loss, speed, traffic = figure.subplots(1, 3, width_ratios=(1.3, 1.0, 1.0))
    _draw_loss(loss, auto, budget)
    speeds = _speeds(auto)
    colors = [COLORS[6] if name.startswith("without") else COLORS[0] for name in speeds]
    speed.bar(range(len(speeds)), list(speeds.values()), color=colors, alpha=0.8)
    speed.set_xticks(range(len(speeds)), [name.replace(" ", "\n") for name in speeds])
    speed.set_title("seconds of an iteration", fontsize=8)
    by_point = _bytes_by_point(auto, statements)
    for side, (label, color) in enumerate((("without compression", COLORS[6]), ("sent", COLORS[0]))):
        places = [index + 0.4 * side - 0.2 for index in range(len(by_point))]
        heights = [pair[1 - side] / 1e6 for pair in by_point.values()]
        traffic.bar(places, heights, width=0.36, color=color, alpha=0.8, label=label)
    traffic.set_xticks(range(len(by_point)), [point.replace("-", "\n") for point in by_point])
    traffic.legend(fontsize=7)
    traffic.set_title("MB of an iteration, all ranks", fontsize=8)
    for panel in (loss, speed, traffic):
        panel.tick_params(labelsize=7)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    figure.suptitle(_title(auto).strip("`"), fontsize=9)
    save_figure(figure, path)


def _draw_loss(axes: Any, auto: AutoDecision, budget: float) -> None:
    """Draw the expected increases at the checks on matplotlib axes, or else the predicted increase."""
    axes.axhline(budget, color=COLORS[1], linestyle="--", label="--max-loss-increase")
    if auto.checks:
        increases = [check.increase for check in auto.checks]
        iterations = [check.iteration for check in auto.checks]
        axes.plot(iterations, increases, "o-", color=COLORS[0], markersize=3, label="expected, at each check")
        label_iterations(axes)
    else:
        increases = [sum(auto.increases.values())]
        axes.axhline(increases[0], color=COLORS[0], label="predicted, at most")
    # Increases that are not finite would hide all others.
    axes.set_ylim(0.0, 1.1 * min(max(budget, *increases), 5 * budget))
    axes.legend(fontsize=7)
    axes.set_title("increase of the loss, %", fontsize=8)
