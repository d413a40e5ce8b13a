"""Batch sizes, length and end of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.option import Condition, derived, is_unset, option, required
from megatron.base.user_text import Note
from megatron.config.batch_size import BatchSizeSchedule, read_steps
from megatron.config.conditions import SEVERAL_PROCESSES
from megatron.config.lengths import LengthSchedule
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes
from megatron.config.validation import ValidationConfig

MAX_DRAWN = 10**14
"""Maximum number of samples of a dataset; their tokens can be counted in 64 bits."""
_MAX_MICRO_BATCHES = 1 << 16

MAX_ITERATIONS = 10**9
MAX_BATCH = 1 << 20
"""Maximum size of a global batch or micro-batch."""
MAX_SAMPLES = 10**12
MAX_TOKENS = 10**16


_COMPILER = Condition(
    lambda run, _: run.training.compile == "on" or can_compile_by_default(run.training, run.parallel, run.model),
    "layers are compiled by themselves only on CUDA, with one tensor-parallel rank",
)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch sizes and the length of the run, in iterations or in samples, never both."""

    micro_batch_size: int = required(
        "Samples per forward pass of one data-parallel replica.",
        unit="samples",
        minimum=1,
        maximum=MAX_BATCH,
        common="batch and length",
    )
    global_batch_size: int = derived(
        "micro batch size * data-parallel size",
        "Samples per optimizer step, over all replicas.",
        unit="samples",
        minimum=1,
        maximum=MAX_BATCH,
        common="batch and length",
    )
    rampup_batch_size: list[int] | None = derived(  # noqa: RUF009
        "no ramp-up",
        "Grow the global batch: START, INCREMENT, and the number of SAMPLES over which it grows. Needs "
        "--train-samples.",
        count=3,
        metavar="START INCREMENT SAMPLES",
        minimum=0,
        maximum=MAX_SAMPLES,
        common="batch and length",
    )
    step_batch_size_schedule: str | None = derived(
        "one size",
        'Global batch sizes with the number of tokens at which each begins, as one argument: "0:768 250B:1536 '
        '1T:3072"; numbers may end in K, M, B or T. Replaces --global-batch-size; needs --train-samples or '
        "--train-tokens.",
        metavar="TOKENS:SIZE...",
    )
    train_iters: int | None = derived(
        "--train-samples decides",
        "Length of the run.",
        unit="iterations",
        minimum=1,
        maximum=MAX_ITERATIONS,
        common="batch and length",
    )
    train_samples: int | None = derived(
        "--train-iters decides",
        "Length of the run.",
        unit="samples",
        minimum=1,
        maximum=MAX_SAMPLES,
        common="batch and length",
    )
    train_tokens: int | None = derived(
        "no limit",
        "Length of the run, counted in full sequences of --seq-length, or with --curriculum-learning in tokens "
        "actually read. If --train-samples is given, too, the shorter one ends the run.",
        unit="tokens",
        minimum=1,
        maximum=MAX_TOKENS,
        common="batch and length",
    )
    exit_interval: int | None = derived(
        "never", "Save and exit at iterations that are multiples of this.", unit="iterations", minimum=1
    )
    exit_duration_in_mins: float | None = derived("never", "Save and exit after this long.", unit="minutes", above=0)
    exit_signal_handler: bool = option(False, "Save and exit on SIGTERM or SIGUSR1.")
    kill_switch_file: str | None = derived(
        "none",
        "Save and exit as soon as this file exists; refused if it exists at the start.",
        metavar="FILE",
        may_differ="any machine's switch ends the run",
    )
    seed: int = option(
        1234, "Seed of initialization, dropout and data order.", minimum=0, maximum=2**32 - 1, common="batch and length"
    )
    deterministic_mode: bool = option(
        False,
        "Compute the same bits in every run, on GPUs too (CPUs always do): use only operations that add in a "
        "fixed order. Slower; see docs/guides/gpus.md.",
    )
    check_replicas: int | None = derived(
        "never",
        "Every N iterations, compare bit by bit everything that must be equal on several ranks (replicas' "
        "parameters, the state of pipeline codecs at both ends), and stop if it differs.",
        metavar="N",
        unit="iterations",
        minimum=1,
        only_if=(SEVERAL_PROCESSES,),
    )
    max_skipped_steps: int = option(
        10,
        "Stop the run, as diverged, after this many consecutive steps that were skipped because a gradient or "
        "loss was not finite; 0: never. With a dynamic loss scale, only steps at its minimum count.",
        unit="steps",
        minimum=0,
    )
    check_for_nan_in_loss_and_grad: bool = option(
        False,
        "Stop the run, as diverged and without a checkpoint, at the first loss or gradient that is not finite; "
        "otherwise such steps are skipped. With a dynamic loss scale, gradients count only at its minimum.",
    )
    check_for_spiky_loss: bool = option(
        False, "Warn of each loss that is ten times the highest loss of the first 100 steps since the start."
    )
    iterations_to_skip: list[str] = option(  # noqa: RUF009
        [],
        "Iterations to skip, counted from 1, or ranges of them (100-120): their samples count as consumed "
        "without being read, also toward the length of the run, but no update is made, and the learning-rate "
        "schedule does not advance.",
        metavar="ITERATION",
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "Compile each transformer layer with torch.compile. auto compiles if CUDA and Triton are available, with "
        "one tensor-parallel rank, and without attention dropout, --deterministic-mode, or --pipeline-schedule "
        "zb-h1, zb-v or auto.",
        only_if=(_COMPILER,),
    )

    @property
    def planned_iters(self) -> int | None:
        """Iterations of the run; if counted in samples, a lower bound from the largest batch. None if unknown."""
        if self.train_iters is not None or self.train_samples is None or not self.global_batch_size:
            return self.train_iters
        steps = read_steps(self.step_batch_size_schedule, 1) if self.step_batch_size_schedule is not None else []
        return max(self.train_samples // max([self.global_batch_size, *(size for _, size in steps)]), 1)


def resolve_training(
    training: TrainingConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    lengths: LengthSchedule,
    world_size: int,
    note: Note,
) -> TrainingConfig:
    """Fill the length and the batch size. Raises UserError if that is impossible."""
    if training.step_batch_size_schedule is not None:
        flag = "--step-batch-size-schedule"
        if training.rampup_batch_size is not None:
            raise UserError(f"--rampup-batch-size and {flag} exclude each other; leave one of them out")
        if lengths.grows:
            raise UserError(
                f"{flag} counts samples of --seq-length {lengths.full} tokens, and --curriculum-learning has shorter "
                "ones; use --rampup-batch-size START INCREMENT SAMPLES"
            )
        steps = read_steps(training.step_batch_size_schedule, lengths.full)
        largest, last = max(size for _, size in steps), steps[-1][1]
        if largest > MAX_BATCH:
            raise UserError(f"{flag}: a batch of {largest} is above {MAX_BATCH}; lower it")
        if not is_unset(training.global_batch_size) and training.global_batch_size != last:
            raise UserError(
                f"--global-batch-size {training.global_batch_size} contradicts {flag}, which ends with {last}; "
                "leave it out"
            )
        note(f"{flag}: " + ", ".join(f"batches of {size} from sample {begin} on" for begin, size in steps))
        training = replace(training, global_batch_size=last)
    if is_unset(training.global_batch_size):
        if training.rampup_batch_size is not None:
            raise UserError("--rampup-batch-size needs the final batch size; add --global-batch-size")
        size = training.micro_batch_size * parallel.data_parallel_size(world_size)
        training = replace(training, global_batch_size=size)
    if training.train_tokens is not None:
        if training.train_iters is not None:
            raise UserError("--train-iters and --train-tokens exclude each other; leave one of them out")
        if lengths.grows:
            unit = "global batch of the shortest sequences"
            samples = StepSizes(batch_schedule(training, lengths.full), lengths).steps_within(training.train_tokens)[1]
        else:
            unit = f"sequence of --seq-length {lengths.full}"
            samples = training.train_tokens // lengths.full
        if samples == 0:
            raise UserError(f"--train-tokens {training.train_tokens} is less than one {unit}; give more tokens")
        if training.train_samples is None or samples < training.train_samples:
            tokens = "growing lengths" if lengths.grows else f"{model.seq_length} tokens"
            note(f"--train-tokens {training.train_tokens} ends the run after {samples} samples of {tokens}")
            training = replace(training, train_samples=samples)
    return training


def batch_schedule(
    training: TrainingConfig, seq_length: int, micro_batch_size: int = 1, dp_size: int = 1
) -> BatchSizeSchedule:
    """Schedule of the global batch size. Raises UserError for contradictions."""
    text = training.step_batch_size_schedule
    return BatchSizeSchedule(
        training.global_batch_size,
        micro_batch_size=micro_batch_size,
        dp_size=dp_size,
        rampup=training.rampup_batch_size,
        steps=None if text is None else read_steps(text, seq_length),
    )


def check_batches(training: TrainingConfig, parallel: ParallelConfig, world_size: int, seq_length: int) -> None:
    """Check that global batches divide evenly into micro-batches in this layout; raise UserError otherwise."""
    replicas = parallel.data_parallel_size(world_size)
    divisor = training.micro_batch_size * replicas
    schedule, flag, remedy = batch_schedule(training, seq_length), "", "choose a multiple"
    if training.rampup_batch_size is not None:
        flag = f"--rampup-batch-size {' '.join(map(str, training.rampup_batch_size))}: its batch of"
    elif training.step_batch_size_schedule is not None:
        flag = f"--step-batch-size-schedule {training.step_batch_size_schedule}: its batch of"
        remedy = "choose a multiple, or leave out passed entries (the next entry then begins at 0)"
    for size in schedule.deciding_sizes:
        flag_text = f"{flag or '--global-batch-size'} {size}"
        if size % divisor != 0:
            raise UserError(
                f"{flag_text} is not a multiple of --micro-batch-size {training.micro_batch_size} x {replicas} "
                f"data-parallel replicas = {divisor}; {remedy}"
            )
        if parallel.virtual_pipeline_model_parallel_size is not None and not parallel.in_v_form:
            stages, micro_batches = parallel.pipeline_model_parallel_size, size // divisor
            if micro_batches % stages != 0:
                raise UserError(
                    f"{flag_text} makes {micro_batches} micro-batches, which interleaving "
                    "(--num-layers-per-virtual-pipeline-stage) needs to be a multiple of "
                    f"--pipeline-model-parallel-size {stages}; choose a multiple of {stages * divisor}"
                )
    largest = max(schedule.sizes)
    if largest // divisor > _MAX_MICRO_BATCHES:
        raise UserError(
            f"--global-batch-size {largest} makes {largest // divisor} micro-batches in each replica's step, more "
            f"than {_MAX_MICRO_BATCHES}; raise --micro-batch-size, start more processes, or lower it"
        )


def check_samples(training: TrainingConfig, validation: ValidationConfig, seq_length: int) -> None:
    """Check that the run draws at least a batch and at most ``MAX_DRAWN`` samples; raise UserError otherwise."""
    size, sizes = training.global_batch_size, batch_schedule(training, seq_length).sizes
    iterations = training.train_iters or (training.train_samples or 0) // min(sizes)
    for samples, flags in (
        (iterations * max(sizes), f"--train-iters {iterations} x --global-batch-size {size}"),
        (
            (iterations // validation.eval_interval + 1) * validation.eval_iters * size,
            f"--eval-iters {validation.eval_iters} every --eval-interval {validation.eval_interval} iterations",
        ),
    ):
        if samples > MAX_DRAWN:
            raise UserError(f"{flags}: the run draws {samples:_} samples, more than {MAX_DRAWN:_}; lower one")
    _ = SkippedIterations.parse(training.iterations_to_skip)  # raises for unreadable values
    if training.train_samples is not None and training.train_samples < (first := sizes[0]):
        raise UserError(
            f"--train-samples {training.train_samples} is less than one global batch of {first}; train "
            "longer or lower --global-batch-size"
        )


def no_compile_reason(training: TrainingConfig, parallel: ParallelConfig, model: ModelConfig) -> str | None:
    """Reason that torch.compile cannot compile the layers, with the fix; None if it can."""
    tensor = parallel.tensor_model_parallel_size
    if tensor > 1:
        return (
            f"layers that are split over --tensor-model-parallel-size {tensor} ranks exchange sums, which are not "
            "compiled; leave the flag out, or split the model otherwise"
        )
    if parallel.distributed_backend == "nccl" and model.attention_dropout > 0:
        return (
            f"--attention-dropout {model.attention_dropout:g} seeds a fused CUDA kernel, which is not compiled; "
            "add --attention-dropout 0 or leave the flag out"
        )
    if model.model_type == "deberta":
        return "DeBERTa's layers are not compiled; leave the flag out"
    if parallel.pipeline_schedule in ("zb-h1", "zb-v", "auto") and parallel.pipeline_model_parallel_size > 1:
        return (
            f"compiled layers do not compute weight gradients separately, as --pipeline-schedule "
            f"{parallel.pipeline_schedule} needs; leave one of them out"
        )
    if training.deterministic_mode:
        return "compiled layers may add in another order than --deterministic-mode promises; leave one of them out"
    return None


def can_compile_by_default(training: TrainingConfig, parallel: ParallelConfig, model: ModelConfig) -> bool:
    """Whether ``--compile auto`` compiles the layers where there is a compiler."""
    return parallel.distributed_backend == "nccl" and no_compile_reason(training, parallel, model) is None


def check_compile(training: TrainingConfig, parallel: ParallelConfig, model: ModelConfig) -> None:
    """Check that layers can be compiled with --compile on; raise UserError otherwise."""
    reason = no_compile_reason(training, parallel, model)
    if training.compile == "on" and reason is not None:
        raise UserError(f"--compile on: {reason}")
