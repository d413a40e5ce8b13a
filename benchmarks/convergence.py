"""Trains a small GPT with and without compression, and compares validation losses and bytes.

    make bench-convergence                        all cases and seeds; finished runs are kept
    make bench-convergence ARGS="--cases 'dense; CB, LEP' --seeds 1 --table"
    make bench-convergence ARGS="--ladder"        the candidates of --compress auto
    make bench-convergence ARGS="--ladder tp-"    those of tensor parallelism
    make bench-convergence ARGS="--ladder --model 2x96 --iterations 250"    in short runs of another model

Every case trains on the same text, the quickstart's, for several epochs of the same samples, on 2 pipeline stages x 2
replicas; compressed tensor parallelism on 2 ranks; a model with experts on 4 replicas that share them, or 2; sums in
two levels on 4 replicas, 2 on each of 2 nodes; islands of a process each. Afterwards each trained model continues
held-out text (the task CONTINUATION), since a loss may hide the cost of compression there. Prints a table (the whole
spec, mean and spread over the seeds, and whether the loss is equivalent to dense within 0.3%), names warm-ups that
take more than a fifth of the run, and writes it all with a picture. Curves over iterations: plot_loss_curves.py with
the logs in runs/.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import join_for_help, parse_names, runs
from benchmarks.convergence_cases import CASES, MARGIN, MODEL, family, is_flag, ladder_cases, read_case
from benchmarks.report import device_name, header, write_record
from megatron.base.figures import COLORS, new_figure, save_figure
from megatron.base.markdown import markdown_table
from megatron.compression.builtin import BUILTIN
from megatron.compression.ladder import interval_of_mean
from megatron.compression.points import EXPERT_POINTS
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.config.islands import island_folder
from megatron.training.records import read_records

POINTS = (
    *("pp-forward", "pp-backward", "dp-grad", "embedding", "param-gather", "outer", "tp-forward", "tp-backward"),
    *(point.value for point in EXPERT_POINTS),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Args:
        case: name of the case.
        loss, spread: final validation losses, mean and standard deviation over the seeds.
        increases: percent above the dense run of the same seed, for each seed with both.
        sent: kB per iteration, by point.
        seeds: number of runs.
        words: the case's specs and flags.
        exact, ranked: percent of held-out continuations that greedy decoding matched, and that were likelier than the
            wrong continuations, means over the runs; None where they were not measured.
    """

    case: str
    loss: float
    spread: float
    increases: Sequence[float]
    sent: Mapping[str, float]
    seeds: int
    words: str
    exact: float | None = None
    ranked: float | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether the other cases of the family are compared with it."""
        return self.case.split(", ")[-1] == "dense"

    @property
    def worse(self) -> float | None:
        """Mean percent above the dense runs of the same seeds; None where those are missing."""
        return statistics.fmean(self.increases) if self.increases else None

    @property
    def interval(self) -> str:
        """The interval of that mean, and whether it shows equivalence; empty for a baseline or a single seed."""
        if len(self.increases) < 2 or self.is_baseline:
            return ""
        low, high = interval_of_mean(self.increases)
        verdict = ", equivalent" if low >= -MARGIN and high <= MARGIN else ""
        return f"{low:+.2f} to {high:+.2f}%{verdict}"


def log_of(out: Path, case: str, seed: int, iterations: int) -> Path:
    """The log of a run."""
    return out / "runs" / f"{runs.slug(case)}-{seed}-{iterations}.jsonl"


def continuation_file(log: Path) -> Path:
    """The result line of the task CONTINUATION for the run of a log."""
    return log.with_suffix(".continuation")


def train(
    out: Path,
    case: str,
    words: Sequence[str],
    seed: int,
    iterations: int,
    continues: bool,
    model: Mapping[str, int],
) -> None:
    """Trains a case with a seed, and measures its continuations if asked to, unless that is done.

    Args:
        out: folder of data and logs.
        case: name of the case.
        words: specs and flags of the case.
        seed: seed of weights and samples.
        iterations: length of the run.
        continues: whether to measure continuations.
        model: flags of the model that differ from ``MODEL``.
    """
    log = log_of(out, case, seed, iterations)
    if runs.has_ended(log) and (continuation_file(log).exists() or not continues):
        return
    kind = family(case)
    lengths = {"train-iters": iterations, "lr-warmup-iters": iterations // 25}
    values = {**MODEL, **lengths, "seed": seed, "eval-interval": max(iterations // kind.evaluations, 1)}
    saved = out / "checkpoints" / log.stem
    shutil.rmtree(saved, ignore_errors=True)
    specs = [word for word in words if not is_flag(word)]
    flags = runs.flags({**values, **kind.flags, **model, "save": saved, "no-save-optim": True}, specs, out, log)
    flags += filter(is_flag, words)
    output = out / "logs" / f"{log.stem}.log"
    runs.train(flags, f"{case}, seed {seed}", log, output, ranks=kind.ranks, nodes=kind.nodes, islands=kind.islands)
    if not continues:
        return
    checkpoint = island_folder(str(saved), 0) if kind.islands > 1 else saved
    task = ["tasks/main.py", "--task", "CONTINUATION", "--load", str(checkpoint), "--micro-batch-size", "64"]
    task += ["--prompt-tokens", "48", "--continuation-tokens", "4"]
    task += ["--valid-data", str(out / "corpus" / "heldout.jsonl")]
    output = out / "logs" / f"{log.stem}.continuation.log"
    runs.run(task, output, threads=2)
    continuation_file(log).write_text(next(line for line in output.read_text().splitlines() if "exact match" in line))


def train_all(
    out: Path,
    cases: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    iterations: int,
    continues: bool,
    model: Mapping[str, int],
) -> list[str]:
    """Trains all cases with all seeds; prints the reasons of failed runs and returns their names."""
    failed = []
    for seed in seeds:
        for case, words in cases.items():
            try:
                train(out, case, words, seed, iterations, continues, model)
            except SystemExit as error:
                print(error, file=sys.stderr, flush=True)
                failed.append(f"{case} (seed {seed})")
    return failed


def continuation_figures(log: Path) -> tuple[float, float] | None:
    """Exact match and ranking accuracy of a run's continuations, in percent; None where they were not measured."""
    text = continuation_file(log).read_text() if continuation_file(log).exists() else ""
    match = re.search(r"exact match: (\S+) .* ranking accuracy: (\S+) ", text)
    return (100 * float(match[1]), 100 * float(match[2])) if match else None


