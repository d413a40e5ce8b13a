"""Megatron's BERT: pre-norm layers, masked language modeling, and sentence-order prediction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.losses import LossSum, StageLoss, Targets, token_weights
from megatron.models.mlp import ReplicatedLinear
from megatron.models.norm import Norm
from megatron.models.rank_context import RankContext
from megatron.models.stage import Stage, StagePart
from megatron.parallel.tensor.cross_entropy import head_loss
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.shards import ShardedModule


class LMHead(ShardedModule):
    """Transform before the output projection, (s, b, h) -> (s, b, h), and the bias of that projection.

    GELU is approximate if the layers use approximate GELU, else exact.
    """

    def __init__(self, rank: RankContext, shard: VocabShard) -> None:
        super().__init__()
        config = rank.config
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dense = ReplicatedLinear(rank, config.hidden_size)
        self.layernorm = Norm(rank)
        self.bias, self.specs["bias"] = shard.bias(rank.device, rank.dtype)

    def forward(self, x_sbh: Tensor) -> Tensor:
        result: Tensor = self.layernorm(F.gelu(self.dense(x_sbh), approximate=self.approximate))
        return result


class BinaryHead(nn.Module):
    """Sentence-order head: first position (b, h) -> logits (b, 2)."""

    def __init__(self, rank: RankContext) -> None:
        super().__init__()
        self.pooler = ReplicatedLinear(rank, rank.config.hidden_size)
        self.order = ReplicatedLinear(rank, 2)

    def forward(self, first_bh: Tensor) -> Tensor:
        result: Tensor = self.order(torch.tanh(self.pooler(first_bh)))
        return result


class BertStage(Stage):
    """A stage of BERT."""

    def __init__(self, rank: RankContext, stage_part: StagePart, shard: VocabShard) -> None:
        super().__init__(rank, stage_part, shard)
        if stage_part.last:
            self.lm_head = LMHead(rank, shard)
            if rank.config.bert_binary_head:
                self.binary_head = BinaryHead(rank)

    def counts(self, targets: Targets) -> Tensor:
        masked = targets.mask_bs.sum()
        if not self.config.bert_binary_head:
            return torch.stack([masked])
        assert targets.order_b is not None
        return torch.stack([masked, (targets.order_b >= 0).sum().to(masked.dtype)])

    def loss(self, x_sbh: Tensor, targets: Targets, divisors: Tensor | None = None) -> StageLoss:
        x_sbh = self.final_layernorm(x_sbh)
        counts = self.counts(targets)
        weights_bs = token_weights(targets.mask_bs, divisors)
        args = (self.output_weight, targets.labels_bs.t(), weights_bs.t(), self.comm, self.shard, self.lm_head.bias)
        objective, losses_sb = head_loss(self.lm_head(x_sbh), *args, workspace=self.logits_workspace)
        sums = [LossSum((losses_sb.t() * targets.mask_bs).sum(), counts[0])]
        if self.config.bert_binary_head:
            assert targets.order_b is not None
            losses_b = F.cross_entropy(self.order_logits(x_sbh), targets.order_b, reduction="none")
            sums.append(LossSum(losses_b.detach().sum(), counts[1]))
            divisor = counts[1] if divisors is None else divisors[1]
            # On ranks without the first position, the binary head reads another position and gets zero gradients.
            holds_first = 0.0 if self.comm.sequence_parallel and self.comm.rank > 0 else 1.0
            objective = objective + (losses_b * holds_first).sum() / divisor.to(losses_b.dtype)
        return StageLoss(objective, tuple(sums))

    def order_logits(self, x_sbh: Tensor) -> Tensor:
        """Logits (b, 2) for sentences in order and swapped, from normalized outputs that begin with position 0."""
        logits: Tensor = self.binary_head(x_sbh[0])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
