"""Optimizer and schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.base.errors import UserError
from megatron.base.option import Condition, derived, is_unset, option, required
from megatron.base.user_text import Note, flag_of
from megatron.config.conditions import unless, when
from megatron.config.training import TrainingConfig

_ADAM = (when("optimizer.optimizer", "adam", "muon"),)
_MUON = (when("optimizer.optimizer", "muon"),)
_LAMB = (when("optimizer.optimizer", "lamb"),)
_WSD = (when("optimizer.lr_decay_style", "WSD"),)
_WARM_UP = Condition(lambda run, _: run.optimizer.warms_up, "there is no warm-up (--lr-warmup-iters and the like)")
_DECAY_LENGTH = Condition(
    lambda run, _: run.optimizer.lr_decay_style != "constant" or run.optimizer.lr_warmup_fraction is not None,
    "with --lr-decay-style constant",
)
_LOADED_SCHEDULE = Condition(
    lambda run, _: run.checkpoint.resumes and not run.checkpoint.no_load_lr_state,
    "no schedule is loaded (--load without --finetune and --no-load-lr-state does that)",
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedules. Decay and warm-up are counted like the run: in iterations or in samples."""

    optimizer: Literal["adam", "sgd", "lamb", "muon"] = option(
        "adam",
        "adam is AdamW (decoupled weight decay); lamb multiplies its direction, for each matrix, by the ratio of "
        "the weights' norm to the direction's; muon orthogonalizes the momentum of the layers' matrices, and is "
        "AdamW for everything else.",
        common="learning rate",
    )
    lr: float = required("Peak learning rate.", minimum=0, maximum=1e4, common="learning rate")
    min_lr: float = option(
        0.0,
        "Minimum learning rate of the decay.",
        minimum=0,
        only_if=(unless("optimizer.lr_decay_style", "constant"),),
        common="learning rate",
    )
    decoupled_lr: float | None = derived(
        "--lr",
        "Peak learning rate of the input embeddings and the output layer; warm-up and decay are as for --lr.",
        minimum=0,
        maximum=1e4,
    )
    decoupled_min_lr: float | None = derived(
        "--min-lr",
        "Minimum learning rate of the decay of --decoupled-lr.",
        minimum=0,
        only_if=(unless("optimizer.lr_decay_style", "constant"),),
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "linear",
        "Shape of the decay after the warm-up; WSD (warm-up, stable, decay) is constant until the last "
        "--lr-wsd-decay-iters or --lr-wsd-decay-samples.",
        common="learning rate",
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "exponential",
        "Shape of the decay of --lr-decay-style WSD.",
        only_if=_WSD,
    )
    lr_wsd_decay_iters: int | None = derived(
        "unused",
        "Length of the decay of --lr-decay-style WSD.",
        unit="iterations",
        minimum=1,
        only_if=_WSD,
    )
    lr_wsd_decay_samples: int | None = derived(
        "unused",
        "Length of the decay of --lr-decay-style WSD.",
        unit="samples",
        minimum=1,
        only_if=_WSD,
    )
    lr_decay_iters: int | None = derived(
        "--train-iters",
        "Total length of warm-up and decay.",
        unit="iterations",
        minimum=1,
        only_if=(_DECAY_LENGTH,),
    )
    lr_decay_samples: int | None = derived(
        "--train-samples",
        "Total length of warm-up and decay.",
        unit="samples",
        minimum=1,
        only_if=(_DECAY_LENGTH,),
    )
    lr_decay_tokens: int | None = derived(
        "unused",
        "Total length of warm-up and decay. Needs --train-samples or --train-tokens.",
        unit="tokens",
        minimum=1,
        only_if=(_DECAY_LENGTH,),
    )
    lr_warmup_fraction: float | None = derived(
        "unused", "Warm-up as a share of the decay's length.", minimum=0, below=1, common="learning rate"
    )
    lr_warmup_iters: int = option(
        0, "Length of the linear warm-up.", unit="iterations", minimum=0, common="learning rate"
    )
    lr_warmup_samples: int = option(0, "Length of the linear warm-up.", unit="samples", minimum=0)
    lr_warmup_tokens: int | None = derived(
        "unused",
        "Length of the linear warm-up. Needs --train-samples or --train-tokens.",
        unit="tokens",
        minimum=0,
    )
    lr_warmup_init: float = option(0.0, "Learning rate at the start of the warm-up.", minimum=0, only_if=(_WARM_UP,))
    weight_decay: float = option(
        0.01,
        "Weight decay; biases and norms have none.",
        minimum=0,
        only_if=(when("optimizer.weight_decay_incr_style", "constant"),),
        common="learning rate",
    )
    start_weight_decay: float = derived(
        "--weight-decay", "Weight decay at the start, if it grows over the run.", minimum=0
    )
    end_weight_decay: float = derived("--weight-decay", "Weight decay at the end, if it grows over the run.", minimum=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "constant",
        "How weight decay grows over the run.",
    )
    clip_grad: float = option(
        1.0, "Gradients are clipped to this global norm; 0 turns clipping off.", minimum=0, common="learning rate"
    )
    adam_beta1: float = option(0.9, "Decay of Adam's first moment.", minimum=0, below=1, only_if=_ADAM)
    adam_beta2: float = option(
        0.999, "Decay of Adam's second moment.", minimum=0, below=1, only_if=_ADAM, common="learning rate"
    )
    adam_eps: float = option(1e-8, "Adam's epsilon, added to the root of the second moment.", above=0, only_if=_ADAM)
    lamb_beta1: float = option(0.9, "Decay of LAMB's first moment.", minimum=0, below=1, only_if=_LAMB)
    lamb_beta2: float = option(0.9, "Decay of LAMB's second moment.", minimum=0, below=1, only_if=_LAMB)
    lamb_eps: float = option(1e-8, "LAMB's epsilon, added to the root of the second moment.", above=0, only_if=_LAMB)
    sgd_momentum: float = option(
        0.9, "Momentum of --optimizer sgd.", minimum=0, below=1, only_if=(when("optimizer.optimizer", "sgd"),)
    )
    muon_momentum: float = option(0.95, "Decay of Muon's momentum.", minimum=0, below=1, only_if=_MUON)
    muon_nesterov: bool = option(
        True, "Muon without Nesterov's momentum.", flag="no-muon-nesterov", off_switch=True, only_if=_MUON
    )
    muon_num_ns_steps: int = option(
        5,
        "Newton-Schulz iterations that orthogonalize a matrix.",
        aliases=("muon-ns-steps",),
        unit="iterations",
        minimum=1,
        maximum=100,
        only_if=_MUON,
    )
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = option(
        "spectral",
        "Scale of an orthogonalized matrix, which multiplies --lr: the square root of its larger side "
        "(spectral), of rows over columns but at least 1 (shape_scaling), or of rows over columns "
        "(unit_rms_norm).",
        only_if=_MUON,
    )
    muon_extra_scale_factor: float = option(
        0.2,
        "Additional factor of that scale. 0.2 with spectral makes updates as large as AdamW's, so that one --lr "
        "and one --weight-decay suit all parameters; Megatron-Core's default is 1.",
        above=0,
        only_if=_MUON,
    )
    muon_split_qkv: bool = option(
        True,
        "Orthogonalize the fused projection of queries, keys and values as one matrix, instead of separately.",
        flag="muon-no-split-qkv",
        off_switch=True,
        only_if=_MUON,
    )
    muon_fp32_matmul_prec: Literal["medium", "highest"] | None = derived(
        "medium with --bf16 or --fp16, else highest",
        "Precision of the Newton-Schulz iterations: bf16, or that of the optimizer's values.",
        only_if=_MUON,
    )
    use_apex: bool = option(
        False,
        "Use apex's FusedAdam; apex must be installed.",
        only_if=(when("optimizer.optimizer", "adam"),),
    )
    override_opt_param_scheduler: bool = option(
        False,
        "When resuming, take the schedules from the flags instead of from the checkpoint.",
        aliases=("override-lr-scheduler",),
        only_if=(_LOADED_SCHEDULE,),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "When resuming, take the schedules from the checkpoint, whatever the flags say.",
        aliases=("use-checkpoint-lr-scheduler",),
        only_if=(_LOADED_SCHEDULE,),
    )
    use_new_lr: bool = option(
        False,
        "When resuming, take --lr and --decoupled-lr from the flags, whatever the checkpoint says.",
        only_if=(_LOADED_SCHEDULE,),
    )
    use_new_min_lr: bool = option(
        False,
        "When resuming, take --min-lr and --decoupled-min-lr from the flags, whatever the checkpoint says.",
        only_if=(_LOADED_SCHEDULE,),
    )

    @property
    def warms_up(self) -> bool:
        """Whether the learning rate warms up."""
        lengths = (self.lr_warmup_fraction, self.lr_warmup_iters, self.lr_warmup_samples, self.lr_warmup_tokens)
        return any(lengths)


