"""Learning-rate and weight-decay schedules: pure functions of the samples consumed.

Every schedule counts in samples: lengths in iterations are multiplied by the global batch size, and lengths in tokens
are divided by the sequence length, without rounding. If the decay of the learning rate is given in tokens, a sample of
half the sequence length counts as half a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from megatron.base.errors import UserError
from megatron.config.optimizer import OptimizerConfig

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
ANNEALING_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")

OnMismatch = Literal["refuse", "command-line", "checkpoint"]


@dataclass(frozen=True)
class ScheduleValues:
    """The parameters of both schedules. Lengths are in samples (fractions of a sample are allowed).

    With ``WSD``, the learning rate is constant after the warm-up and decays in the last ``annealing_samples`` of
    ``decay_samples``.
    ``decoupled_lr`` and ``decoupled_min_lr``, unless None, replace ``max_lr`` and ``min_lr`` for input embeddings and
    the output layer.
    """

    max_lr: float
    min_lr: float
    warmup_samples: float
    decay_samples: float
    decay_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_samples: float
    weight_decay_style: str
    warmup_init: float = 0.0
    annealing_style: str = "exponential"
    annealing_samples: float = 0.0
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None

    def __post_init__(self) -> None:
        _check_choice("--lr-decay-style", self.decay_style, DECAY_STYLES)
        _check_choice("--weight-decay-incr-style", self.weight_decay_style, WEIGHT_DECAY_STYLES)
        rates = [("--lr", self.max_lr, "--min-lr", self.min_lr)]
        if self.decoupled_lr is not None:
            low = "--min-lr" if self.decoupled_min_lr is None else "--decoupled-min-lr"
            rates.append(("--decoupled-lr", self.decoupled_rates[0], low, self.decoupled_rates[1]))
        elif self.decoupled_min_lr is not None:
            raise UserError(f"--decoupled-min-lr {self.decoupled_min_lr:g} needs --decoupled-lr; add it")
        for high, highest, low, lowest in rates:
            for flag, value in ((low, lowest), ("--lr-warmup-init", self.warmup_init)):
                if not 0 <= value <= highest:
                    raise UserError(f"{flag} {value:g} must lie between 0 and {high} {highest:g}")
        if self.decay_samples <= 0:
            raise UserError(f"the decay length is {self.decay_samples:g} samples: give a positive --lr-decay-*")
        if not 0 <= self.warmup_samples < self.decay_samples:
            raise UserError(
                f"the warm-up ({self.warmup_samples:g} samples) must be shorter than the decay length "
                f"({self.decay_samples:g} samples): lower --lr-warmup-* or raise --lr-decay-*"
            )
        _check_choice("--lr-wsd-decay-style", self.annealing_style, ANNEALING_STYLES)
        longest = self.decay_samples - self.warmup_samples
        if self.decay_style == "WSD" and not 0 < self.annealing_samples <= longest:
            raise UserError(
                f"--lr-wsd-decay-*: the decay of WSD takes {self.annealing_samples:g} samples; give more than 0, and "
                f"no more than the {longest:g} after the warm-up"
            )
        if not 0 <= self.start_weight_decay <= self.end_weight_decay:
            raise UserError(
                f"--start-weight-decay {self.start_weight_decay:g} must lie between 0 and "
                f"--end-weight-decay {self.end_weight_decay:g}"
            )
        if self.weight_decay_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            raise UserError("--start-weight-decay and --end-weight-decay differ: add --weight-decay-incr-style linear")

    def lr_at(self, samples: float) -> float:
        """Learning rate after ``samples`` consumed samples: linear warm-up, then the decay style."""
        return self._rate(samples, self.max_lr, self.min_lr)

    def decoupled_lr_at(self, samples: float) -> float:
        """Learning rate of input embeddings and the output layer after ``samples`` consumed samples."""
        return self._rate(samples, *self.decoupled_rates)

    @property
    def decoupled_rates(self) -> tuple[float, float]:
        """Highest and lowest learning rate of input embeddings and the output layer."""
        highest = self.max_lr if self.decoupled_lr is None else self.decoupled_lr
        return highest, self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr

    def _rate(self, samples: float, highest: float, lowest: float) -> float:
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.warmup_init + (highest - self.warmup_init) * samples / self.warmup_samples
        if self.decay_style == "constant":
            return highest
        if samples > self.decay_samples:
            return lowest
        if self.decay_style == "inverse-square-root":
            return max(lowest, highest * math.sqrt(max(self.warmup_samples, 1) / max(samples, 1)))
        if self.decay_style == "WSD":
            ratio = max(1.0 - (self.decay_samples - samples) / self.annealing_samples, 0.0)
            if self.annealing_style == "exponential":
                share = 2.0 * 0.5**ratio - 1.0
            elif self.annealing_style == "minus_sqrt":
                share = 1.0 - math.sqrt(ratio)
            else:
                share = 1.0 - _ramp(self.annealing_style, ratio)
            return lowest + share * (highest - lowest)
        ratio = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        return lowest + (1.0 - _ramp(self.decay_style, ratio)) * (highest - lowest)

    def weight_decay_at(self, samples: int) -> float:
        """Weight decay after ``samples`` consumed samples: from the start value to the end value."""
        if self.weight_decay_style == "constant" or samples > self.weight_decay_samples:
            return self.end_weight_decay
        ratio = samples / self.weight_decay_samples
        gap = self.end_weight_decay - self.start_weight_decay
        return self.start_weight_decay + _ramp(self.weight_decay_style, ratio) * gap


def _ramp(style: str, ratio: float) -> float:
    """A ramp from 0 to 1 as ``ratio`` goes from 0 to 1."""
    return ratio if style == "linear" else 0.5 * (1.0 - math.cos(math.pi * ratio))


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{flag} {value!r} is unknown: choose one of {', '.join(choices)}")


_FLAG_OF_FIELD = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "warmup_samples": "--lr-warmup-*",
    "decay_samples": "--lr-decay-* or the length of the run",
    "decay_style": "--lr-decay-style",
    "start_weight_decay": "--start-weight-decay or --weight-decay",
    "end_weight_decay": "--end-weight-decay or --weight-decay",
    "weight_decay_samples": "the length of the run, over which weight decay grows",
    "weight_decay_style": "--weight-decay-incr-style",
    "warmup_init": "--lr-warmup-init",
    "annealing_style": "--lr-wsd-decay-style",
    "annealing_samples": "--lr-wsd-decay-*",
    "decoupled_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
}
_OPTIONAL = {"decoupled_lr": None, "decoupled_min_lr": None}
"""Values that may be None."""
_DEFAULTS = {"warmup_init": 0.0, "annealing_style": "exponential", "annealing_samples": 0.0, **_OPTIONAL}
"""Defaults for checkpoints without these values."""
_FIELD_TYPES: dict[str, type] = {name: str if name.endswith("_style") else float for name in _FLAG_OF_FIELD}
_REMEDY = (
    "add --override-opt_param-scheduler to take the command line's, "
    "or --use-checkpoint-opt_param-scheduler to take the checkpoint's"
)


class StepRates(NamedTuple):
    """Rates of a step: learning rate, weight decay, and the learning rate of input embeddings and the output layer if
    it differs."""

    lr: float
    weight_decay: float
    decoupled_lr: float | None


class LRSchedule:
    """The schedules at a position: the samples consumed by optimizer steps that were not skipped.

    Args:
        values: the parameters of the schedules.
        on_mismatch: reaction to a checkpoint with other values: refuse it (as Megatron does), take the command line's
            (``--override-opt_param-scheduler``), or the checkpoint's (``--use-checkpoint-opt_param-scheduler``).
        overrides: names of values for which the command line always wins (``--use-new-lr``, ``--use-new-min-lr``).
        tokens_per_sample: the full sequence length, if the learning rate counts by tokens; else None.
    """

    def __init__(
        self,
        values: ScheduleValues,
        on_mismatch: OnMismatch = "refuse",
        overrides: Sequence[str] = (),
        tokens_per_sample: int | None = None,
    ) -> None:
        self.values = values
        self.on_mismatch = on_mismatch
        self.overrides = tuple(overrides)
        self.tokens_per_sample = tokens_per_sample
        self.consumed_samples = 0
        self.consumed_tokens = 0

    @classmethod
    def from_options(
        cls,
        options: OptimizerConfig,
        *,
        global_batch_size: int,
        seq_length: int,
        train_iters: int | None = None,
        train_samples: int | None = None,
        train_tokens: int | None = None,
    ) -> LRSchedule:
        """Build from the optimizer's section of a resolved configuration.

        Args:
            options: the optimizer's section.
            global_batch_size: samples per step; the final size of a ramp-up.
            seq_length: tokens of a sample.
            train_iters, train_samples, train_tokens: length of the run, the default length of the decay. With
                ``train_samples``, or only ``train_tokens``, the schedules' lengths in iterations are ignored; with
                ``train_iters``, those in samples. Lengths in tokens take precedence over both.

        Raises:
            UserError: when no length is given, the lengths do not fit each other, or two flags contradict each other.
        """
        if options.override_opt_param_scheduler and options.use_checkpoint_opt_param_scheduler:
            raise UserError("--override-opt_param-scheduler contradicts --use-checkpoint-opt_param-scheduler: give one")
        on_mismatch: OnMismatch = "refuse"
        if options.override_opt_param_scheduler:
            on_mismatch = "command-line"
        elif options.use_checkpoint_opt_param_scheduler:
            on_mismatch = "checkpoint"
        if train_samples is None and train_iters is None and train_tokens is not None:
            train_samples = train_tokens // seq_length
        decay: float
        warmup: float
        if train_samples is not None:
            total = train_samples
            decay = total if options.lr_decay_samples is None else options.lr_decay_samples
            warmup = options.lr_warmup_samples
            annealing = options.lr_wsd_decay_samples or 0
        elif train_iters is not None:
            total = train_iters * global_batch_size
            decay = total if options.lr_decay_iters is None else options.lr_decay_iters * global_batch_size
            warmup = options.lr_warmup_iters * global_batch_size
            annealing = (options.lr_wsd_decay_iters or 0) * global_batch_size
        else:
            raise UserError("the length of the run is missing: give --train-iters or --train-samples")
        if options.lr_decay_tokens is not None:
            decay = options.lr_decay_tokens / seq_length
        if options.lr_warmup_tokens is not None:
            warmup = options.lr_warmup_tokens / seq_length
        fraction = options.lr_warmup_fraction
        values = ScheduleValues(
            max_lr=options.lr,
            min_lr=options.min_lr,
            warmup_samples=float(warmup if fraction is None else fraction * decay),
            decay_samples=float(decay),
            decay_style=options.lr_decay_style,
            start_weight_decay=options.start_weight_decay,
            end_weight_decay=options.end_weight_decay,
            weight_decay_samples=float(total),
            weight_decay_style=options.weight_decay_incr_style,
            warmup_init=options.lr_warmup_init,
            annealing_style=options.lr_wsd_decay_style,
            annealing_samples=float(annealing),
            decoupled_lr=options.decoupled_lr,
            decoupled_min_lr=options.decoupled_min_lr,
        )
        overrides = [
            *["max_lr", "decoupled_lr"] * options.use_new_lr,
            *["min_lr", "decoupled_min_lr"] * options.use_new_min_lr,
        ]
        by_tokens = options.lr_decay_tokens is not None
        return cls(values, on_mismatch, overrides, seq_length if by_tokens else None)

    @property
    def _lr_position(self) -> float:
        """Samples, possibly counted by their tokens, that learning rates depend on."""
        if self.tokens_per_sample is not None:
            return self.consumed_tokens / self.tokens_per_sample
        return self.consumed_samples

    @property
    def lr(self) -> float:
        return self.values.lr_at(self._lr_position)

    @property
    def rates(self) -> StepRates:
        """The rates of the next step."""
        decoupled = None if self.values.decoupled_lr is None else self.values.decoupled_lr_at(self._lr_position)
        return StepRates(self.lr, self.weight_decay, decoupled)

    @property
    def weight_decay(self) -> float:
        return self.values.weight_decay_at(self.consumed_samples)

    def step(self, samples: int, tokens: int | None = None) -> None:
        """Advance by the samples of an optimizer step, and their tokens (None: full samples). Do not call it for a
        skipped step."""
        self.consumed_samples += samples
        self.consumed_tokens += samples * (self.tokens_per_sample or 0) if tokens is None else tokens

    def state_dict(self) -> dict[str, Any]:
        """The position and the values, as plain numbers and strings."""
        values = {field.name: getattr(self.values, field.name) for field in fields(self.values)}
        tokens = {} if self.tokens_per_sample is None else {"consumed_tokens": self.consumed_tokens}
        return {"consumed_samples": self.consumed_samples, **tokens, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position, and resolve differing values by ``on_mismatch``.

        Raises:
            UserError: when values differ and no flag resolves it (the message names it), or the state is incomplete.
        """
        try:
            position = int(state["consumed_samples"])
            # A checkpoint without this entry had full samples.
            tokens = int(state.get("consumed_tokens", position * (self.tokens_per_sample or 0)))
            if position < 0 or tokens < 0:
                raise ValueError(f"consumed_samples is {position}, consumed_tokens {tokens}")
            entries = {**_DEFAULTS, **state}
            present_names = _FIELD_TYPES.keys() - {name for name in _OPTIONAL if entries[name] is None}
            saved_fields: dict[str, Any] = {name: _FIELD_TYPES[name](entries[name]) for name in present_names}
            saved = ScheduleValues(**saved_fields)
            if not all(math.isfinite(value) for value in vars(saved).values() if isinstance(value, float)):
                raise ValueError("a value is not finite")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"the checkpoint's learning-rate schedule cannot be read ({error}): use --finetune"
            ) from error
        if self.on_mismatch == "checkpoint":
            self.values = replace(saved, **{name: getattr(self.values, name) for name in self.overrides})
        elif self.on_mismatch == "refuse":
            for name in self._relevant_fields():
                own_value, saved_value = getattr(self.values, name), getattr(saved, name)
                if own_value != saved_value:
                    raise UserError(
                        f"{_FLAG_OF_FIELD[name]}: {name} is {own_value} on the command line "
                        f"and {saved_value} in the checkpoint; {_REMEDY}"
                    )
        self.consumed_samples, self.consumed_tokens = position, tokens

    def _relevant_fields(self) -> list[str]:
        """Fields that must agree with a checkpoint's: those that affect the schedules, without ``overrides``. A
        constant schedule has no length, so its run can be prolonged freely."""
        irrelevant_fields = set(self.overrides)
        if self.values.decay_style == "constant":
            irrelevant_fields |= {"decay_samples", "min_lr", "decoupled_min_lr"}
        if self.values.decay_style != "WSD":
            irrelevant_fields |= {"annealing_style", "annealing_samples"}
        if self.values.warmup_samples == 0:
            irrelevant_fields |= {"warmup_init"}
        if self.values.weight_decay_style == "constant":
            irrelevant_fields |= {"weight_decay_samples"}
        # Styles come first: when they differ, that is the message to read.
        names = sorted(_FIELD_TYPES, key=lambda name: not name.endswith("_style"))
        return [name for name in names if name not in irrelevant_fields]
