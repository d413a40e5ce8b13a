"""Validation losses of a run's checkpoints, all on the same samples."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.base.atomic import check_writable, write_whole
from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.base.user_text import flag_of
from megatron.checkpoint.files import checkpoint_folder, saved_iterations
from megatron.checkpoint.find import complete_iterations
from megatron.checkpoint.manifest import MANIFEST
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.config.translate.rules import old_name
from megatron.distributed.agreement import run_together, take_from_rank_0
from megatron.evaluation.validation import data_of, mean_loss, open_samples
from megatron.inference.flags import ModelFlags, check_layout, open_topology, parse_flags
from megatron.inference.model import load_model, load_weights
from megatron.training.metrics import perplexity
from megatron.training.program import Ranks, run_program

DESCRIPTION = """Validation losses of a run's checkpoints, all on the same samples.

    python val_check_gpt.py --load checkpoints
    python val_check_gpt.py --load checkpoints --first 1000 --step 1000 --valid-data-path other --output losses.json
    python tools/launch.py --nproc-per-node 4 val_check_gpt.py --load checkpoints
    python val_check_gpt.py --get_val_ppls --src_ckpt_path checkpoints --val_start_iteration 1000 \\
        --val_target_iteration 9000 --val_ckpt_interval 1000 --val_ppls_save_path losses --experiment_name mine

Data, sequence length and seed are those of the run that saved the checkpoints; data flags override the data. JSON with
val_iters, val_lmloss and val_lmloss_ppl is written after each checkpoint, so that an interrupted sweep can continue.
Processes beyond those that the model is split over hold replicas, which share the samples."""


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Checkpoints to evaluate, and number of samples."""

    first: int = option(0, "First iteration to evaluate.", unit="iterations", minimum=0)
    last: int | None = derived("the newest", "Last iteration to evaluate.", unit="iterations", minimum=0)
    step: int = option(1, "Evaluate only every N iterations, counted from --first.", unit="iterations", minimum=1)
    eval_samples: int | None = derived(
        "--eval-iters x the run's --global-batch-size", "Validation samples.", unit="samples", minimum=1
    )
    eval_iters: int | None = derived("the run's", "Validation batches.", unit="batches", minimum=1)
    micro_batch_size: int = option(4, "Samples per forward pass.", unit="samples", minimum=1)
    output: str | None = derived("val_check.json in --load", "File for the losses.", metavar="FILE")
    val_ppls_save_path: str | None = derived(
        "unused", "Same as --output FOLDER/NAME.json, with --experiment-name NAME.", metavar="FOLDER"
    )
    experiment_name: str = option("val_check", "Name of the file in --val-ppls-save-path.")
    get_val_ppls: bool = option(
        False, "Asks Optimus-CC for perplexities.", no_effect="perplexities are always written beside the losses"
    )


OLD_NAMES = tuple(
    old_name(name, path, system="Optimus-CC")
    for name, path in (
        ("src-ckpt-path", "model.load"),
        ("val-start-iteration", "sweep.first"),
        ("val-target-iteration", "sweep.last"),
        ("val-ckpt-interval", "sweep.step"),
    )
)


def output_path(load: str, sweep: SweepFlags) -> Path:
    """Path of the output file."""
    if sweep.val_ppls_save_path is not None:
        return Path(sweep.val_ppls_save_path) / f"{sweep.experiment_name}.json"
    return Path(sweep.output or Path(load) / "val_check.json")


def check_flags(sweep: SweepFlags, explicit: set[str], note: Callable[[str], None]) -> None:
    """Check that no two flags exclude each other (else UserError)."""
    for first_name, second_name in (("eval_samples", "eval_iters"), ("output", "val_ppls_save_path")):
        if getattr(sweep, first_name) is not None and getattr(sweep, second_name) is not None:
            flags = [flag_of(name) for name in (first_name, second_name)]
            raise UserError(f"{' and '.join(flags)} exclude each other; leave one of them out")
    if "sweep.experiment_name" in explicit and sweep.val_ppls_save_path is None:
        note("--experiment-name: no effect without --val-ppls-save-path")


