"""Both sides of the benchmark of products compute the same, and what a layer's products are."""

from __future__ import annotations

import pytest
import torch

from benchmarks.products import LinearLayer, layers_of, sides
from benchmarks.train_sides import Shape
from megatron.kernels import native
from tests.support.products import need_products


@need_products
@pytest.mark.parametrize("groups", [1, 4])
def test_both_sides_compute_a_layers_output_and_gradients(groups: int) -> None:
    assert native.problem() is None
    own, torchs, results = sides(LinearLayer("any", 64, 24, 40, groups))
    found = []
    for side in (own, torchs):
        for x in results:
            x.fill_(torch.nan)
        side()
        found.append([x.clone() for x in results])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 256, 256, 8),
        Shape(4, 512, 512, 2, vocab=32000, llama=True, ffn=1792, groups=4, experts=8),
        Shape(2, 256, 128, 2, vocab=128, llama=True, ffn=896, groups=2),
    ],
    ids=["gpt-2", "mixtral", "llama"],
)
def test_the_layers_are_those_whose_operations_a_step_needs(shape: Shape) -> None:
    *layers, head = layers_of(shape)
    flops = shape.layers * sum(layer.flops for layer in layers) + head.flops
    tokens = shape.batch * shape.seq
    attention = 3 * 4 * shape.layers * tokens * shape.hidden * (shape.seq + 1) / 2
    router = 3 * 2 * shape.layers * tokens * shape.hidden * shape.experts
    assert flops + attention + router == pytest.approx(shape.flops(), rel=1e-3)
