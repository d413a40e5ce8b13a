"""Decides what lazy error propagation is worth: frozen weights at several widths, then paired training runs.

    make bench-lep                                               all of it, hours; finished parts are kept
    make bench-lep ARGS="--widths 256 --only dense,frozen"       one width, a quarter of an hour
    make bench-lep ARGS="--only table"                           what is there

`dense` trains a model of each width without compression. `frozen` takes its weights, keeps them as they are for some
iterations of 4 pipeline stages, and compares the gradients of compressed backpropagation with the exact ones, for
each kind of residual, by the same activations. `train` then trains the width given by --train-width with each kind and
several seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import chosen
from benchmarks.lep.figure import draw_losses
from benchmarks.lep.frozen import KINDS, FrozenPipeline
from benchmarks.runs import final_loss, flags, has_ended, prepare
from benchmarks.runs import train as train_unless_ended
from megatron.base.markdown import markdown_table
from megatron.config.data import DataConfig
from megatron.data.build import build_datasets
from megatron.data.loader import build_loader
from megatron.inference.model import load_model
from megatron.training.records import read_records

STAGES, MICRO_BATCHES, RANK, SEQUENCE = 4, 16, 16, 1024
PARTS = ("dense", "frozen", "train", "table")


def model_flags(width: int, options: argparse.Namespace) -> dict[str, Any]:
    """Flags of the model and its training: GPT-2, learned positions, dropout 0.1, one sample per micro-batch."""
    return {
        "num-layers": options.layers,
        "hidden-size": width,
        "num-attention-heads": max(width // 64, 1),
        "seq-length": SEQUENCE,
        "max-position-embeddings": SEQUENCE,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.1,
        "micro-batch-size": 1,
        "global-batch-size": MICRO_BATCHES,
        "lr": 1e-3 * math.sqrt(256 / width),
        "min-lr": 1e-4 * math.sqrt(256 / width),
        "lr-decay-style": "cosine",
        "lr-warmup-fraction": 0.05,
        "weight-decay": 0.1,
        "adam-beta2": 0.95,
        "log-interval": 10,
        "eval-iters": 8,
        "distributed-backend": "gloo",
        **({"bf16": True} if options.bf16 else {}),
    }


def dense(out: Path, width: int, options: argparse.Namespace) -> None:
    """Trains a model without compression, on one process; resumes an earlier call."""
    name, log = f"dense-{width}", out / f"dense-{width}.jsonl"
    iterations = options.dense_iterations
    values = {**model_flags(width, options), "seed": 1, "train-iters": iterations, "eval-interval": iterations}
    saving = {"save": out / name, "load": out / name, "save-interval": max(iterations // 10, 1), "keep-last": 1}
    words = flags({**values, **saving}, (), out, log)
    train_unless_ended(words, f"dense, width {width}", log, out / "logs" / f"{name}.log", threads=options.threads)


def frozen(out: Path, width: int, options: argparse.Namespace) -> None:
    """Measures the errors of gradients of a trained model, and writes them."""
    path = out / f"frozen-{width}{'' if options.when == 'epilogue' else '-all'}.json"
    if path.exists():
        return
    loaded = load_model(out / f"dense-{width}", log=print)
    stage = loaded.stage.float().train()
    stage.dtype = torch.float32
    train, _, _ = build_datasets(
        DataConfig(train_data_path=[f"{out / 'data' / 'train'}_text_document"]),
        seq_length=SEQUENCE,
        seed=2,
        train_valid_test_num_samples=(options.frozen_iterations * MICRO_BATCHES, None, None),
        eod_token=loaded.tokenizer.eod,
        vocab_size=loaded.tokenizer.vocab_size,
    )
    assert train is not None
    settings: dict[str, Any] = {"consumed_samples": 0, "micro_batch_size": 1, "dp_rank": 0, "dp_size": 1}
    pipeline = FrozenPipeline(stage, STAGES, RANK, MICRO_BATCHES, seed=1, late_only=options.when == "epilogue")
    errors: list[dict[str, dict[str, float]]] = []
    with build_loader(train, **settings) as batches:
        bar = tqdm(range(options.frozen_iterations), desc=f"frozen, width {width}", unit="iteration")
        for _ in bar:
            errors.append(pipeline.iteration([next(batches) for _ in range(MICRO_BATCHES)]))
    ratios = {m.kind: statistics.fmean(m.ratios) if m.ratios else 0.0 for m in pipeline.methods}
    found = {
        "width": width,
        "iterations": options.frozen_iterations,
        "errors": errors,
        "of_mean": pipeline.means(),
        "ratios": ratios,
        "kappa": pipeline.kappas.means(),
    }
    path.write_text(json.dumps(found))


def trained_log(out: Path, width: int, kind: str, seed: int) -> Path:
    return out / "runs" / f"{width}-{kind}-{seed}.jsonl"


def train(out: Path, width: int, kind: str, seed: int, options: argparse.Namespace) -> None:
    """Runs one training on 4 pipeline stages, unless its log is complete. ``kind`` is one of KINDS, or dense."""
    log, iterations = trained_log(out, width, kind, seed), options.train_iterations
    values = {**model_flags(width, options), "seed": seed, "train-iters": iterations, "eval-interval": iterations}
    values |= {"pipeline-model-parallel-size": STAGES, "eval-iters": 16}
    when = ",when=epilogue" if options.when == "epilogue" else ""
    feedback = "off" if kind == "none" else kind
    specs = [] if kind == "dense" else [f"pp-backward=lowrank,rank={RANK}{when},error-feedback={feedback}"]
    words, name = flags(values, specs, out, log), f"{kind}, width {width}, seed {seed}"
    train_unless_ended(words, name, log, out / "logs" / f"{log.stem}.log", ranks=STAGES)


def frozen_table(out: Path) -> str:
    """The errors with frozen weights as Markdown."""
    heads = ["width", "when", "residual", "matrices", "vectors", "mean: matrices", "mean: vectors", "residual/gradient"]
    rows: list[list[object]] = []
    for path in sorted(out.glob("frozen-*.json"), key=lambda path: (json.loads(path.read_text())["width"], path.name)):
        found = json.loads(path.read_text())
        when = "all" if path.stem.endswith("-all") else "epilogue"
        for kind in KINDS:
            each = [statistics.fmean(one[kind][group] for one in found["errors"]) for group in ("matrices", "vectors")]
            mean = [found["of_mean"][kind][group] for group in ("matrices", "vectors")]
            rows.append([found["width"], when, kind, *(f"{x:.3f}" for x in (*each, *mean, found["ratios"][kind]))])
        kappas = ", ".join(f"{name} {value:.3f}" for name, value in found["kappa"].items())
        rows.append([found["width"], "", "kappa", kappas, *[""] * 4])
    return markdown_table(heads, rows)


def trained_table(out: Path, width: int, seeds: Sequence[int]) -> str:
    """Validation losses of the paired runs as Markdown."""
    rows: list[list[object]] = []
    losses: dict[str, dict[int, float]] = {}
    for kind in ("dense", *KINDS):
        logs = {seed: trained_log(out, width, kind, seed) for seed in seeds}
        losses[kind] = {seed: final_loss(read_records(log)) for seed, log in logs.items() if has_ended(log)}
        if not losses[kind]:
            continue
        changes = [losses[kind][s] / losses["dense"][s] - 1 for s in losses[kind] if s in losses["dense"]]
        mean = statistics.fmean(losses[kind].values())
        cells = [kind, len(losses[kind]), f"{mean:.4f}", " ".join(f"{change:+.2%}" for change in changes)]
        rows.append([*cells, f"{statistics.fmean(changes):+.2%}" if changes else ""])
    return markdown_table(("residual", "seeds", "validation loss", "vs dense, by seed", "mean"), rows)


def losses_of(out: Path, width: int, seeds: Sequence[int]) -> dict[str, list[dict[int, float]]]:
    """Training losses of the complete paired runs by iteration, a run for each seed, by kind."""
    found: dict[str, list[dict[int, float]]] = {}
    for kind in ("dense", *KINDS):
        for log in (trained_log(out, width, kind, seed) for seed in seeds):
            if has_ended(log):
                trained = (event for event in read_records(log) if event["kind"] == "train" and "lm_loss" in event)
                found.setdefault(kind, []).append({event["iteration"]: event["lm_loss"] for event in trained})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("bench_out/lep")
    parser.add_argument("--out", type=Path, default=folder, help=f"folder of data, checkpoints and results ({folder})")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"parts, separated by commas, of {', '.join(PARTS)} (all)"
    )
    parser.add_argument(
        "--widths", default="256,512,1024", help="of the models whose weights are frozen (256,512,1024)"
    )
    parser.add_argument("--layers", type=int, default=4, help="a multiple of the 4 stages (4)")
    parser.add_argument(
        "--when", choices=("epilogue", "all"), default="epilogue", help="messages compressed (epilogue)"
    )
    parser.add_argument("--dense-iterations", type=int, default=300, help="of the dense training (300)")
    parser.add_argument("--frozen-iterations", type=int, default=32, help="of each measurement (32)")
    parser.add_argument("--train-width", type=int, default=256, help="of the paired runs (256)")
    parser.add_argument("--train-iterations", type=int, default=300, help="of each paired run (300)")
    kinds = ("dense", *KINDS)
    parser.add_argument("--kinds", default=",".join(kinds), help=f"of the paired runs, of {', '.join(kinds)} (all)")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="of the paired runs (1,2,3,4,5)")
    parser.add_argument("--threads", type=int, default=2, help="of the parts that one process runs (2)")
    parser.add_argument("--bf16", action="store_true", help="train in bf16: faster where the processor has it")
    options = parser.parse_args()
    parts = chosen(parser, "--only", options.only, PARTS)
    trained = chosen(parser, "--kinds", options.kinds, kinds)
    widths, seeds = ([int(n) for n in text.split(",")] for text in (options.widths, options.seeds))
    torch.set_num_threads(options.threads)
    out = options.out.resolve()
    prepare(out, 1 << 40)
    for width in widths:
        if "dense" in parts:
            dense(out, width, options)
        if "frozen" in parts:
            frozen(out, width, options)
    if "train" in parts:
        for seed in seeds:
            for kind in trained:
                train(out, options.train_width, kind, seed, options)
    if "table" in parts:
        text = f"{frozen_table(out)}\n\n{trained_table(out, options.train_width, seeds)}\n"
        print(text)
        (out / "table.md").write_text(text)
        print(draw_losses(losses_of(out, options.train_width, seeds), out / "losses.png"))


if __name__ == "__main__":
    main()
