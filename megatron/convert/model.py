"""Intermediate form of every conversion: a model configuration, and tensors that are read on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.run import minimal_run_config
from megatron.config.tokenizer import TokenizerConfig
from megatron.convert.safetensors_file import DTYPES
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.kernels.dtypes import name_of_dtype
from megatron.models.rank_context import RankContext
from megatron.models.stage import StagePart
from megatron.models.stages import make_stage
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.shards import ParamSpec, collect_specs


@dataclass(frozen=True)
class Entry:
    """A tensor that is read on demand.

    Args:
        shape, dtype: shape and dtype of the tensor that ``read`` returns.
        read: reads the tensor again at each call, so that it need not stay in memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def to(self, dtype: torch.dtype | None) -> Entry:
        """The same tensor, converted to another dtype."""
        if dtype is None or dtype == self.dtype:
            return self
        return Entry(self.shape, dtype, lambda: self.read().to(dtype))

    def require_finite(self, name: str, location: Path) -> Entry:
        """The same tensor; reading it raises ``UserError`` for infinite or NaN values in its precision."""

        def read() -> Tensor:
            tensor = self.read()
            if not bool(torch.isfinite(tensor).all()):
                precision = name_of_dtype(self.dtype)
                raise UserError(
                    f"{location}: {name} holds infinite or NaN values in {precision}; "
                    "convert another checkpoint, or to a precision with a larger range (--dtype)"
                )
            return tensor

        return Entry(self.shape, self.dtype, read)


@dataclass(frozen=True)
class Weights:
    """A trained model.

    Args:
        model: resolved model configuration.
        vocab_size: number of vocabulary entries, without padding.
        entries: unsharded tensors without padding, by logical name.
        tokenizer: configuration of its tokenizer.
        iteration: training iteration at which it was saved.
        left_out: parts of the source that were not converted; empty if none.
    """

    model: ModelConfig
    vocab_size: int
    entries: Mapping[str, Entry]
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    iteration: int = 0
    left_out: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(torch.Size(entry.shape).numel() * entry.dtype.itemsize for entry in self.entries.values())


@cache
def tensors_of(model: ModelConfig, vocab_size: int) -> dict[str, ParamSpec]:
    """Logical names of a model's parameters and buffers, with their shapes and split dimensions, in model order."""
    comm = TensorComm(Group(None, (0,), 0, "this process", "none"), Ledger(), CompressionPlan({}, 0, 1))
    meta, stage_part = torch.device("meta"), StagePart(range(model.num_layers))
    shard = VocabShard(vocab_size, vocab_size, comm)
    stage = make_stage(RankContext(model, comm, meta, torch.float32), stage_part, shard)
    buffers = {name: ParamSpec(tuple(buffer.shape)) for name, buffer in stage.named_buffers()}
    return dict(collect_specs(stage).values()) | buffers


def stacks_gate_and_up(model: ModelConfig, name: str) -> bool:
    """Whether a tensor stacks a gated MLP's two projections in a first dimension of 2, which other formats flatten."""
    return model.gated and "dense_h_to_4h" in name


def check_complete(weights: Weights, location: str) -> None:
    """Check names and shapes against the configuration, and dtypes against those of weights.

    Raises:
        UserError: when a tensor is missing, unexpected, or of another shape or dtype; the message names it.
    """
    expected = tensors_of(weights.model, weights.vocab_size)
    for name, spec in expected.items():
        if name not in weights.entries:
            raise UserError(f"{location}: the model has no {name}; the configuration is that of another model")
        entry_shape, dtype, shape = weights.entries[name].shape, weights.entries[name].dtype, spec.logical_shape
        if entry_shape != shape:
            raise UserError(f"{location}: {name} has shape {entry_shape}, but the configuration specifies {shape}")
        if dtype not in DTYPES:
            raise UserError(
                f"{location}: {name} holds {str(dtype).removeprefix('torch.')}, which is not a type of weights"
            )
    extra = sorted(set(weights.entries) - set(expected))
    if extra:
        raise UserError(f"{location}: {extra[0]} has no place in a model of this configuration")


def model_of(**values: object) -> ModelConfig:
    """Resolved model configuration from the values that differ from the defaults."""
    model = ModelConfig(**values)  # type: ignore[arg-type]
    return minimal_run_config(model).resolve(1).model
