"""The configuration of a run: typed sections, flags, YAML files, checks."""

from megatron.base.errors import UserError
from megatron.base.option import derived, option, required
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.compression import CompressionConfig
from megatron.config.data import DataConfig
from megatron.config.flags import (
    FlagParser,
    ParsedRun,
    ParsedSections,
    build_parser,
    build_run_parser,
    parse_args,
)
from megatron.config.logs import LoggingConfig
from megatron.config.merge import merge_checkpoint_config
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig
from megatron.config.validation import ValidationConfig

__all__ = [
    "CheckpointConfig",
    "CompressionConfig",
    "DataConfig",
    "FlagParser",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParsedRun",
    "ParsedSections",
    "PrecisionConfig",
    "RecomputeConfig",
    "RunConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "UserError",
    "ValidationConfig",
    "build_parser",
    "build_run_parser",
    "derived",
    "merge_checkpoint_config",
    "option",
    "parse_args",
    "required",
]