def _in_sweep(number: int, sweep: SweepFlags, last: float) -> bool:
    return sweep.first <= number <= last and (number - sweep.first) % sweep.step == 0


def list_damaged(root: str, iterations: Sequence[int], sweep: SweepFlags) -> list[int]:
    """List the iterations of a sweep whose checkpoints are incomplete."""
    last = sweep.last if sweep.last is not None else math.inf
    saved_numbers = sorted(saved_iterations(Path(root)))
    return [number for number in saved_numbers if _in_sweep(number, sweep, last) and number not in iterations]


def list_iterations(root: str, sweep: SweepFlags) -> list[int]:
    """List the iterations of a sweep, in ascending order.

    Raises:
        UserError: when there are none.
    """
    complete_numbers = sorted(complete_iterations(root))
    last = sweep.last if sweep.last is not None else max(complete_numbers, default=0)
    iterations = [number for number in complete_numbers if _in_sweep(number, sweep, last)]
    if not iterations:
        have = ", ".join(map(str, complete_numbers)) or "none"
        damaged = ", ".join(map(str, list_damaged(root, iterations, sweep)))
        also = f"; files of {damaged} are missing or damaged" if damaged else ""
        raise UserError(f"--load {root}: no complete checkpoint from --first to --last; there are {have}{also}")
    return iterations


@dataclass
class Losses:
    """Losses of a sweep, stored in a file.

    Args:
        path: path of the file.
        settings: settings that affect the losses, besides the weights.
        root: folder of the checkpoints.
    """

    path: Path
    settings: dict[str, Any]
    root: str
    values: dict[int, tuple[float, str]] = field(default_factory=dict)

    def _digest_weights(self, iteration: int) -> str:
        """Digest of a checkpoint's manifest, which contains the checksums of all tensors."""
        path = checkpoint_folder(Path(self.root), iteration) / MANIFEST
        try:
            contents = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; was the checkpoint removed in the meantime?") from error
        return hashlib.blake2b(contents, digest_size=8).hexdigest()

    def read(self) -> None:
        """Read the losses of an earlier sweep.

        Raises:
            UserError: when the file is not a result of a sweep, or belongs to another run or other samples.
        """
        if not self.path.exists():
            return
        try:
            rows = json.loads(self.path.read_text())
            columns = zip(rows["val_iters"], rows["val_lmloss"], rows["val_checkpoints"], strict=True)
            self.values = {int(n): (float(loss), str(weights)) for n, loss, weights in columns}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"--output {self.path}: is not the result of a sweep; name another file") from error
        if any(rows.get(name) != value for name, value in self.settings.items()):
            raise UserError(f"--output {self.path}: belongs to another run or other samples; name another file")

    def find_loss(self, iteration: int) -> float | None:
        """Known loss of a checkpoint; None if it is unknown or the checkpoint has changed."""
        loss, weights = self.values.get(iteration, (None, ""))
        return loss if weights == self._digest_weights(iteration) else None

    def add_loss(self, iteration: int, loss: float) -> None:
        """Add a loss, and write the file."""
        self.values[iteration] = (loss, self._digest_weights(iteration))
        rows = sorted((n, loss, weights) for n, (loss, weights) in self.values.items())
        values = {
            "val_iters": [n for n, _, _ in rows],
            "val_lmloss": [loss for _, loss, _ in rows],
            "val_lmloss_ppl": [perplexity(loss) for _, loss, _ in rows],
            "val_checkpoints": [weights for _, _, weights in rows],
            **self.settings,
        }
        write_whole(self.path, json.dumps(values, indent=1).encode(), "--output")


def count_samples(flags: SweepFlags, config: RunConfig, replicas: int) -> int:
    """Determine the number of samples in each evaluation.

    Raises:
        UserError: when the samples do not divide by the number of replicas.
    """
    if flags.eval_samples is None:
        batches = config.validation.eval_iters if flags.eval_iters is None else flags.eval_iters
        usual = batches * config.training.global_batch_size
        if usual < replicas:
            whose = "the run had " if flags.eval_iters is None else ""
            raise UserError(f"{whose}--eval-iters {batches}; give --eval-samples")
        return usual - usual % replicas
    if flags.eval_samples % replicas:
        raise UserError(f"--eval-samples {flags.eval_samples} does not divide by the {replicas} copies of the model")
    return flags.eval_samples


