"""Sequence-level models: classification, regression or multiple choice from the hidden state of a single position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model_types import ModelType
from megatron.models.losses import LossSum, StageLoss, Targets, token_weights
from megatron.models.rank_context import RankContext
from megatron.models.stage import Stage, StagePart
from megatron.parallel.tensor.collectives import all_reduce_exact
from megatron.parallel.tensor.embedding import VocabShard

TASK_HEAD = "classification_head."
"""Prefix of the names of a head's parameters."""
HEAD_POOLER, PRETRAINED_POOLER = f"{TASK_HEAD}pooler.", "binary_head.pooler."
"""Name prefixes of the pooler, in a head and in a pretrained BERT."""


@dataclass(frozen=True)
class Pooling:
    """Reduction of hidden states (s, b, h) to the classifier's input (b, h).

    Args:
        pools_last: pool the last token before the padding, instead of the first token.
        activation: activation after a dense layer; None without that layer.
        dropout: whether the model's hidden dropout applies to the classifier's input.
        bias: whether the classifier has a bias.
    """

    pools_last: bool = False
    activation: Callable[[Tensor], Tensor] | None = None
    dropout: bool = True
    bias: bool = True


POOLING: Mapping[ModelType, Pooling] = {
    "bert": Pooling(activation=torch.tanh),
    "deberta": Pooling(activation=F.gelu),
    "gpt": Pooling(pools_last=True, dropout=False, bias=False),
}
"""Pooling of each kind of model, as in Megatron's and Hugging Face's classifiers."""


class ClassificationHead(nn.Module):
    """Pooling and classifier: hidden states (s, b, h), or this rank's slice of s, to outputs (b, c).

    Under sequence parallelism the pooled states are summed over the tensor-parallel ranks, so that every rank computes
    the same outputs and full gradients of the head's parameters.
    """

    def __init__(self, rank: RankContext) -> None:
        super().__init__()
        config = rank.config
        self.comm = rank.tensor
        self.pooling = POOLING[config.model_type]
        self.dropout = config.hidden_dropout if self.pooling.dropout else 0.0
        hidden = config.hidden_size
        if self.pooling.activation is not None:
            self.pooler = _linear(hidden, hidden, True, rank.device, rank.dtype)
        self.classifier = _linear(hidden, config.num_outputs, self.pooling.bias, rank.device, rank.dtype)

    def forward(self, x_sbh: Tensor, targets: Targets) -> Tensor:
        begin = self.comm.rank * len(x_sbh) if self.comm.sequence_parallel else 0
        if self.pooling.pools_last:
            assert targets.lengths_b is not None
            position_b = targets.lengths_b - 1 - begin
            x_bh = x_sbh[position_b.clamp(0, len(x_sbh) - 1), torch.arange(x_sbh.shape[1], device=x_sbh.device)]
        else:
            position_b = torch.full((x_sbh.shape[1],), -begin, device=x_sbh.device)
            x_bh = x_sbh[0]
        if self.comm.sequence_parallel:
            # Ranks without the position need zero gradients instead of None: their layers run backward, too.
            is_elsewhere_b = (position_b < 0) | (position_b >= len(x_sbh))
            x_bh = all_reduce_exact(x_bh.masked_fill(is_elsewhere_b.unsqueeze(1), 0.0), self.comm)
        if self.pooling.activation is not None:
            x_bh = self.pooling.activation(self.pooler(x_bh))
        if self.dropout and targets.dropout is not None:
            keys = targets.dropout.at(("classifier",))
            x_bh = x_bh * keys.keep_mask(0, x_bh.shape[1:], self.dropout, x_bh)
        outputs_bc: Tensor = self.classifier(x_bh)
        return outputs_bc.to(torch.promote_types(outputs_bc.dtype, torch.float32))


def _linear(in_features: int, out_features: int, bias: bool, device: torch.device, dtype: torch.dtype) -> nn.Linear:
    """Linear layer with an uninitialized weight and zero bias."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, in_features, out_features, bias=bias, device=device, dtype=dtype)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class ClassifierStage(Stage):
    """A stage of a sequence-level model: the body of the language model, with a classification head.

    Models with a different body are subclasses.
    """

    def __init__(self, rank: RankContext, stage_part: StagePart, shard: VocabShard) -> None:
        super().__init__(rank, stage_part, shard)
        if stage_part.last and rank.config.task_head != "none":
            self.classification_head = ClassificationHead(rank)

    def loss(self, x_sbh: Tensor, targets: Targets, divisors: Tensor | None = None) -> StageLoss:
        states_sbh = self.final_layernorm(x_sbh) if self.ends_with_norm else x_sbh
        outputs_bc = self.classification_head(states_sbh, targets)
        # Only the label of a sample's first sequence counts.
        step = self.config.sequences_per_sample
        labels_n, mask_n = targets.labels_bs[::step, 0], targets.mask_bs[::step, 0]
        if self.config.task_head == "regression":
            losses_n = (outputs_bc[:, 0] - labels_n.to(outputs_bc.dtype)) ** 2
        else:
            # In multiple choice, the outputs of a sample's sequences are its logits.
            losses_n = F.cross_entropy(outputs_bc.reshape(len(labels_n), -1), labels_n, reduction="none")
        total = (losses_n * token_weights(mask_n, divisors).to(losses_n.dtype)).sum()
        sums = LossSum((losses_n.detach() * mask_n).sum(), targets.mask_bs.sum())
        return StageLoss(total, (sums,), outputs_bc.detach())
