"""Checks of batch sizes, of the run's length and of the schedules."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import UserError
from megatron.base.option import is_unset
from megatron.config.run import RunConfig

MOST_DRAWN = 10**14
"""Samples, of any data set; with the tokens of each they fit into 64 bits."""
_MOST_MICRO_BATCHES = 1 << 16


def batch_sizes(config: RunConfig) -> Sequence[int]:
    """All global batch sizes of the run in order: one, or the steps of the ramp-up. Unit: samples.

    Raises UserError for a ramp-up whose steps do not reach the final size.
    """
    training = config.training
    final = training.global_batch_size
    if training.rampup_batch_size is None:
        return [final]
    start, increment, _ = training.rampup_batch_size
    if start < 1 or increment < 1:
        raise UserError(f"--rampup-batch-size {_ramp(config)}: start and increment must be at least 1; correct them")
    if start > final or (final - start) % increment != 0:
        raise UserError(
            f"--rampup-batch-size {_ramp(config)}: from {start} in steps of {increment} it never becomes "
            f"--global-batch-size {final}; choose a start below it and an increment that divides the "
            "difference"
        )
    return range(start, final + 1, increment)


def _ramp(config: RunConfig) -> str:
    return " ".join(map(str, config.training.rampup_batch_size or []))


def check_length(config: RunConfig) -> None:
    """Raise UserError when the run is counted in iterations and in samples, or makes no step at all."""
    training, optimizer = config.training, config.optimizer
    if training.train_iters is not None and training.train_samples is not None:
        raise UserError("--train-iters and --train-samples exclude each other; leave one of them out")
    if training.train_iters is not None:
        foreign = (
            (training.rampup_batch_size is not None, "--rampup-batch-size"),
            (optimizer.lr_decay_samples is not None, "--lr-decay-samples"),
            (optimizer.lr_warmup_samples != 0, "--lr-warmup-samples"),
        )
        for given, flag in foreign:
            if given:
                raise UserError(
                    f"{flag} needs a run counted in samples, but --train-iters is given; use "
                    f"--train-samples, or {_in_iterations(flag)}"
                )
        return
    for given, flag in (
        (optimizer.lr_decay_iters is not None, "--lr-decay-iters"),
        (optimizer.lr_warmup_iters != 0, "--lr-warmup-iters"),
    ):
        if given:
            raise UserError(
                f"{flag} needs a run counted in iterations, but --train-samples is given; use "
                f"{flag.replace('iters', 'samples')}"
            )


def _in_iterations(flag: str) -> str:
    return flag.replace("samples", "iters") if "samples" in flag else "leave it out"


def check_batches(config: RunConfig, world_size: int) -> None:
    """Raise UserError when a global batch does not divide into micro-batches as the layout needs."""
    training, parallel = config.training, config.parallel
    replicas = config.data_parallel_size(world_size)
    together = training.micro_batch_size * replicas
    ramped = training.rampup_batch_size is not None
    sizes = batch_sizes(config)
    for size in sizes[:2]:  # where a batch and the next one divide, so does every one after them
        where = f"--rampup-batch-size {_ramp(config)}: its batch of {size}" if ramped else f"--global-batch-size {size}"
        if size % together != 0:
            raise UserError(
                f"{where} is not a multiple of --micro-batch-size {training.micro_batch_size} x {replicas} "
                f"data-parallel replicas = {together}; choose a multiple"
            )
        if parallel.virtual_pipeline_model_parallel_size is not None:
            stages, micro_batches = parallel.pipeline_model_parallel_size, size // together
            if micro_batches % stages != 0:
                raise UserError(
                    f"{where} makes {micro_batches} micro-batches, which interleaving "
                    "(--num-layers-per-virtual-pipeline-stage) needs to be a multiple of "
                    f"--pipeline-model-parallel-size {stages}; choose a multiple of {stages * together}"
                )
    if sizes[-1] // together > _MOST_MICRO_BATCHES:
        raise UserError(
            f"--global-batch-size {sizes[-1]} makes {sizes[-1] // together} micro-batches of each replica's step, more "
            f"than {_MOST_MICRO_BATCHES}; raise --micro-batch-size, start more processes, or lower it"
        )
    _check_samples(config)
    first = sizes[0]
    if training.train_samples is not None and training.train_samples < first:
        raise UserError(
            f"--train-samples {training.train_samples} is less than one global batch of {first}; train "
            "longer or lower --global-batch-size"
        )


def _check_samples(config: RunConfig) -> None:
    """Raise UserError for a run that draws more samples than can be counted."""
    training, validation = config.training, config.validation
    size = training.global_batch_size
    iterations = training.train_iters or (training.train_samples or 0) // batch_sizes(config)[0]
    for samples, flags in (
        (iterations * size, f"--train-iters {iterations} x --global-batch-size {size}"),
        (
            (iterations // validation.eval_interval + 1) * validation.eval_iters * size,
            f"--eval-iters {validation.eval_iters} every --eval-interval {validation.eval_interval} iterations",
        ),
    ):
        if samples > MOST_DRAWN:
            raise UserError(f"{flags}: the run draws {samples:_} samples, and at most {MOST_DRAWN:_} can be; lower one")


def check_schedules(config: RunConfig) -> None:
    """Raise UserError for learning-rate and weight-decay schedules that contradict themselves."""
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise UserError(f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}; lower it")
    if optimizer.lr_warmup_fraction is not None:
        for value, flag in (
            (optimizer.lr_warmup_iters, "--lr-warmup-iters"),
            (optimizer.lr_warmup_samples, "--lr-warmup-samples"),
            (optimizer.lr_warmup_tokens or 0, "--lr-warmup-tokens"),
        ):
            if value != 0:
                raise UserError(f"--lr-warmup-fraction and {flag} exclude each other; leave one of them out")
    for unit, warmup, decay in (
        ("iters", optimizer.lr_warmup_iters, optimizer.lr_decay_iters),
        ("samples", optimizer.lr_warmup_samples, optimizer.lr_decay_samples),
    ):
        if decay is not None and warmup >= decay:
            raise UserError(
                f"--lr-warmup-{unit} {warmup} is not less than --lr-decay-{unit} {decay} (which defaults to "
                "the run's length); warm up for less or decay for longer"
            )
    if optimizer.weight_decay_incr_style != "constant":
        start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
        if is_unset(start) or is_unset(end):
            raise UserError(
                f"--weight-decay-incr-style {optimizer.weight_decay_incr_style} needs --start-weight-decay "
                "and --end-weight-decay; add them"
            )
        if end < start:
            raise UserError(
                f"--end-weight-decay {end:g} is below --start-weight-decay {start:g}; weight decay can only grow"
            )
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        raise UserError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; "
            "leave one of them out"
        )
