"""The intermediate form of every conversion: a description, and tensors that are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint.convert.safetensors_file import DTYPES
from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.comm.tensor import TensorComm
from megatron.config.model import ModelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import run_around
from megatron.config.tokenizer import TokenizerConfig
from megatron.model.stage import StagePart
from megatron.model.stages import make_stage
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.shards import ParamSpec, collect_specs
from megatron.topology.group import Group


@dataclass(frozen=True)
class Entry:
    """A tensor that is read on demand.

    Args:
        shape, dtype: those of the tensor that ``read`` returns.
        read: reads the tensor, anew at each call, so that nobody has to keep it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def to(self, dtype: torch.dtype | None) -> Entry:
        """The same tensor in another precision."""
        if dtype is None or dtype == self.dtype:
            return self
        return Entry(self.shape, dtype, lambda: self.read().to(dtype))

    def checked(self, name: str, where: Path) -> Entry:
        """The same tensor; reading it raises ``UserError`` if a value is infinite or NaN in its precision."""

        def read() -> Tensor:
            tensor = self.read()
            if not bool(torch.isfinite(tensor).all()):
                precision = str(self.dtype).removeprefix("torch.")
                raise UserError(
                    f"{where}: {name} holds infinite or NaN values in {precision}; "
                    "convert another checkpoint, or to a precision with a larger range (--dtype)"
                )
            return tensor

        return Entry(self.shape, self.dtype, read)


@dataclass(frozen=True)
class Weights:
    """A trained model.

    Args:
        model: its resolved configuration.
        vocab_size: entries of the vocabulary, without padding.
        entries: its tensors, by logical name, whole and without padding.
        tokenizer: what its tokenizer was built from.
        iteration: iteration of the run that saved it.
        left_out: parts of the source that are no part of the model; empty where there are none.
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
    """Logical names of a model's parameters and buffers, whole shapes and split dimensions, in the model's order."""
    comm = TensorComm(Group(None, (0,), 0, "this process", "none"), Ledger(), CompressionPlan({}, 0, 1))
    meta, part = torch.device("meta"), StagePart(range(model.num_layers))
    shard = VocabShard(vocab_size, vocab_size, comm)
    stage = make_stage(model, part, shard, comm, meta, torch.float32, RecomputeConfig())
    buffers = {name: ParamSpec(tuple(buffer.shape)) for name, buffer in stage.named_buffers()}
    return dict(collect_specs(stage).values()) | buffers


def stacks_gate_and_up(model: ModelConfig, name: str) -> bool:
    """Whether a tensor has a first dimension of 2, a gated MLP's two projections, which other formats flatten."""
    return model.gated and "dense_h_to_4h" in name


def check_complete(weights: Weights, where: str) -> None:
    """Compares names and shapes with what the configuration asks for, and types with those of weights.

    Raises:
        UserError: when one is missing, superfluous, of another shape, or of no weight's type; the message names it.
    """
    expected = tensors_of(weights.model, weights.vocab_size)
    for name, spec in expected.items():
        if name not in weights.entries:
            raise UserError(f"{where}: the model has no {name}; the configuration beside it is of another model")
        found, dtype, shape = weights.entries[name].shape, weights.entries[name].dtype, spec.logical_shape
        if found != shape:
            raise UserError(f"{where}: {name} has shape {found}, the configuration asks for {shape}")
        if dtype not in DTYPES:
            raise UserError(f"{where}: {name} holds {str(dtype).removeprefix('torch.')}, which is no type of weights")
    extra = sorted(set(weights.entries) - set(expected))
    if extra:
        raise UserError(f"{where}: {extra[0]} has no place in a model of this configuration")


def model_of(**values: object) -> ModelConfig:
    """A resolved model configuration, from the values that are not defaults."""
    model = ModelConfig(**values)  # type: ignore[arg-type]
    return run_around(model).resolve(1).model