def compare_samples(config: RunConfig, data: DataConfig, samples: int) -> list[str]:
    """Note the differences between the samples of the sweep and of the run's own evaluations."""
    notes = []
    if config.validation.full_validation:
        notes.append(f"note: the run had --full-validation; here only {samples:,} samples are measured")
    if data.multiple_validation_sets:
        notes.append("note: the run had --multiple-validation-sets; here the sets are measured together")
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, or 2 after printing a one-line error."""

    def body(ranks: Ranks) -> None:
        sections = {"sweep": SweepFlags, "data": DataConfig}
        parsed = parse_flags(
            sys.argv[1:] if argv is None else argv, sections, "val_check_gpt.py", DESCRIPTION, OLD_NAMES
        )
        model_flags: ModelFlags = parsed.sections["model"]
        flags: SweepFlags = parsed.sections["sweep"]
        if model_flags.ckpt_step is not None:
            raise UserError(f"--ckpt-step {model_flags.ckpt_step}: a sweep takes --first and --last")
        check_flags(flags, parsed.explicit, parsed.notes.append)
        list_iterations(model_flags.load, flags)
        check_writable(output_path(model_flags.load, flags), "--output")
        layout = check_layout(model_flags, ranks.env, replicas=True)
        ranks.join(model_flags.backend, model_flags.distributed_timeout_minutes, parsed.sections, parsed.notes)
        topology = open_topology(model_flags, layout, ranks.env)
        group = topology.control.pg
        # A concurrent training run may save and remove checkpoints: use rank 0's listing on all ranks.
        listed = run_together(group, lambda: list_iterations(model_flags.load, flags) if topology.rank == 0 else [])
        iterations = take_from_rank_0(group, listed)
        if topology.rank == 0 and (damaged := list_damaged(model_flags.load, iterations, flags)):
            damaged_list = ", ".join(map(str, damaged))
            print(f"left out, since files are missing or damaged: iterations {damaged_list}", flush=True)
        root, tokenizer = model_flags.load, parsed.sections["tokenizer"]
        model = load_model(root, iteration=iterations[0], tokenizer=tokenizer, topology=topology)
        config, samples = model.config, count_samples(flags, model.config, layout.dp)
        data = data_of(config, parsed.sections["data"], parsed.explicit)
        dataset = run_together(group, lambda: open_samples(config, data, samples, model))
        for note in compare_samples(config, data, samples) if topology.rank == 0 else ():
            print(note, flush=True)
        settings = {
            "run": str(Path(root).resolve()),
            "samples": samples,
            "seed": config.training.seed,
            "seq_length": config.model.seq_length,
            "data": vars(data),
            "tokenizer": vars(tokenizer),
        }
        losses = Losses(output_path(root, flags), json.loads(json.dumps(settings)), root)
        run_together(group, lambda: losses.read() if topology.rank == 0 else None)
        loaded, lines = iterations[0], []
        for iteration in tqdm(iterations, unit="checkpoint", disable=topology.rank != 0):
            known_loss = run_together(
                group, partial(losses.find_loss, iteration) if topology.rank == 0 else lambda: None
            )
            loss = model.broadcast_json(known_loss, 0)
            if loss is None:
                if iteration != loaded:
                    load_weights(model.stage, root, iteration, topology)
                    loaded = iteration
                loss = new_loss = mean_loss(model, dataset, samples, flags.micro_batch_size)
                run_together(
                    group, partial(losses.add_loss, iteration, new_loss) if topology.rank == 0 else lambda: None
                )
            ppl = f" | lm loss PPL: {perplexity(loss):.6E}" if math.isfinite(loss) else ""
            lines.append(f"validation loss at iteration {iteration} | lm loss value: {loss:.6E}{ppl}")
        if topology.rank == 0:
            print("\n".join(lines), f"\nwritten to {losses.path}", flush=True)

    return run_program(body)
