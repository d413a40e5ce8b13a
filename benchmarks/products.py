"""This library's own fp32 products beside torch's, layer by layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.train_sides import Shape
from benchmarks.turns import in_turns, timed
from megatron.kernels import native


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, or one for each group of tokens.

    Args:
        name: what it is.
        tokens: of all groups, which have equally many.
        inputs, outputs: numbers of a token.
        groups: number of weights.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    groups: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of the output and of both gradients."""
        return 3 * 2 * self.tokens * self.inputs * self.outputs


def layers_of(shape: Shape) -> list[LinearLayer]:
    """The linear layers of a model."""
    tokens, h, ffn = shape.batch * shape.seq, shape.hidden, shape.ffn or 4 * shape.hidden
    keys = (shape.groups or shape.heads) * (h // shape.heads)
    up, choices = ffn * (2 if shape.llama else 1), 2 if shape.experts else 1
    groups = max(1, shape.experts)
    return [
        LinearLayer("queries, keys, values", tokens, h, h + 2 * keys),
        LinearLayer("attention's output", tokens, h, h),
        LinearLayer("experts, up" if shape.experts else "up", choices * tokens, h, up, groups),
        LinearLayer("experts, down" if shape.experts else "down", choices * tokens, ffn, h, groups),
        LinearLayer("output layer", tokens, h, shape.vocab),
    ]


def beside_torch(shape: Shape, threads: int, turns: int) -> list[dict[str, Any]]:
    """Measures the products of each layer, in turns."""
    torch.set_num_threads(threads)
    rows = []
    for layer in layers_of(shape):
        own, torchs, _ = sides(layer)
        taken = in_turns(partial(timed, own), partial(timed, torchs), turns=turns, warm=1)
        rates = {name: layer.flops / taken.median(side) for side, name in enumerate(("own_rate", "torchs_rate"))}
        sizes = f"{layer.tokens} x {layer.inputs} x {layer.outputs}"
        rows.append({"shape": shape.name, "layer": layer.name, "sizes": sizes, **rates, "ratio": taken.ratio()})
    return rows


def sides(layer: LinearLayer) -> tuple[Callable[[], object], Callable[[], object], list[Tensor]]:
    """Both ways to the output and the gradients of a layer, and the tensors that either writes."""
    x, out = torch.randn(layer.tokens, layer.inputs), torch.empty(layer.tokens, layer.outputs)
    grad, grad_x = torch.randn_like(out), torch.empty_like(x)
    weights_goi = torch.randn(layer.groups, layer.outputs, layer.inputs)
    grads_goi = torch.empty_like(weights_goi)
    ends_g = torch.arange(1, layer.groups + 1, dtype=torch.int32) * (layer.tokens // layer.groups)
    own = native.operators()

    def owns() -> None:
        own.grouped_product(x, weights_goi.transpose(1, 2), ends_g, out)
        own.grouped_product(grad, weights_goi, ends_g, grad_x)
        own.grouped_product(grad.t(), x, ends_g, grads_goi)

    by_group = list(zip(*(rows.chunk(layer.groups) for rows in (x, out, grad, grad_x)), strict=True))

    def torchs() -> None:
        for weight_oi, grad_oi, (part, part_out, part_grad, part_grad_x) in zip(
            weights_goi, grads_goi, by_group, strict=True
        ):
            torch.mm(part, weight_oi.t(), out=part_out)
            torch.mm(part_grad, weight_oi, out=part_grad_x)
            torch.mm(part_grad.t(), part, out=grad_oi)

    return owns, torchs, [out, grad_x, grads_goi]
