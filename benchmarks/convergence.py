"""Trains a small GPT with and without compression and compares validation losses and bytes.

    make bench-convergence                        all cases and seeds; finished ones are kept
    make bench-convergence ARGS="--cases 'dense; CB, LEP' --seeds 1 --table"

Every case trains on the same text, the quickstart's, for several epochs of the same samples, on 2 pipeline stages x 2
replicas; a model with experts on 4 replicas that share them; sums in two levels on 4 replicas, 2 on each of 2 nodes;
islands of one process each. Afterwards each trained model goes on with held-out text (the task CONTINUATION): a loss
may hide what compression does to that. Prints a table (the whole spec, mean and spread over the seeds), names warm-ups
that take more than a fifth of the run, and writes it all with pictures.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import chosen, listed, runs
from benchmarks.convergence_cases import CASES, MODEL, family, is_flag, read_case
from benchmarks.convergence_figures import Outcome, draw_curves, draw_outcomes
from benchmarks.record import device_name, header, write_record
from megatron.base.markdown import markdown_table
from megatron.compression.builtin import BUILTIN
from megatron.compression.points import EXPERT_POINTS
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.config.islands import folder_of
from megatron.training.plots import of_final_draw
from megatron.training.records import read_records


def log_of(out: Path, case: str, seed: int, iterations: int) -> Path:
    return out / "runs" / f"{runs.slug(case)}-{seed}-{iterations}.jsonl"


def continued(log: Path) -> Path:
    """The result line of the task CONTINUATION for the run that wrote a log."""
    return log.with_suffix(".continuation")


def train(out: Path, case: str, words: Sequence[str], seed: int, iterations: int, continues: bool = True) -> None:
    """Trains one case with one seed, and measures its continuations if asked to, unless that is done."""
    log = log_of(out, case, seed, iterations)
    if runs.has_ended(log) and (continued(log).exists() or not continues):
        return
    log.unlink(missing_ok=True)
    own = family(case)
    values = {**MODEL, "seed": seed, "train-iters": iterations, "eval-interval": max(iterations // own.evaluations, 1)}
    saved = out / "checkpoints" / log.stem
    shutil.rmtree(saved, ignore_errors=True)
    specs = [word for word in words if not is_flag(word)]
    flags = runs.flags({**values, **own.flags, "save": saved, "no-save-optim": True}, specs, out, log)
    flags += filter(is_flag, words)
    printed = out / "logs" / f"{log.stem}.log"
    runs.train(flags, f"{case}, seed {seed}", log, printed, ranks=4, nodes=own.nodes, islands=own.islands)
    if continues:
        _continue(out, log, Path(folder_of(str(saved), 0)) if own.islands > 1 else saved)


def _continue(out: Path, log: Path, saved: Path) -> None:
    """Measures the continuations of a trained model."""
    task = ["tasks/main.py", "--task", "CONTINUATION", "--load", str(saved), "--micro-batch-size", "64"]
    places = ["--prompt-tokens", "48", "--continuation-tokens", "4"]
    text = ["--valid-data", str(out / "corpus" / "heldout.jsonl")]
    printed = out / "logs" / f"{log.stem}.continuation.log"
    runs.run([*task, *places, *text], printed, threads=2)
    continued(log).write_text(next(line for line in printed.read_text().splitlines() if "exact match" in line))


def continuation_figures(log: Path) -> tuple[float, float] | None:
    """Exact match and ranking accuracy of a run's continuations, in percent; None where they were not measured."""
    text = continued(log).read_text() if continued(log).exists() else ""
    found = re.search(r"exact match: (\S+) .* ranking accuracy: (\S+) ", text)
    return (100 * float(found[1]), 100 * float(found[2])) if found else None


