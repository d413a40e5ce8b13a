"""Configuration of a training run: all sections, with their derived values and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.base.documents import dump_yaml, parse_yaml
from megatron.base.errors import UserError
from megatron.base.fields import check_fields, missing_flags, section_from_plain
from megatron.base.option import field_options
from megatron.base.parse_numbers import MAX_SIZE
from megatron.base.user_text import nearest
from megatron.compression.points import Point
from megatron.config.check_experts import check_upcycling
from megatron.config.check_model import check_model
from megatron.config.check_parallel import check_delay, check_flush, check_layout, check_parallel, check_torch_ddp
from megatron.config.checkpoint import CheckpointConfig, check_checkpoint, resolve_checkpoint
from megatron.config.compression import CompressionConfig
from megatron.config.curriculum import CurriculumConfig, check_curriculum, lengths_of
from megatron.config.data import DataConfig, check_data
from megatron.config.islands import IslandsConfig, check_islands
from megatron.config.logs import LoggingConfig, check_logs
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, check_lengths, check_schedules, resolve_optimizer
from megatron.config.parallel import ParallelConfig, resolve_parallel
from megatron.config.precision import PrecisionConfig, check_fp8, check_precision
from megatron.config.recompute import RecomputeConfig, check_recompute, resolve_recompute
from megatron.config.resolve_model import resolve_model
from megatron.config.tokenizer import TokenizerConfig, check_tokenizer
from megatron.config.training import TrainingConfig, check_batches, check_compile, check_samples, resolve_training
from megatron.config.translate.known import RETIRED_FIELDS
from megatron.config.validation import ValidationConfig
from megatron.config.vocabulary import check_vocabulary


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a run. Immutable: use `dataclasses.replace` to change a section.

    `resolve` fills the derived values. Engines require a resolved configuration.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)

    def resolve(self, world_size: int, *, cuda_available: bool = False, notes: list[str] | None = None) -> RunConfig:
        """Return a copy with all derived values, checked for `world_size` processes.

        Automatic choices are appended to `notes`, a line each. Resolving a configuration again with the same world
        size changes nothing. Raises a UserError of a single line, with the flags and the fix, for values that are
        impossible or contradict each other.
        """
        from megatron.config.check_compression import check_compression  # imports torch; parsing flags must not

        lines = [] if notes is None else notes

        def note(line: str) -> None:
            if line not in lines:
                lines.append(line)

        if world_size < 1:
            raise UserError(f"the world size is {world_size}; start at least one process")
        config = replace(self, tokenizer=self.tokenizer.with_type())
        if config.tokenizer != self.tokenizer:
            note(f"--vocab-file with --merge-file means --tokenizer-type {config.tokenizer.tokenizer_type}")
        missing = [flag for name in run_sections() for flag in missing_flags(name, getattr(config, name))]
        training = config.training
        if training.train_iters is None and training.train_samples is None and training.train_tokens is None:
            missing.append("one of --train-iters, --train-samples and --train-tokens")
        if config.model.model_type == "t5" and config.model.decoder_seq_length is None:
            missing.append("--decoder-seq-length")
        if config.tokenizer.tokenizer_type is None and config.tokenizer.vocab_size is None:
            missing.append("--tokenizer-type (or --vocab-size)")
        if missing:
            advice = f"add {'it' if len(missing) == 1 else 'them'}"
            raise UserError(f"not given but required: {', '.join(missing)}; {advice}")
        for section in run_sections():
            check_fields(section, getattr(config, section))
        precision, tokenizer = config.precision, config.tokenizer
        model = resolve_model(config.model)
        check_model(model)
        check_precision(precision, config.parallel.accumulate_allreduce_grads_in_fp32)
        check_layout(config.parallel, model, world_size)
        if tokenizer.vocab_size is not None and tokenizer.tokenizer_type in (None, "NullTokenizer"):
            end = tokenizer.tokenizer_type is not None  # this tokenizer adds an end-of-document entry
            check_vocabulary(
                tokenizer.vocab_size + end,
                model.make_vocab_size_divisible_by,
                config.parallel.tensor_model_parallel_size,
            )
        parallel = resolve_parallel(config.parallel, model, precision, cuda_available, note)
        lengths = lengths_of(config.curriculum, model.seq_length)
        training = resolve_training(
            config.training, model, parallel, lengths, world_size * config.islands.islands, note
        )
        check_lengths(training, config.optimizer, config.curriculum.curriculum_learning)
        run = replace(
            config,
            model=model,
            parallel=parallel,
            recompute=resolve_recompute(config.recompute),
            training=training,
            optimizer=resolve_optimizer(config.optimizer, training, model.seq_length, note),
            checkpoint=resolve_checkpoint(config.checkpoint, config.compression.is_auto, note),
        )
        check_parallel(run.parallel, cuda_available)
        check_fp8(run.precision, run.parallel.distributed_backend == "nccl")
        check_recompute(run.recompute, run.parallel, run.model)
        check_compile(run.training, run.parallel, run.model)
        check_torch_ddp(run.parallel, run.precision)
        check_batches(run.training, run.parallel, world_size * run.islands.islands, run.model.seq_length)
        check_samples(run.training, run.validation, run.model.seq_length)
        check_curriculum(run.curriculum, run.model, run.parallel)
        check_schedules(run.optimizer)
        check_data(run.data, skip_train=run.validation.skip_train)
        check_tokenizer(run.tokenizer, run.model.model_type)
        check_logs(run.logging, run.parallel)
        check_checkpoint(run.checkpoint)
        if run.checkpoint.moe_use_upcycling:
            check_upcycling(run.model)
        settings = {name: value for section in run.to_dict().values() for name, value in section.items()}
        specs = check_compression(run.compression, run.model, run.parallel, run.training, settings, world_size, note)
        check_islands(run.islands, run.parallel, run.training, run.model, specs)
        gather, gradients = specs.get(Point.PARAM_GATHER), specs.get(Point.DP_GRAD)
        check_delay(
            run.parallel,
            run.islands.several or Point.OUTER in specs,
            gather is not None and not gather.identity,
            run.optimizer.clip_grad > 0
            and run.parallel.data_parallel_size(world_size) > 1
            and gradients is not None
            and gradients.make_rounds().traits.clips_first,
        )
        check_flush(
            run.parallel,
            run.model.has_experts,
            any(spec.activation.epilogue for spec in specs.values()),
        )
        return run

    def replicas(self, world_size: int) -> int:
        """Number of data-parallel replicas over all islands, each with `world_size` processes."""
        return self.parallel.data_parallel_size(world_size) * self.islands.islands

    @property
    def masks_labels(self) -> bool:
        """Whether a loss mask may exclude labels in training; False only for GPT without --eod-mask-loss."""
        return self.data.eod_mask_loss or self.model.model_type != "gpt" or not self.model.predicts_words

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections as dictionaries of plain types (str, int, float, bool, list, None)."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: object, location: str = "configuration") -> RunConfig:
        """Inverse of `to_dict`. Missing sections and fields take their defaults.

        Raises UserError starting with `location` for an unknown name or a value of the wrong type.
        """
        sections = run_sections()
        if not isinstance(values, dict):
            raise UserError(f"{location}: expected sections ({', '.join(sections)}), not a {type(values).__name__}")
        section_values = {}
        for name, content in values.items():
            if name not in sections:
                raise UserError(f"{location}: unknown section {name}{nearest(str(name), list(sections))}")
            if not isinstance(content, dict):
                raise UserError(f"{location}: section {name} must hold names and values")
            current_values = {key: value for key, value in content.items() if f"{name}.{key}" not in RETIRED_FIELDS}
            section_values[name] = section_from_plain(name, sections[name], current_values, location)
        return cls(**section_values)

    def to_yaml(self) -> str:
        """YAML text with a block per section, as read by `--config` and `from_yaml`."""
        return dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, text: str, location: str = "configuration") -> RunConfig:
        """Inverse of `to_yaml`. Raises UserError starting with `location` for invalid text."""
        return cls.from_dict(parse_yaml(text, location), location)

    def describe(self, *, defaults: bool = True) -> str:
        """Table of the values by section, for the log; without `defaults`, only non-default values."""
        sections = (describe_section(name, getattr(self, name), defaults=defaults) for name in run_sections())
        return "\n".join(filter(None, sections))


def describe_section(name: str, section: Any, *, defaults: bool) -> str:
    """Log lines with the values of a section; without `defaults`, only non-default values, possibly none."""
    values, default = dataclasses.asdict(section), dataclasses.asdict(type(section)())
    keys = sorted(values, key=lambda key: key not in type(section).__annotations__)  # inherited fields last
    lines = [
        f"  {key} {'.' * (46 - len(key))} {_format_value(values[key])}"
        for key in keys
        if defaults or values[key] != default[key]
    ]
    return "\n".join([f"{name}:", *lines]) if lines else ""


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def run_sections() -> dict[str, type]:
    """Dataclass of each section by name, in the order of RunConfig."""
    sections: dict[str, type] = {}
    for entry in dataclasses.fields(RunConfig):
        factory = entry.default_factory
        if not isinstance(factory, type):
            raise TypeError(f"RunConfig.{entry.name} must be built by its dataclass")
        sections[entry.name] = factory
    return sections


def notes_without_effect(
    unresolved: RunConfig, resolved: RunConfig, explicit: Collection[str], world_size: int
) -> list[str]:
    """Notes about explicit flags without effect, grouped by reason, so that no flag is silently ignored.

    Settings that would silently change the training raise an error elsewhere; these flags change nothing.

    Args:
        unresolved: configuration before `resolve`.
        resolved: resolved configuration.
        explicit: dotted names of the fields set by flags and files; fields set to their default are not reported.
        world_size: number of processes.
    """
    flags_by_reason: dict[str, list[str]] = {}
    for section, cls in run_sections().items():
        values = getattr(unresolved, section)
        for field_option in field_options(section, cls):
            if field_option.path not in explicit or getattr(values, field_option.name) == field_option.default:
                continue
            for condition in field_option.option.only_if:
                if not condition.holds(resolved, world_size):
                    flags_by_reason.setdefault(condition.otherwise, []).append(f"--{field_option.flag}")
                    break
    return [
        f"{', '.join(flags)}: no effect{'' if reason.startswith('with') else ','} {reason}"
        for reason, flags in flags_by_reason.items()
    ]


def minimal_run_config(model: ModelConfig, **sections: Any) -> RunConfig:
    """Unresolved configuration of a model and other sections; fields that `resolve` requires have minimal values."""
    minimal_sections: dict[str, Any] = {
        "training": TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1),
        "optimizer": OptimizerConfig(lr=1e-4),
        "tokenizer": TokenizerConfig(vocab_size=MAX_SIZE),  # large enough for any tensor-parallel size
    }
    return RunConfig(model=model, **{**minimal_sections, **sections})