def check_lengths(training: TrainingConfig, optimizer: OptimizerConfig, curriculum: bool) -> None:
    """Check that lengths are in the unit of the run, iterations or samples; raise UserError otherwise.

    With a curriculum, which varies the sequence length, warm-up and decay must also be in the same unit.
    """
    if training.train_iters is not None and training.train_samples is not None:
        raise UserError("--train-iters and --train-samples exclude each other; leave one of them out")
    if training.train_iters is not None:
        sample_flags = (
            (training.rampup_batch_size is not None, "--rampup-batch-size"),
            (training.step_batch_size_schedule is not None, "--step-batch-size-schedule"),
            (optimizer.lr_decay_samples is not None, "--lr-decay-samples"),
            (optimizer.lr_warmup_samples != 0, "--lr-warmup-samples"),
            (optimizer.lr_wsd_decay_samples is not None, "--lr-wsd-decay-samples"),
        )
        for is_set, flag in sample_flags:
            if is_set:
                instead = flag.replace("samples", "iters") if "samples" in flag else "leave it out"
                raise UserError(
                    f"{flag} needs a run counted in samples, but --train-iters is given; use --train-samples, or "
                    f"{instead}"
                )
    else:
        for is_set, flag in (
            (optimizer.lr_decay_iters is not None, "--lr-decay-iters"),
            (optimizer.lr_warmup_iters != 0, "--lr-warmup-iters"),
            (optimizer.lr_wsd_decay_iters is not None, "--lr-wsd-decay-iters"),
        ):
            if is_set:
                raise UserError(
                    f"{flag} needs a run counted in iterations, but --train-samples is given; use "
                    f"{flag.replace('iters', 'samples')}"
                )
    # The two units diverge if the sequence length varies.
    warmup_tokens, decay_tokens = optimizer.lr_warmup_tokens, optimizer.lr_decay_tokens
    if curriculum and warmup_tokens is not None and decay_tokens is None:
        raise UserError(
            "--lr-warmup-tokens with --curriculum-learning, whose samples differ in their tokens, needs a decay in "
            "tokens; add --lr-decay-tokens"
        )
    if curriculum and decay_tokens is not None and warmup_tokens is None and optimizer.lr_warmup_samples:
        raise UserError(
            "--lr-decay-tokens with --curriculum-learning, whose samples differ in their tokens, needs a warm-up in "
            "tokens; use --lr-warmup-tokens in place of --lr-warmup-samples"
        )


