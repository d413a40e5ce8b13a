"""Comparison with a reference model that has the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.data.batch import Batch
from megatron.models.context import ForwardContext

Pairs = Sequence[tuple[str, list[Tensor]]]
"""Our parameters' names, with the reference's parameters of each."""
Convert = Callable[[str, list[Tensor]], Tensor]
"""Our parameter's value, from its name and the reference's values."""


def copy_weights(reference: nn.Module, ours: nn.Module, pairs: Pairs, convert: Convert) -> None:
    """Perturbs the reference's weights, since norms of 1 and biases of 0 would hide mistakes, and copies them."""
    params = dict(ours.named_parameters())
    assert {name for name, _ in pairs} == set(params)
    with torch.no_grad():
        for param in reference.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
        for name, weights in pairs:
            value = convert(name, weights)
            params[name][: value.shape[0]].copy_(value)


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-5, zero: float = 0.0) -> None:
    """Compares the largest error with the largest value, or with 1 if no value exceeds ``zero``."""
    assert actual.shape == expected.shape, name
    scale = expected.abs().max() if expected.abs().max() > zero else 1.0
    error = (actual - expected).abs().max() / scale
    assert error < tolerance, f"{name}: relative error {error:.2e}"


def assert_same_gradients(
    ours: nn.Module, pairs: Pairs, convert: Convert, tolerance: float = 1e-5, zero: float = 0.0
) -> None:
    params = dict(ours.named_parameters())
    for name, weights in pairs:
        gradients: list[Any] = [weight.grad for weight in weights]
        expected, actual = convert(name, gradients), params[name].grad
        assert actual is not None
        assert_close(name, actual[: expected.shape[0]], expected, tolerance, zero)
        assert not actual[expected.shape[0] :].any(), f"{name}: the vocabulary's padding has a gradient"


def context_of(tensors: dict[str, Tensor]) -> ForwardContext:
    """The forward context of a batch with these tensors."""
    names = ("segment_ids_bs", "types_bs", "decoder_tokens_bs", "decoder_segment_ids_bs")
    inputs: dict[str, Any] = {name: tensors[name] for name in names if name in tensors}
    return ForwardContext(**inputs)


def split_batches(tensors: dict[str, Tensor], samples: int, micro_batch_size: int) -> list[Batch]:
    """Micro-batches of the first samples."""
    batches = []
    for start in range(0, samples, micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        ids = torch.arange(samples)[rows]
        batches.append(Batch(ids, ids, **{name: tensor[rows] for name, tensor in tensors.items()}))
    return batches
