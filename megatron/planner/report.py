"""Tables and pictures of predictions, and explanations of the difference between two predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.base.errors import UserError
from megatron.base.figures import save_figure
from megatron.config.islands import IslandsConfig
from megatron.config.run import RunConfig
from megatron.parallel.pipeline.schedule_plot import MAX_PASSES, Timeline, check_size, draw_schedule, summarize_times
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster
from megatron.planner.costs import wires_of
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.search import search

_LOSS = (
    "these compressors change the loss by an amount that is not predicted: see docs/results/loss.md for measurements, "
    "or measure it with `make bench-convergence`"
)

_WITHOUT_FLAG = ("recompute_method", "recompute_num_layers")
"""Settings of a choice that have their defaults, so that ``format_flags`` leaves their flags out."""


def describe_choice(choice: Choice) -> str:
    """Describe a choice in a few words."""
    words = [f"{choice.islands} islands"] if choice.islands > 1 else []
    words += [f"tp {choice.tp}", f"pp {choice.pp}", f"dp {choice.dp}"]
    if choice.ep > 1:
        words.append(f"ep {choice.ep}{' of whole experts' if choice.folded else ''}")
    words.append(
        f"{choice.micro_batches} micro-batch{'es' if choice.micro_batches > 1 else ''} of {choice.micro_batch}"
    )
    if choice.pp > 1:
        is_interleaved = choice.chunks > 1 and not choice.in_v_form
        schedule = f"interleaved {choice.chunks}" if is_interleaved else choice.schedule
        words.append(schedule if choice.flush else f"{schedule} without a flush")
    if choice.recompute.recompute_granularity:
        words.append(f"recompute {choice.recompute.recompute_granularity}")
    if choice.sharded:
        words.append("sharded")
    return ", ".join(words)


def format_flags(choice: Choice) -> str:
    """Format the flags of ``pretrain_gpt.py`` that select a choice."""
    words = [
        f"--tensor-model-parallel-size {choice.tp}",
        f"--pipeline-model-parallel-size {choice.pp}",
        f"--micro-batch-size {choice.micro_batch}",
    ]
    if choice.ep > 1:
        words.append(f"--expert-model-parallel-size {choice.ep}")
    if choice.folded:
        words.append("--expert-tensor-parallel-size 1")
    if choice.chunks > 1 and not choice.in_v_form:
        words.append(f"--virtual-pipeline-model-parallel-size {choice.chunks}")
    words.append(f"--pipeline-schedule {choice.schedule}")
    if choice.sequence_parallel:
        words.append("--sequence-parallel")
    if choice.recompute.recompute_granularity:
        words.append(f"--recompute-granularity {choice.recompute.recompute_granularity}")
    if choice.sharded:
        words.append("--use-distributed-optimizer")
    if choice.overlap:
        words.append("--overlap-grad-reduce")
    if choice.delay:
        words.append(f"--delay {choice.delay}")
    if not choice.flush:
        words.append("--no-pipeline-flush")
    if choice.islands > 1:
        words.append(f"--islands {choice.islands}")
    return " ".join([*words, *(f"--compress {spec}" for spec in choice.specs)])


def format_table(predictions: Sequence[Prediction], memory_gib: float) -> str:
    """Format a table with a line for each prediction, fastest first."""
    columns = ("s/iter", "tokens/s", "MFU", "GiB", "layout", "compressed")
    rows = [
        (
            f"{prediction.seconds:.3f}",
            f"{prediction.tokens_per_s:,.0f}",
            f"{prediction.mfu:.1%}",
            f"{prediction.memory_bytes / 2**30:.1f}",
            describe_choice(prediction.choice),
            " ".join(prediction.choice.specs) or "nothing",
        )
        for prediction in predictions
    ]
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    right = [name not in ("layout", "compressed") for name in columns]

    def line(row: Sequence[str]) -> str:
        cells = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([line(columns), *map(line, rows), f"(a device has {memory_gib:.0f} GiB)"])


def format_launch_command(choice: Choice, cluster: Cluster) -> str:
    """Format the command that starts the first island, without the training flags."""
    ranks_per_node = min(choice.world_size, cluster.gpus_per_node)
    nodes = choice.world_size // ranks_per_node
    node_flags = f"--nnodes {nodes} --node-rank 0 --master-addr HOST " if nodes > 1 else ""
    return (
        f"python tools/launch.py --island 0 --islands {choice.islands} --serve-islands HOST:29600 {node_flags}"
        f"--nproc-per-node {ranks_per_node} pretrain_gpt.py --config FILE"
    )


def format_breakdown(
    prediction: Prediction, cluster: Cluster, config: RunConfig | None = None, *, warns_of_loss: bool = True
) -> str:
    """Format the breakdown of a prediction: time, memory, traffic, and the flags that select it.

    Args:
        prediction: the prediction.
        cluster: the cluster of the prediction.
        config: the user's configuration to which the flags are added; None if it already selects this choice.
        warns_of_loss: whether to warn that the compressors' effect on the loss is not predicted.
    """
    time_shares = _format_shares(prediction.parts, prediction.seconds, lambda seconds: f"{seconds:.3f} s")
    memory = _format_shares(prediction.memory, prediction.memory_bytes, lambda nbytes: f"{nbytes / 2**30:.2f} GiB")
    lines = [
        f"  time    {prediction.seconds:.3f} s an iteration: {time_shares}",
        f"  memory  {prediction.memory_bytes / 2**30:.1f} GiB on the fullest device: {memory}",
    ]
    for point, nbytes in prediction.sent.items():
        across_bytes = prediction.across.get(point, 0.0)
        location = f"{across_bytes / 1e6:,.1f} MB of it across nodes" if across_bytes else "inside nodes"
        lines.append(f"  bytes   {point}: {nbytes / 1e6:,.1f} MB a device and iteration, {location}")
    plan = prediction.outer
    if plan is not None:
        inner_s = prediction.seconds - plan.mean_in_step_s - plan.mean_rounds_s
        hidden = f", of {plan.transfer_s:.3f} s of transfers" if plan.transfer_s else ""
        lines += [
            f"  islands {plan.in_step:,} iterations in step of {inner_s + plan.in_step_s:.3f} s, then {plan.local:,} "
            f"of {inner_s:.3f} s; training waits {plan.round_s:.3f} s for a round of {plan.every}{hidden}",
            f"  link    of an island: {plan.mean_bytes / 1e6:,.1f} MB in a mean iteration; "
            f"{plan.in_step_bytes / 1e6:,.1f} MB in each in step, {plan.round_bytes / 1e6:,.1f} MB in a round",
            f"  start   {format_launch_command(prediction.choice, cluster)} FLAGS (of the first island; others: "
            "--islands-address)",
        ]
    if warns_of_loss and any(not spec.startswith("embedding=fused") for spec in prediction.choice.specs):
        lines.append(f"  loss    {_LOSS}")
    lines.append(f"  flags   {format_flags(prediction.choice)}")
    unset_names: list[str] = []  # of the configuration, switched off by the choice, though no flag can unset them
    if config is not None:
        configured = prediction.choice.configure(config)
        for section in ("parallel", "recompute", "compression"):
            old, new = getattr(config, section), getattr(configured, section)
            names = [field.name for field in dataclasses.fields(old)]
            unset_names += [
                name
                for name in names
                if getattr(old, name)
                and (not getattr(new, name) or (name in _WITHOUT_FLAG and getattr(old, name) != getattr(new, name)))
            ]
    if unset_names:
        lines.append(f"          without the file's {', '.join(unset_names)} (--write leaves them out)")
    return "\n".join(lines)


def draw_prediction(predictor: Predictor, prediction: Prediction, path: Path) -> None:
    """Draw the passes of a prediction's step; a long step is drawn with fewer micro-batches.

    Raises:
        UserError: when there are too many stages, or the picture cannot be written.
    """
    choice = prediction.choice
    passes = choice.pp * choice.chunks * (3 if choice.has_weight_passes else 2)
    count = max(MAX_PASSES // passes, 1)
    if choice.chunks > 1 and not choice.in_v_form:  # groups of pp micro-batches
        count = max(count // choice.pp, 1) * choice.pp
    count = min(count, choice.micro_batches)
    check_size("--draw-schedule", choice.pp, passes * count)
    pipeline = predictor.pipeline(choice, wires_of(predictor.cluster, choice))
    times = predictor.times(choice, pipeline)
    span_s = max(time.end for time in times)
    bubble = 1 - sum(time.busy for time in times) / (choice.pp * span_s)
    title = [
        f"{describe_choice(choice)}, on {predictor.cluster.name}",
        f"predicted: {summarize_times(span_s, bubble, prediction.seconds)}",
    ]
    if count < choice.micro_batches:
        title.append(f"drawn with {count:,} of {choice.micro_batches:,} micro-batches")
    if not choice.flush:
        title.append("drawn with a flush before and after the step")
    names = [f"stage {stage}" for stage in range(choice.pp)]
    rows = [rank.passes for rank in pipeline.simulate_in_full(count, choice.flush)]
    save_figure(draw_schedule([Timeline("\n".join(title), rows, names)]), path)


def _format_shares(values: Mapping[str, float], total: float, render: Callable[[float], str]) -> str:
    visible = {name: value for name, value in values.items() if value > 0.0005 * total}
    return ", ".join(f"{name} {render(value)}" for name, value in sorted(visible.items(), key=lambda item: -item[1]))


def explain_gain(best: Prediction, other: Prediction) -> str:
    """Explain why ``best`` is faster than ``other`` by the parts of a step that differ most."""
    names = dict.fromkeys([*best.parts, *other.parts])
    gained = {name: other.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in names}
    gap = other.seconds - best.seconds
    if gap < 1e-3 * best.seconds:
        fuller = (other.memory_bytes - best.memory_bytes) / 2**30
        return f"as fast, to a thousandth, with {abs(fuller):.1f} GiB {'more' if fuller >= 0 else 'less'}"
    by_gain = sorted(gained.items(), key=lambda item: -item[1])
    saves = [f"{value:.3f} s in {name}" for name, value in by_gain if value > 0.1 * gap]
    costs = [f"{-value:.3f} s of {name}" for name, value in reversed(by_gain) if value < -0.1 * gap]
    text = f"{gap:.3f} s ({gap / best.seconds:.1%}) slower: the first saves {' and '.join(saves[:2])}"
    return text + (f", at the cost of {' and '.join(costs[:2])}" if costs else "")


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
    config = dataclasses.replace(predictor.config, islands=IslandsConfig())
    try:
        single = search(Predictor(config, node, predictor.vocab_size, predictor.book.imbalance), [()], 1).best[0]
    except UserError as error:
        return f"one node alone: {error}\n"
    ratio = single.seconds / best.seconds
    comparison = f"all {cluster.gpus} devices are {ratio:.2f} x as fast"
    if ratio < 1:
        comparison = f"{1 / ratio:.2f} x as fast as all {cluster.gpus} devices: leave the other nodes out"
    table = format_table([single], cluster.device.memory_gib)
    return f"\none node alone, with the same global batch: {comparison}\n{table}\n"
