"""RunConfig: all sections of a training run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.documents import dump_yaml, parse_yaml, read_yaml
from megatron.base.errors import UserError
from megatron.base.fields import section_from_plain, section_to_plain
from megatron.base.numerals import MOST
from megatron.base.words import nearest
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.compression import CompressionConfig
from megatron.config.data import DataConfig
from megatron.config.logs import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig
from megatron.config.validation import ValidationConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is told. Immutable: use `dataclasses.replace` to change a section.

    A configuration is unresolved until `resolve` has filled what follows from other settings; only a
    resolved one may be given to the engines.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)

    def resolve(self, world_size: int, *, cuda_available: bool = False, notes: list[str] | None = None) -> RunConfig:
        """A new configuration with every derived value filled, checked against `world_size` processes.

        What was decided for the user is appended to `notes`, one line each. Resolving a resolved
        configuration for the same world size changes nothing. Raises UserError, one line that names the
        flags and the fix, for anything impossible or contradictory.
        """
        from megatron.config.resolve import resolve_run

        return resolve_run(self, world_size, cuda_available=cuda_available, notes=notes)

    def data_parallel_size(self, world_size: int) -> int:
        """Number of data-parallel replicas among `world_size` processes."""
        return self.parallel.data_parallel_size(world_size)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections as dictionaries of plain types (str, int, float, bool, list, None)."""
        return {name: section_to_plain(getattr(self, name)) for name in run_sections()}

    @classmethod
    def from_dict(cls, values: object, where: str = "configuration") -> RunConfig:
        """The inverse of `to_dict`. A missing section or field takes its default.

        Raises UserError, starting with `where`, for an unknown name or a value of the wrong type.
        """
        sections = run_sections()
        if not isinstance(values, dict):
            raise UserError(f"{where}: expected sections ({', '.join(sections)}), not a {type(values).__name__}")
        built = {}
        for name, content in values.items():
            if name not in sections:
                raise UserError(f"{where}: unknown section {name}{nearest(str(name), list(sections))}")
            if not isinstance(content, dict):
                raise UserError(f"{where}: section {name} must hold names and values")
            built[name] = section_from_plain(name, sections[name], content, where)
        return cls(**built)

    def to_yaml(self) -> str:
        """The configuration as YAML text, one block a section, which `--config` and `load_yaml` read."""
        return dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls, text: str, where: str = "configuration") -> RunConfig:
        """The inverse of `to_yaml`. Raises UserError starting with `where` for what is not understood."""
        return cls.from_dict(parse_yaml(text, where), where)

    @classmethod
    def load_yaml(cls, path: str | Path) -> RunConfig:
        """Read what `to_yaml` wrote. Raises UserError naming the file when it cannot be read."""
        return cls.from_dict(read_yaml(path), where=str(path))

    def describe(self) -> str:
        """A readable table of all values, grouped by section, for the top of a log."""
        lines = []
        for name, values in self.to_dict().items():
            lines.append(f"{name}:")
            lines += [f"  {key} {'.' * (46 - len(key))} {_shown(value)}" for key, value in values.items()]
        return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def run_sections() -> dict[str, type]:
    """Section name -> dataclass, in the order of RunConfig."""
    sections: dict[str, type] = {}
    for entry in dataclasses.fields(RunConfig):
        factory = entry.default_factory
        if not isinstance(factory, type):
            raise TypeError(f"RunConfig.{entry.name} must be built by its dataclass")
        sections[entry.name] = factory
    return sections


def run_around(model: ModelConfig, **sections: Any) -> RunConfig:
    """An unresolved configuration of a model alone: what else resolving asks for is the least there is.

    Args:
        model: of the run.
        sections: that are given all the same, by name.
    """
    least: dict[str, Any] = {
        "training": TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1),
        "optimizer": OptimizerConfig(lr=1e-4),
        "tokenizer": TokenizerConfig(vocab_size=MOST),  # whose vocabulary any layout can share
    }
    return RunConfig(model=model, **{**least, **sections})
