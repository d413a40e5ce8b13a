"""GPT: next-token prediction."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.kernels.soft_cap import soft_cap_
from megatron.models.losses import LossSum, StageLoss, Targets, token_weights
from megatron.models.stage import Stage
from megatron.parallel.tensor.cross_entropy import head_loss


class GPTStage(Stage):
    """A stage of GPT."""

    def loss(self, x_sbh: Tensor, targets: Targets, divisors: Tensor | None = None) -> StageLoss:
        weights_bs = token_weights(targets.mask_bs, divisors)
        total, losses_bs = self.token_losses(x_sbh, targets.labels_bs, weights_bs)
        return StageLoss(total, (LossSum((losses_bs * targets.mask_bs).sum(), targets.mask_bs.sum()),))

    def token_losses(self, x_sbh: Tensor, labels_bs: Tensor, weights_bs: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of the token losses (scalar), and the token losses (b, s); last stage only."""
        x_sbh = self.final_layernorm(x_sbh)
        args = (self.output_weight, labels_bs.t(), weights_bs.t(), self.comm, self.shard)
        cap = self.config.final_logit_softcapping
        total, losses_sb = head_loss(x_sbh, *args, workspace=self.logits_workspace, cap=cap)
        return total, losses_sb.t()

    @torch.no_grad()
    def logits(self, x_sbh: Tensor) -> Tensor:
        """Logits (s, b, vocab_size) without padding, the same on every tensor-parallel rank; no gradient."""
        x_sbh = self.final_layernorm(x_sbh)
        if self.comm.sequence_parallel:
            x_sbh = self.comm.gather(x_sbh, Point.TP_FWD)
        local = x_sbh @ self.output_weight.t()
        soft_cap_(local, self.config.final_logit_softcapping)
        if self.comm.size > 1:
            local = torch.cat(list(self.comm.gather_exact(local)), dim=-1)
        return local[..., : self.shard.vocab_size]
