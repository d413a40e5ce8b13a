"""Context in which a rank builds its layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from megatron.config.model import ModelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.parallel.expert.dispatcher import ExpertComm
from megatron.parallel.tensor.collectives import TensorComm


@dataclass(frozen=True)
class RankContext:
    """Arguments that all layers of a rank share.

    Args:
        config: the model.
        tensor: tensor-parallel communication.
        device, dtype: device and dtype of the parameters.
        recompute: activation recomputation.
        expert: expert-parallel communication; None if this rank holds all experts.
    """

    config: ModelConfig
    tensor: TensorComm
    device: torch.device
    dtype: torch.dtype
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    expert: ExpertComm | None = None

    def at(self, location: str) -> RankContext:
        """Return the context of a location in the model, whose messages have separate random seeds."""
        return replace(self, tensor=self.tensor.at(location))
