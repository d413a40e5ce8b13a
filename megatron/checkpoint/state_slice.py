"""Named slices of a compressor's state, and the logical tensors they are saved as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.checkpoint.logical import LogicalShard, TensorBox, shard_of_local
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.state import CompressorState
from megatron.parallel.data.buffer import ParamSlot

PREFIX = "compressor."
COUNTER = "#"
SAMPLE_SUFFIXES = (".ids", ".rows")


@dataclass(frozen=True)
class StateSlice:
    """A named slice of a compressor's state.

    Args:
        name: layout-independent name of its subject: a parameter, or a boundary between layers.
        state: the state that holds it.
        holders: number of holders whose residuals add up, and of tensor-parallel ranks: the leading dimensions of the
            saved tensors.
        holder: this rank's indices in these dimensions.
        index: index in a unit's stacked tensors; None for tensors that are not stacked.
        span: range in the flat tensors of a whole bucket; None otherwise.
        length: number of parameters in the stack, or of elements in the bucket.
        slot: the parameter; None for messages.
        leads: whether the unit's counters are saved under this name.
        index_sets: names of tensors that are indices into the unit; replicas share them.
        means: names of tables of means, and of their counts.
        cut: whether tensor-parallel ranks hold means of different values; otherwise their means are equal.
        stage: for a parameter that several stages hold, this stage's index among them, and their number.
    """

    name: str
    state: CompressorState
    holders: tuple[int, int]
    holder: tuple[int, int]
    index: int | None = None
    span: tuple[int, int] | None = None
    length: int = 0
    slot: ParamSlot | None = None
    leads: bool = True
    index_sets: tuple[str, ...] = ()
    means: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    stage: tuple[int, int] = (0, 1)

    def label(self, kind: str) -> str:
        """Name of a tensor in checkpoints; sample caches include their holder, since their sizes differ."""
        holder = ""
        if kind.endswith(SAMPLE_SUFFIXES):
            holder = "".join(f".{at}of{size}" for at, size in zip(self.holder, self.holders, strict=True))
        return f"{PREFIX}{self.name}{holder}|{kind}"

    @property
    def stage_specific(self) -> StateSlice:
        """The same slice under a stage-specific name, for stages with different states."""
        at, stages = self.stage
        replicas = self.holders[0] // stages
        holders, holder = (replicas, self.holders[1]), (self.holder[0] - at * replicas, self.holder[1])
        return replace(self, name=f"{self.name}.{at}of{stages}", holders=holders, holder=holder, stage=(0, 1))

    def read_slice(self, kind: str, tensor: Tensor) -> Tensor:
        """The slice of a state tensor; for a set of indices, a uint8 mask of the parameter."""
        if kind in self.index_sets and self.slot is not None and self.index is not None:
            count = self.slot.param.numel()
            start = self.index * count
            local_indices = tensor[(tensor >= start) & (tensor < start + count)] - start
            mask = torch.zeros(count, dtype=torch.uint8, device=tensor.device)
            mask[local_indices] = 1
            return mask.view(self.slot.param.shape)
        if self.index is not None:
            return tensor[self.index]
        if self.span is not None and self.slot is not None:
            return tensor[self.span[0] : self.span[1]].view(self.slot.param.shape)
        return tensor

    def shard(self, kind: str, values: Tensor, at: tuple[int, int] | None = None) -> LogicalShard:
        """The logical shard of a slice, at this rank's holder indices, or at ``at`` when reading another holder's."""
        at = self.holder if at is None else at
        if kind.endswith(SAMPLE_SUFFIXES):
            return LogicalShard(tuple(values.shape), values.dtype, [TensorBox((0,) * values.dim(), values.detach())])
        if kind in self.index_sets and self.slot is not None:
            spec = self.slot.spec
            return shard_of_local(values.unsqueeze(0), (0, *spec.offsets()), (1, *spec.logical_shape))
        if kind == RESIDUAL and self.slot is not None:
            spec = self.slot.spec
            offsets, shape = (at[0], *spec.offsets()), (self.holders[0], *spec.logical_shape)
            return shard_of_local(values.unsqueeze(0), offsets, shape)
        offsets = (*at, *([0] * values.dim()))
        return LogicalShard(
            (*self.holders, *values.shape), values.dtype, [TensorBox(offsets, values.detach()[None, None])]
        )
