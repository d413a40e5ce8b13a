#!/usr/bin/env python
"""Validation losses of a run's checkpoints, all on the same samples."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.checkpoint.agree import together
from megatron.checkpoint.load import complete_iterations
from megatron.config.data import DataConfig
from megatron.config.errors import UserError
from megatron.config.option import derived, option
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.atomic import atomic_write
from megatron.inference.flags import ModelFlags, check_layout, open_model, parse_flags
from megatron.inference.model import load_weights, saved_config
from megatron.topology.launch import LaunchEnvironment
from megatron.training.program import Ranks, run_program
from tasks.validation import data_of, mean_loss, open_samples

DESCRIPTION = """Validation losses of a run's checkpoints, all on the same samples.

    python val_check_gpt.py --load checkpoints
    python val_check_gpt.py --load checkpoints --first 1000 --step 1000 --valid-data-path other --output losses.json
    torchrun --nproc-per-node 4 val_check_gpt.py --load checkpoints

Data, sequence length and seed are those of the run that saved the checkpoints; data flags replace the data. Writes
JSON with val_iters, val_lmloss and val_lmloss_ppl, after each checkpoint, so that a sweep that is interrupted goes on
where it stopped. More processes than the model is split over share the samples."""


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Which checkpoints, on how many samples."""

    first: int = option(0, "First iteration.", unit="iterations", minimum=0)
    last: int | None = derived("the newest", "Last iteration.", unit="iterations", minimum=0)
    step: int = option(1, "Only iterations that this number divides.", unit="iterations", minimum=1)
    eval_samples: int | None = derived(
        "the run's --eval-iters x --global-batch-size", "Validation samples.", unit="samples", minimum=1
    )
    micro_batch_size: int = option(4, "Samples in a forward pass.", unit="samples", minimum=1)
    output: str | None = derived("val_check.json in --load", "Where the losses go.", metavar="FILE")


def chosen(root: str, sweep: SweepFlags) -> list[int]:
    """The iterations of a sweep, first to last.

    Raises:
        UserError: when there are none.
    """
    there = sorted(complete_iterations(root))
    last = sweep.last if sweep.last is not None else max(there, default=0)
    found = [number for number in there if sweep.first <= number <= last and number % sweep.step == 0]
    if not found:
        have = ", ".join(map(str, there)) or "none"
        raise UserError(f"--load {root}: no complete checkpoint from --first to --last; there are {have}")
    return found


def known_losses(path: Path, settings: dict[str, Any], iterations: Sequence[int]) -> dict[int, float]:
    """Losses that an earlier sweep with the same settings found already, of the iterations asked for.

    Raises:
        UserError: when the file is something else.
    """
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text())
        found = {int(n): float(x) for n, x in zip(rows["val_iters"], rows["val_lmloss"], strict=True)}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"--output {path}: is no result of an earlier sweep; name another file") from error
    if any(rows.get(name) != value for name, value in settings.items()):
        raise UserError(f"--output {path}: holds a sweep over other samples; name another file, or remove it")
    return {number: loss for number, loss in found.items() if number in iterations}


def write(path: Path, settings: dict[str, Any], losses: dict[int, float]) -> None:
    """Writes what is known so far."""
    ordered = dict(sorted(losses.items()))
    rows = {
        "val_iters": list(ordered),
        "val_lmloss": list(ordered.values()),
        "val_lmloss_ppl": [math.exp(min(20, loss)) for loss in ordered.values()],
        **settings,
    }
    with atomic_write(path) as file:
        file.write(json.dumps(rows, indent=1).encode())


def sweep_all(
    flags: SweepFlags,
    model_flags: ModelFlags,
    tokenizer: TokenizerConfig,
    data: DataConfig,
    config: RunConfig,
    env: LaunchEnvironment,
) -> None:
    """Measures checkpoint after checkpoint.

    Raises:
        UserError: on every rank, for files that cannot be used.
    """
    iterations = chosen(model_flags.load, flags)
    model = open_model(replace(model_flags, ckpt_step=iterations[0]), tokenizer, env)
    group, replicas = model.topology.control.pg, model.topology.layout.dp
    samples = flags.eval_samples or config.validation.eval_iters * config.training.global_batch_size
    samples -= samples % replicas if flags.eval_samples is None else 0
    if samples < 1 or samples % replicas:
        raise UserError(f"--eval-samples {samples} does not divide by the {replicas} copies of the model")
    dataset = together(group, lambda: open_samples(config, data, samples, model))
    path = Path(flags.output or Path(model_flags.load) / "val_check.json")
    # What the losses depend on, besides the weights: an earlier sweep with other settings does not count.
    settings = {"samples": samples, "data": [data.data_path or data.valid_data_path, data.split]}
    losses = together(group, lambda: known_losses(path, settings, iterations) if model.topology.rank == 0 else {})
    losses = {int(number): loss for number, loss in model.tell_all_json(losses, 0).items()}
    for iteration in tqdm(iterations, unit="checkpoint", disable=model.topology.rank != 0):
        if iteration not in losses:
            if iteration != model.iteration:
                load_weights(model.stage, model_flags.load, iteration, model.topology)
            losses[iteration] = mean_loss(model, dataset, samples, flags.micro_batch_size)
            if model.topology.rank == 0:
                write(path, settings, losses)
    if model.topology.rank == 0:
        for iteration, loss in sorted(losses.items()):
            ppl = math.exp(min(20, loss))
            print(f"validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {ppl:.6E}")
        print(f"written to {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when it is done, 2 with a one-line reason when not."""

    def body(ranks: Ranks) -> None:
        sections = {"sweep": SweepFlags, "data": DataConfig}
        parsed = parse_flags(sys.argv[1:] if argv is None else argv, sections, "val_check_gpt.py", DESCRIPTION)
        model_flags: ModelFlags = parsed.sections["model"]
        flags: SweepFlags = parsed.sections["sweep"]
        config, _ = saved_config(model_flags.load, chosen(model_flags.load, flags)[0])
        data = data_of(config, parsed.sections["data"], parsed.explicit)
        check_layout(model_flags, ranks.env, replicas=True)
        ranks.join(model_flags.backend, model_flags.distributed_timeout_minutes)
        if ranks.env.rank == 0:
            for note in parsed.notes:
                print(f"note: {note}", file=sys.stderr)
        sweep_all(flags, model_flags, parsed.sections["tokenizer"], data, config, ranks.env)

    return run_program(body)


if __name__ == "__main__":
    raise SystemExit(main())