def resolve_optimizer(
    optimizer: OptimizerConfig, training: TrainingConfig, seq_length: int, note: Note
) -> OptimizerConfig:
    """Fill the lengths of the schedules. Raises UserError if they contradict the length of the run."""
    for tokens_name, samples_name, unset in (
        ("lr_decay_tokens", "lr_decay_samples", None),
        ("lr_warmup_tokens", "lr_warmup_samples", 0),
    ):
        tokens = getattr(optimizer, tokens_name)
        if tokens is None:
            continue
        flag, other = flag_of(tokens_name), flag_of(samples_name)
        if training.train_samples is None:
            instead = other.replace("samples", "iters")
            raise UserError(f"{flag} needs a run counted in samples; give --train-samples or {instead}")
        # Older checkpoints also contain the samples, rounded down to whole sequences.
        if getattr(optimizer, samples_name) not in (unset, tokens // seq_length):
            raise UserError(f"{flag} and {other} exclude each other; leave one of them out")
        note(f"{flag} {tokens} is taken as {tokens / seq_length:.10g} samples of {seq_length} tokens")
        samples: dict[str, Any] = {samples_name: unset}
        optimizer = replace(optimizer, **samples)
    if training.train_iters is not None and optimizer.lr_decay_iters is None:
        optimizer = replace(optimizer, lr_decay_iters=training.train_iters)
    if training.train_samples is not None and (optimizer.lr_decay_samples, optimizer.lr_decay_tokens) == (None, None):
        optimizer = replace(optimizer, lr_decay_samples=training.train_samples)
    if optimizer.weight_decay_incr_style == "constant":
        for value, flag in (
            (optimizer.start_weight_decay, "--start-weight-decay"),
            (optimizer.end_weight_decay, "--end-weight-decay"),
        ):
            if value not in (None, optimizer.weight_decay):
                raise UserError(f"{flag} needs a growing weight decay; add --weight-decay-incr-style linear or cosine")
        optimizer = replace(
            optimizer, start_weight_decay=optimizer.weight_decay, end_weight_decay=optimizer.weight_decay
        )
    return optimizer


def check_schedules(optimizer: OptimizerConfig) -> None:
    """Check the learning-rate and weight-decay schedules; raise UserError for contradictions."""
    if optimizer.decoupled_min_lr is not None and optimizer.decoupled_lr is None:
        raise UserError("--decoupled-min-lr needs --decoupled-lr; add it or leave the flag out")
    for high, low, remedy in (
        ("lr", "min_lr", "lower it"),
        ("lr", "lr_warmup_init", "lower it"),
        ("decoupled_lr", "decoupled_min_lr", "lower it"),
        ("decoupled_lr", "lr_warmup_init", "lower it"),
        ("decoupled_lr", "min_lr", "add --decoupled-min-lr"),
    ):
        highest, lowest = getattr(optimizer, high), getattr(optimizer, low)
        if (high, low) == ("decoupled_lr", "min_lr") and optimizer.decoupled_min_lr is not None:
            continue
        if highest is not None and lowest is not None and lowest > highest:
            flags = [flag_of(name) for name in (low, high)]
            raise UserError(f"{flags[0]} {lowest:g} is above {flags[1]} {highest:g}; {remedy}")
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
        ("tokens", optimizer.lr_warmup_tokens or 0, optimizer.lr_decay_tokens),
    ):
        if decay is not None and warmup >= decay:
            raise UserError(
                f"--lr-warmup-{unit} {warmup} is not less than --lr-decay-{unit} {decay} (which defaults to "
                "the run's length); warm up for less or decay for longer"
            )
    lengths = (optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples)
    if optimizer.lr_decay_style == "WSD" and lengths == (None, None):
        raise UserError(
            "--lr-decay-style WSD needs the length of its decay; add --lr-wsd-decay-iters, or --lr-wsd-decay-samples "
            "in a run counted in samples"
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