def bytes_per_iteration(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean bytes over all iterations, by point."""
    windows = [event["comm"] for event in events if event.get("kind") == "train"]
    points = sorted({point for comm in windows for point in comm} - {"control"})
    return {p: statistics.fmean(comm.get(p, {}).get("wire_bytes", 0.0) for comm in windows) for p in points}


def outcomes(out: Path, cases: Mapping[str, Sequence[str]], seeds: Sequence[int], iterations: int) -> list[Outcome]:
    """Outcomes of the finished runs of cases, given with their words."""
    logs = {case: {seed: log_of(out, case, seed, iterations) for seed in seeds} for case in cases}
    ended = {
        case: {seed: read_records(log) for seed, log in logs[case].items() if runs.has_ended(log)} for case in logs
    }
    final = {case: {seed: runs.final_loss(run) for seed, run in events.items()} for case, events in ended.items()}
    finished = []
    for case, losses in final.items():
        if not losses:
            continue
        words, kind = " ".join(cases[case]), family(case)
        dense = final.get(kind.baseline, {})
        increases = [100 * (losses[seed] / dense[seed] - 1) for seed in losses if seed in dense]
        sent = [bytes_per_iteration(run) for run in ended[case].values()]
        means = {p: kind.islands * statistics.fmean(run.get(p, 0.0) for run in sent) / 1000 for p in POINTS}
        spread = statistics.stdev(losses.values()) if len(losses) > 1 else 0.0
        quality = [figures for seed in losses if (figures := continuation_figures(logs[case][seed]))]
        exact, ranked = (statistics.fmean(column) for column in zip(*quality, strict=True)) if quality else (None, None)
        loss = statistics.fmean(losses.values())
        finished.append(Outcome(case, loss, spread, increases, means, len(losses), words, exact, ranked))
    return finished


def table(finished: Sequence[Outcome]) -> str:
    """The results as Markdown, with the whole spec of each case; a single seed has no spread."""
    points = [point for point in POINTS if any(outcome.sent[point] for outcome in finished)]
    heads = [
        "case",
        "spec",
        "seeds",
        "validation loss",
        "vs dense",
        "90% interval",
        *(f"{point} kB" for point in points),
        "total kB",
    ]
    heads += ["continued exactly", "ranked first"]
    rows = []
    for outcome in finished:
        change = "" if outcome.worse is None else f"{outcome.worse:+.2f}%"
        sent = [outcome.sent[point] for point in points]
        spread = f" ± {outcome.spread:.4f}" if outcome.seeds > 1 else ""
        spec = f"`{outcome.words}`" if outcome.words else ""
        cells = [outcome.case, spec, outcome.seeds, f"{outcome.loss:.4f}{spread}", change, outcome.interval]
        cells += [f"{kb:.1f}" for kb in (*sent, sum(sent))]
        shares = (outcome.exact, outcome.ranked)
        rows.append([*cells, *("" if share is None else f"{share:.2f}%" for share in shares)])
    return markdown_table(heads, rows)


def long_warmups(finished: Sequence[Outcome], iterations: int) -> list[str]:
    """A line for each case whose warm-up takes more than a fifth of the run, so that its row tells little."""
    lines = []
    for outcome in finished:
        words = [word for word in outcome.words.split() if not is_flag(word)]
        specs = read_specs(words, Registry(BUILTIN), RunLength(iterations)).values()
        longest = max((spec.activation.warmup_iters for spec in specs), default=0)
        if longest > iterations / 5:
            lines.append(
                f"{outcome.case}: sends exactly in the first {longest} of {iterations} iterations (warmup={longest}); "
                "compare it with rows of the same warm-up, or train for longer"
            )
    return lines


def draw(finished: Sequence[Outcome], path: Path) -> None:
    """Draws a line for each case: its loss above dense, and the bytes that it sends."""
    figure = new_figure(9.5, 0.27 * len(finished) + 1.2)
    loss, traffic = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1.0))
    least = 0.03  # of a logarithmic axis in percent; losses below dense are drawn there
    small: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7}
    percents = [outcome.worse for outcome in finished if outcome.worse is not None and not math.isnan(outcome.worse)]
    for y, outcome in enumerate(finished):
        if outcome.is_baseline:
            loss.annotate(f"{outcome.loss:.3f} nats per token", (least, y), (4, -2.5), **small)
        elif outcome.worse is not None and not math.isnan(outcome.worse):
            x = max(outcome.worse, least)
            loss.plot([least, x], [y, y], color=COLORS[0], linewidth=1.0, alpha=0.4)
            loss.plot([x], [y], "o", color=COLORS[0], markersize=5)
            loss.annotate(f"{outcome.worse:+.2f}%", (x, y), (7, -2.5), **small)
    loss.set(xscale="log", xlim=(least, max([*percents, 1.0]) * 3.5))
    loss.set_xlabel("validation loss above dense, % (mean over the seeds)", fontsize=8)
    loss.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    starts = [0.0] * len(finished)
    points = [point for point in POINTS if any(outcome.sent.get(point) for outcome in finished)]
    for number, point in enumerate(points):
        widths = [outcome.sent.get(point, 0.0) / 1000 for outcome in finished]
        color = COLORS[number % len(COLORS)]
        traffic.barh(range(len(finished)), widths, left=starts, height=0.7, color=color, label=point)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    traffic.set_xlabel("MB sent in an iteration, all ranks", fontsize=8)
    figure.legend(*traffic.get_legend_handles_labels(), loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    traffic.set_ylim(len(finished) - 0.4, -0.6)
    loss.set_yticks(range(len(finished)), [outcome.case for outcome in finished], fontsize=8)
    for panel in (loss, traffic):
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
        panel.tick_params(axis="x", labelsize=8)
        panel.tick_params(axis="y", length=0)
    save_figure(figure, path)


def _read_model(text: str) -> dict[str, int]:
    """Flags of a model from LAYERSxWIDTH."""
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if sizes is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give LAYERSxWIDTH, such as 2x96")
    return {"num-layers": int(sizes[1]), "hidden-size": int(sizes[2])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("bench_out/convergence")
    parser.add_argument(
        "--out", type=Path, default=None, help=f"folder of data and logs ({folder}, with --model {folder}-LAYERSxWIDTH)"
    )
    parser.add_argument("--cases", default=None, help=f"separated by semicolons, of: {join_for_help(CASES, ';')} (all)")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="'NAME: SPEC ... --flag=value ...'",
        help="a case of your own, such as 'mine: dp-grad=cast'; the first word of its name ('islands, mine') chooses "
        "the layout. Without --cases, only its baseline is trained beside it. Repeatable",
    )
    parser.add_argument(
        "--ladder",
        nargs="?",
        const="",
        metavar="POINT",
        help="the candidates of --compress auto, beside dense; only those at points whose names begin with POINT",
    )
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (1,2,3)")
    parser.add_argument("--iterations", type=int, default=1000, help="of each run (1000)")
    parser.add_argument("--model", type=_read_model, default={}, metavar="LAYERSxWIDTH", help="size of the GPT (4x64)")
    parser.add_argument(
        "--train-bytes", type=int, default=1_200_000, help="text to train on; less means more epochs (1200000)"
    )
    parser.add_argument("--no-continuations", action="store_true", help="only train, without the continuations of text")
    parser.add_argument("--table", action="store_true", help="only print the table of finished runs")
    options = parser.parse_args()
    try:
        user_cases = dict(map(read_case, options.case))
    except ValueError as error:
        parser.error(f"--case {error}")
    hidden_size = options.model.get("hidden-size", MODEL["hidden-size"])
    candidates = {} if options.ladder is None else ladder_cases(options.ladder, hidden_size)
    alone = [*user_cases, *candidates]
    baselines = ";".join(dict.fromkeys(family(case).baseline for case in alone)) or None
    names = parse_names(parser, "--cases", options.cases or baselines, CASES, ";")
    cases = {name: CASES[name] for name in names} | user_cases | candidates
    if options.out is None:
        options.out = Path("-".join([str(folder), *filter(None, ["x".join(map(str, options.model.values()))])]))
    out, seeds = options.out.resolve(), [int(seed) for seed in options.seeds.split(",")]
    failed = []
    if not options.table:
        runs.prepare(out, options.train_bytes)
        failed = train_all(out, cases, seeds, options.iterations, not options.no_continuations, options.model)
    finished = outcomes(out, cases, seeds, options.iterations)
    if options.table and not finished:
        parser.error(
            f"--table: no finished run of {options.iterations} iterations in {out}; leave out --table to train"
        )
    text = "\n".join([table(finished), *(f"\n{line}" for line in long_warmups(finished, options.iterations))])
    print(text)
    (out / "table.md").write_text(text + "\n")
    rows = list(map(asdict, finished))
    write_record(out / "table.json", header(device_name("cpu")), iterations=options.iterations, seeds=seeds, rows=rows)
    draw(finished, out / "convergence.png")
    if failed:
        sys.exit(f"error: not in the table, as they failed (reasons above): {'; '.join(failed)}")


if __name__ == "__main__":
    main()
