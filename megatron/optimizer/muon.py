"""Muon: momentum with orthogonalized matrices (Jordan et al. 2024), and AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.matrix_gather import MatrixGather
from megatron.parallel.data.param_shards import ParamShard
from megatron.parallel.tensor.shards import ParamSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that raise small singular values fastest."""


def newton_schulz(x_mn: Tensor, steps: int) -> Tensor:
    """The matrix with the same singular vectors and all singular values about 1 (0.7 to 1.2 after 5 steps).

    Args:
        x_mn: any matrix; computed in its floating-point dtype.
        steps: iterations of the quintic.
    """
    a, b, c = COEFFICIENTS
    tall = x_mn.shape[0] > x_mn.shape[1]
    x = x_mn.mT if tall else x_mn
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.AdamW):
    """Muon as ``torch.optim.Muon`` computes it, of whole matrices on any layout.

    B = momentum * B + (1 - momentum) * g; with Nesterov momentum the matrix M is (1 - momentum) * g + momentum * B,
    else B. A matrix moves by lr * (scale * newton_schulz(M) + decay * w). Queries, keys and values of an attention are
    separate matrices, and so are gate and value of an MLP, and those of each expert. AdamW updates everything but the
    matrices of linear layers: embeddings, heads, norms, biases.

    Args:
        groups: parameter groups, each with ``decays``; the matrices are in the group with ``matrices``.
        shards: the shards of the groups' main values.
        matrices: whole matrices from their shards.
        config: the hyper-parameters.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: Sequence[ParamShard],
        matrices: MatrixGather,
        config: OptimizerConfig,
    ) -> None:
        betas = (config.adam_beta1, config.adam_beta2)
        super().__init__(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
        self._step_supports_amp_scaling = False  # the caller divides the gradients
        self._shards, self._matrices, self._config = list(shards), matrices, config
        self.directions: dict[int, Tensor] | None = None
        """Directions of matrices without weight decay, by the id of their main values; None unless requested."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take an update. The gradients of matrices become their directions."""
        group = next((group for group in self.param_groups if "matrices" in group), None)
        mains: list[Tensor] = group["params"] if group else []
        grads = [cast(Tensor, p.grad) for p in mains]
        if mains:
            states, momentum = [self.state[p] for p in mains], self._config.muon_momentum
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_add_([state["step"] for state in states], 1.0)
            torch._foreach_lerp_(buffers, grads, 1.0 - momentum)
            if self._config.muon_nesterov:
                torch._foreach_lerp_(grads, buffers, momentum)
            else:
                torch._foreach_copy_(grads, buffers)

        main_dtype, precision = self._shards[0].main.dtype, self._config.muon_fp32_matmul_prec
        in_bf16 = precision == "medium"
        if precision is None:
            in_bf16 = self._shards[0].model.dtype in (torch.bfloat16, torch.float16)
        matrix_dtype = torch.bfloat16 if in_bf16 else main_dtype
        shard_grads = [cast(Tensor, s.main.grad) if s.slot.spec.blocks else None for s in self._shards]
        matrices = [None if grad is None else grad.to(matrix_dtype) for grad in shard_grads]
        self._matrices.change(matrices, matrix_dtype, self._orthogonalize)
        for shard_grad, matrix in zip(shard_grads, matrices, strict=True):
            if shard_grad is not None and matrix is not None and matrix is not shard_grad:
                shard_grad.copy_(matrix)

        scales = {id(shard.main): self._scale(shard.slot.spec) for shard in self._shards if shard.slot.spec.blocks}
        if mains and group:
            torch._foreach_mul_(grads, [scales[id(p)] for p in mains])
            if self.directions is not None:
                self.directions |= {id(p): grad for p, grad in zip(mains, grads, strict=True)}
            torch._foreach_mul_(mains, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(mains, grads, alpha=-group["lr"])
        for p in mains:
            p.grad = None
        return super().step(closure)

    def _blocks(self, spec: ParamSpec) -> tuple[int, ...]:
        """Row counts of a parameter's matrices, as in ``ParamSpec.blocks``."""
        fused = len(spec.logical_shape) == 2
        return (spec.logical_shape[0],) if fused and not self._config.muon_split_qkv else spec.blocks

    def _orthogonalize(self, matrix: Tensor, spec: ParamSpec) -> Tensor:
        """Orthogonalize each of a parameter's matrices, each scaled relative to the largest scale."""
        blocks, columns = self._blocks(spec), matrix.shape[-1]
        rows = matrix.reshape(-1, sum(blocks), columns)
        largest, changed = self._scale(spec), []
        for block in rows.split(blocks, dim=1):
            orthogonal = newton_schulz(block.reshape(-1, columns), self._config.muon_num_ns_steps)
            share = self._scale_of(orthogonal.shape[0], columns) / largest
            changed.append((orthogonal if share == 1.0 else orthogonal * share).view_as(block))
        return torch.cat(changed, dim=1).view(matrix.shape)

    def _scale(self, spec: ParamSpec) -> float:
        """The largest scale of a parameter's matrices."""
        columns, blocks = spec.logical_shape[-1], self._blocks(spec)
        repeated = math.prod(spec.logical_shape[:-1]) // sum(blocks)
        return max(self._scale_of(repeated * block, columns) for block in blocks)

    def _scale_of(self, rows: int, columns: int) -> float:
        """Scale of a matrix by its shape (``--muon-scale-mode``)."""
        ratio = rows / columns
        square = {"spectral": max(rows, columns), "shape_scaling": max(1.0, ratio), "unit_rms_norm": ratio}
        return self._config.muon_extra_scale_factor * math.sqrt(square[self._config.muon_scale_mode])
