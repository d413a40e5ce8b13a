"""Losses of a micro-batch, and the labels that they compare the model's outputs with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.parallel.tensor.random import DropoutKeys


@dataclass(frozen=True)
class Targets:
    """The labels of a micro-batch, and what else its losses need besides activations.

    Args:
        labels_bs: int64 tokens. For a task head one label a sequence, (b, 1): an int64 class or choice, or a float64
            number.
        mask_bs: float32, 1 where the loss of a label counts.
        order_b: int64, 1 where the two sentences of a sample are swapped, negative where that does not count; None
            where the model is not asked.
        lengths_b: int64 tokens of each sequence, without padding; None for a language model.
        dropout: keys of the dropout masks; None in evaluation.
    """

    labels_bs: Tensor
    mask_bs: Tensor
    order_b: Tensor | None = None
    lengths_b: Tensor | None = None
    dropout: DropoutKeys | None = None


@dataclass(frozen=True)
class LossSum:
    """Sum of a loss over what counts in a micro-batch, in nats, and how many these are; scalars."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class StageLoss:
    """The losses of a micro-batch.

    Args:
        objective: scalar to be differentiated.
        sums: of each of the model's losses (``ModelConfig.loss_names``).
        outputs_bc: what a task head says of each sequence, without gradient; None for a language model.
    """

    objective: Tensor
    sums: tuple[LossSum, ...]
    outputs_bc: Tensor | None = None


def token_weights(mask_bs: Tensor, divisors: Tensor | None) -> Tensor:
    """Weight of each token in the objective, (b, s), float64; ``divisors`` as in ``Stage.loss``, the tokens' first."""
    return mask_bs.double() / (mask_bs.numel() if divisors is None else divisors[0])