def bytes_per_iteration(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean bytes over all iterations, by point."""
    trained = [event["comm"] for event in events if event.get("kind") == "train"]
    points = sorted({point for comm in trained for point in comm} - {"control"})
    return {p: statistics.fmean(comm.get(p, {}).get("wire_bytes", 0.0) for comm in trained) for p in points}


POINTS = (
    "pp-forward",
    "pp-backward",
    "dp-grad",
    "embedding",
    "param-gather",
    "outer",
    *(p.value for p in EXPERT_POINTS),
)


def outcomes(
    out: Path, cases: Iterable[str] | Mapping[str, Sequence[str]], seeds: list[int], iterations: int
) -> list[Outcome]:
    """Outcomes of the finished runs of cases, by name or with their words."""
    words = {case: " ".join(cases[case] if isinstance(cases, Mapping) else CASES.get(case, ())) for case in cases}
    found = []
    dense: dict[str, dict[int, float]] = {}
    for case in cases:
        own, baseline = family(case), family(case).baseline
        logs = {seed: log_of(out, case, seed, iterations) for seed in seeds}
        ended = {seed: read_records(log) for seed, log in logs.items() if runs.has_ended(log)}
        losses = {seed: runs.final_loss(run) for seed, run in ended.items()}
        if not losses:
            continue
        dense.setdefault(baseline, losses if case == baseline else {})
        against = dense[baseline]
        versus = [losses[seed] / against[seed] - 1 for seed in losses if seed in against]
        sent = [bytes_per_iteration(run) for run in ended.values()]
        means = {point: own.islands * statistics.fmean(one.get(point, 0.0) for one in sent) / 1000 for point in POINTS}
        spread = statistics.stdev(losses.values()) if len(losses) > 1 else 0.0
        worse = 100 * statistics.fmean(versus) if versus else None
        quality = [figures for seed in losses if (figures := continuation_figures(logs[seed]))]
        exact, ranked = (statistics.fmean(column) for column in zip(*quality, strict=True)) if quality else (None, None)
        mean = statistics.fmean(losses.values())
        found.append(Outcome(case, mean, spread, worse, means, len(losses), exact, ranked, words[case]))
    return found


def table(found: Sequence[Outcome]) -> str:
    """The results as Markdown, with the whole spec of each case; one seed has no spread."""
    points = [point for point in POINTS if any(one.sent[point] for one in found)]
    heads = ["case", "spec", "seeds", "validation loss", "vs dense", *(f"{point} kB" for point in points), "total kB"]
    heads += ["continued exactly", "ranked first"]
    rows = []
    for one in found:
        change = "" if one.worse is None else f"{one.worse:+.2f}%"
        sent = [one.sent[point] for point in points]
        spread = f" ± {one.spread:.4f}" if one.seeds > 1 else ""
        spec = f"`{one.words}`" if one.words else ""
        cells = [one.case, spec, one.seeds, f"{one.loss:.4f}{spread}", change]
        cells += [f"{kb:.1f}" for kb in (*sent, sum(sent))]
        rows.append([*cells, *("" if share is None else f"{share:.2f}%" for share in (one.exact, one.ranked))])
    return markdown_table(heads, rows)


def long_warmups(found: Sequence[Outcome], iterations: int) -> list[str]:
    """A line for each case whose warm-up takes more than a fifth of the run: its row says little of the compressor."""
    lines = []
    for one in found:
        specs = [word for word in one.words.split() if not is_flag(word)]
        warmups = [
            spec.activation.warmup_iters
            for spec in read_specs(specs, Registry(BUILTIN), RunLength(iterations)).values()
        ]
        longest = max(warmups, default=0)
        if longest > iterations / 5:
            lines.append(
                f"{one.case}: sends exactly in the first {longest} of {iterations} iterations (warmup={longest}); "
                "compare it with rows of the same warm-up, or train for longer"
            )
    return lines


def curves(out: Path, cases: list[str], seeds: list[int], iterations: int) -> dict[str, dict[int, float]]:
    """Validation losses during training, means over the seeds that have them."""
    means: dict[str, dict[int, float]] = {}
    for case in cases:
        points: dict[int, list[float]] = {}
        for seed in seeds:
            log = log_of(out, case, seed, iterations)
            for event in read_records(log) if log.exists() else []:
                if event["kind"] == "validation" and not of_final_draw(event):
                    points.setdefault(event.iteration(), []).append(event.number("lm_loss"))
        # A mean over fewer seeds is one of other runs.
        most = max(map(len, points.values()), default=0)
        if points:
            means[case] = {place: statistics.fmean(own) for place, own in points.items() if len(own) == most}
    return means


def train_all(
    out: Path, cases: Mapping[str, Sequence[str]], seeds: Sequence[int], iterations: int, continues: bool
) -> list[str]:
    """Trains all cases with all seeds. Those that fail say why and leave the others; returns their names."""
    failed = []
    for seed in seeds:
        for case, words in cases.items():
            try:
                train(out, case, words, seed, iterations, continues)
            except SystemExit as error:
                print(error, file=sys.stderr, flush=True)
                failed.append(f"{case} (seed {seed})")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("bench_out/convergence")
    parser.add_argument("--out", type=Path, default=folder, help=f"folder of data and logs ({folder})")
    parser.add_argument("--cases", default=None, help=f"separated by semicolons, of: {listed(CASES, ';')} (all)")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="'NAME: SPEC ... --flag=value ...'",
        help="a case of your own, such as 'mine: dp-grad=cast'; the first word of its name ('islands, mine') chooses "
        "the layout. Without --cases, it is trained with what it is compared with. Repeatable",
    )
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated (1,2,3)")
    parser.add_argument("--iterations", type=int, default=1000, help="of each run (1000)")
    parser.add_argument(
        "--train-bytes", type=int, default=1_200_000, help="text to train on; less means more epochs (1200000)"
    )
    parser.add_argument(
        "--no-continuations", action="store_true", help="only train: leave out how the models go on with text"
    )
    parser.add_argument("--table", action="store_true", help="only print the table of what is finished")
    options = parser.parse_args()
    try:
        own = dict(map(read_case, options.case))
    except ValueError as error:
        parser.error(f"--case {error}")
    usual = ";".join(dict.fromkeys(family(case).baseline for case in own)) or None
    cases = {name: CASES[name] for name in chosen(parser, "--cases", options.cases or usual, CASES, ";")} | own
    names = list(cases)
    out, seeds = options.out.resolve(), [int(seed) for seed in options.seeds.split(",")]
    failed = []
    if not options.table:
        runs.prepare(out, options.train_bytes)
        failed = train_all(out, cases, seeds, options.iterations, not options.no_continuations)
    found = outcomes(out, cases, seeds, options.iterations)
    text = "\n".join([table(found), *(f"\n{line}" for line in long_warmups(found, options.iterations))])
    print(text)
    (out / "table.md").write_text(text + "\n")
    made_with = header(device_name("cpu"))
    rows = [asdict(one) for one in found]
    write_record(out / "table.json", made_with, iterations=options.iterations, seeds=seeds, rows=rows)
    draw_outcomes(found, out / "convergence.png")
    draw_curves(curves(out, names, seeds, options.iterations), out / "curves.png")
    if failed:
        sys.exit(f"error: not in the table, as they failed (reasons above): {'; '.join(failed)}")


if __name__ == "__main__":
    main()
