"""Labels and losses of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.parallel.tensor.random import DropoutKeys


@dataclass(frozen=True)
class Targets:
    """Labels of a micro-batch, and further inputs of its losses, without activations.

    Args:
        labels_bs: int64 tokens. For a task head a label per sequence, (b, 1): an int64 class or choice, or a float64
            number.
        mask_bs: float32, 1 if the loss of a label counts.
        order_b: int64, 1 if the two sentences of a sample are swapped, negative if the sample does not count; None
            if the model has no sentence-order loss.
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
    """Sum of a loss over the unmasked labels of a micro-batch, in nats, and their number; scalars."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class StageLoss:
    """Losses of a micro-batch.

    Args:
        objective: scalar to be differentiated.
        sums: sums of the model's losses (``ModelConfig.loss_names``).
        outputs_bc: task-head outputs for each sequence, without gradient; None for a language model.
    """

    objective: Tensor
    sums: tuple[LossSum, ...]
    outputs_bc: Tensor | None = None


def token_weights(mask_bs: Tensor, divisors: Tensor | None) -> Tensor:
    """Weight of each token in the objective, (b, s), float64; ``divisors`` as in ``Stage.loss``, the tokens' first."""
    return mask_bs.double() / (mask_bs.numel() if divisors is None else divisors[0])
