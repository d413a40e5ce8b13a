"""Report of a choice of ``--compress auto``."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.compression.builtin import BUILTIN
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.spec import point_name
from megatron.config.memory import format_bytes
from megatron.planner.auto import NOTHING_TO_CHOOSE, AutoChoice
from megatron.planner.settings import flags_of


def make_card_command(specs: Sequence[str]) -> str:
    """Make the command that tries specs on small models; empty if it knows none of them."""
    known_specs = [
        spec
        for spec in specs
        if Point(point_name(spec)) not in EXPERT_POINTS and spec.partition("=")[2].partition(",")[0] in BUILTIN
    ]
    return f"make safety-card ARGS=\"--short --spec '{' '.join(known_specs)}'\"" if known_specs else ""


def report(result: AutoChoice, budget: float, suggested: Sequence[str] = ()) -> str:
    """Describe the choice: each point's compressor and each setting, with savings and costs, and the flags that repeat
    the choice.

    Args:
        result: the choice.
        budget: largest acceptable increase of the validation loss, in percent.
        suggested: other settings that would save time.
    """
    before_s, after_s = result.plain.seconds, result.chosen.seconds
    excluded = ", without the cost of the specs that were given" if result.plain.prediction.choice.specs else ""
    is_measured = bool(result.trials) and result.bolder is None
    beside = " and after the trial steps" if result.increase > result.chosen.increase else ""
    lines = [
        f"--compress auto: {'measured' if is_measured else 'predicted'} {after_s:.3g} s an iteration, {before_s:.3g} "
        f"s without: {before_s / after_s:.2f} times as fast; validation loss at most {result.increase:.2f}% "
        f"higher (--max-loss-increase {budget:g}), as measured on a small GPT{beside}{excluded}"
    ]
    lines.append(_describe_machine(result))
    if result.points:
        lines.append(f"  {'point':<20} {'sent a step':>11} {'waits':>5}  choice")
    for point in result.points:
        if point.candidate is None:
            text = f"nothing: {point.reason}"
        else:
            cost = f"predicted to save {point.saved_s:.3g} s, loss at most {point.candidate.increase:.2f}% higher"
            text = f"{point.candidate.spec.partition('=')[2]}: {cost}"
        lines.append(f"  {point.point.value:<20} {_describe_traffic(result, point.point)}  {text}")
    for setting in result.settings:
        if setting.is_on:
            lines.append(f"  {setting.flag}: predicted to save {setting.saved_s:.3g} s, at no cost in loss")
            continue
        if result.bolder is not None and setting.flag in result.bolder.flags:
            reason = "with gentler compressors too little"
        elif any(setting.flag in trial.flags for trial in result.trials):
            reason = "trial steps do not confirm this"
        else:
            reason = "beside the compressors too little"
        lines.append(f"  not switched on: {setting.flag} was to save {setting.saved_s:.3g} s, but {reason}")
    if result.trials:
        slowdown = result.search.predictor.slowdown
        lines.append(f"  predictions are multiplied by {slowdown:.2f}, the median ratio of trial steps to predictions")
    for trial in result.trials:
        flags_text = " ".join([*trial.specs, *flags_of(trial.settings)]) or "nothing"
        lines.append(f"  trial steps: {trial.seconds:.3g} s (predicted: {trial.prediction.seconds:.3g} s) {flags_text}")
    if result.bolder is not None:
        bolder, gentler = " ".join(result.bolder.specs), " ".join(result.chosen.specs) or "nothing"
        lines.append(f"  {bolder} costs too much loss, as measured after the trial steps: the choice is {gentler}")
    if result.estimate is not None and result.estimate.measured is not None:
        measured = result.estimate.measured
        lines.append(f"  loss with all points together, as measured after the trial steps: {measured:+.2f}%")
    lines += [f"  not switched on: {suggestion}" for suggestion in suggested]
    if not result.points:
        lines.append(f"  {NOTHING_TO_CHOOSE}")
    if card_command := make_card_command(result.chosen.specs):
        lines.append(f"  to try them on small models: {card_command}")
    if result.chosen.flags:
        lines.append(f"  the same by hand: {' '.join(result.chosen.flags)}")
    return "\n".join(lines)


def _describe_machine(result: AutoChoice) -> str:
    """Describe the links, and the memory beside the run without compressors."""
    cluster, plain = result.search.predictor.cluster, result.plain.prediction
    nodes, links = cluster.gpus // cluster.gpus_per_node, []
    if nodes > 1:
        links.append(f"{cluster.across.gbit_per_s:.3g} Gb/s and {cluster.across.latency_us:,.0f} us between nodes")
    if cluster.gpus_per_node > 1:
        links.append(f"{cluster.inside.gbit_per_s:.3g} Gb/s and {cluster.inside.latency_us:,.0f} us inside nodes")
    used_gib = plain.memory_bytes / 2**30
    memory = f"{max(cluster.device.memory_gib - used_gib, 0.0):.3g} of {cluster.device.memory_gib:.3g} GiB"
    return f"  links: {', '.join(links) or 'none'}; memory left without compressors: {memory} (predicted)"


def _describe_traffic(result: AutoChoice, point: Point) -> str:
    """Describe what a rank sends at a point in a step without compressors, and the share of the step that it waits:
    measured, or predicted without trial steps."""
    if not result.traffic:
        return f"{format_bytes(result.plain.prediction.sent.get(point.value, 0.0)):>11} {'':>5}"
    traffic = result.traffic.get(point)
    if traffic is None:
        return f"{format_bytes(0.0):>11} {0.0:>5.0%}"
    return f"{format_bytes(traffic.sent_bytes):>11} {traffic.waits:>5.0%}"
