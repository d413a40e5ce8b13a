"""Weight gradients that backward only records, for weight passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.distributed.topology import single_process
from megatron.parallel.data.buffer import FlatBuffer, NamedParam
from megatron.parallel.tensor.grouped import grouped_linear
from megatron.parallel.tensor.linear import linear
from megatron.parallel.tensor.main_grad import WeightGrads
from megatron.parallel.tensor.shards import ParamSpec

IN, OUT, TOKENS = 6, 8, 5
Use = Callable[[list[nn.Parameter], Tensor], Tensor]


def _linear(params: list[nn.Parameter], x: Tensor) -> Tensor:
    return linear(linear(x, params[0], None).tanh(), params[1], None)


def _recomputed(params: list[nn.Parameter], x: Tensor) -> Tensor:
    """The same, without saved activations."""
    result: Tensor = checkpoint(_linear, params, x, use_reentrant=False)
    return result


def _grouped(params: list[nn.Parameter], x: Tensor) -> Tensor:
    return grouped_linear(x, params, torch.tensor([2, TOKENS - 2]))


def _reference(use: Use, params: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    """Gradients of the weights and of the input, by torch's operations in the dtype of the weights."""
    copies = [param.detach().clone().requires_grad_() for param in (*params, x)]
    first, second, x = copies
    if use is not _grouped:
        out = F.linear(F.linear(x, first).tanh(), second)
    else:
        out = torch.cat([F.linear(x[:2], first), F.linear(x[2:], second)])
    return list(torch.autograd.grad(out.square().sum(), copies))


class Layers:
    """Two weights in a buffer, at the beginning of a step with weight passes."""

    def __init__(self, use: Use, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        shapes = [(OUT, IN), (OUT, OUT)] if use is not _grouped else [(OUT, IN)] * 2
        self.use, self.weight_grads = use, WeightGrads()
        generator = torch.Generator().manual_seed(1)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        self.inputs = [torch.randn(TOKENS, IN, generator=generator).to(dtype) for _ in range(3)]
        specs = [NamedParam(f"w{n}", f"w{n}", ParamSpec(tuple(p.shape)), p) for n, p in enumerate(self.params)]
        group = single_process("cpu").dp
        self.buffer = FlatBuffer(specs, grad_dtype, group, 1, weight_grads=self.weight_grads)
        self.buffer.grads_flat.fill_(torch.nan)
        self.buffer.begin_grads()
        self.weight_grads.begin_step(separate=True)

    def backward(self, number: int) -> Tensor:
        """Run forward and backward of an input; return its gradient."""
        x = self.inputs[number].detach().requires_grad_()
        out = self.use(self.params, x)
        with self.weight_grads.recording(number):
            out.square().sum().backward()
        assert x.grad is not None
        return x.grad

    def grads(self) -> list[Tensor]:
        slots = {slot.name: slot for bucket in self.buffer.buckets for slot in bucket.slots}
        return [
            self.buffer.grads_flat[slots[f"w{n}"].start : slots[f"w{n}"].stop].view(param.shape)
            for n, param in enumerate(self.params)
        ]


@pytest.mark.parametrize(
    ("use", "dtype", "grad_dtype", "tolerance"),
    [
        (_linear, torch.float64, torch.float64, 1e-12),
        (_linear, torch.float32, torch.float32, 1e-5),
        (_recomputed, torch.float32, torch.float32, 1e-5),
        (_linear, torch.bfloat16, torch.float32, 3e-2),
        (_grouped, torch.float64, torch.float64, 1e-12),
        (_grouped, torch.float32, torch.float32, 1e-5),
    ],
)
def test_weight_passes_add_what_backward_recorded(
    use: Use, dtype: torch.dtype, grad_dtype: torch.dtype, tolerance: float
) -> None:
    layers = Layers(use, dtype, grad_dtype)
    sums = [torch.zeros(param.shape, dtype=grad_dtype) for param in layers.params]
    for number, x in enumerate(layers.inputs):
        *grads, grad_x = _reference(use, layers.params, x)
        torch.testing.assert_close(layers.backward(number), grad_x, rtol=tolerance, atol=tolerance)
        sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
    assert all(grad.isnan().all() for grad in layers.grads()), "backward has computed a weight's gradient"
    for number in (1, 0, 2):
        layers.weight_grads.compute(number)
    layers.buffer.complete_grads()
    torch.testing.assert_close(layers.grads(), sums, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("use", [_linear, _recomputed, _grouped])
def test_a_bucket_is_full_after_its_last_weight_pass(use: Use) -> None:
    layers, full = Layers(use, torch.float32, torch.float32), list[int]()
    layers.backward(0)
    layers.backward(1)
    layers.buffer.notify_when_full(full.append)
    layers.backward(2)
    for number in (0, 1):
        layers.weight_grads.compute(number)
        assert full == []
    layers.weight_grads.compute(2)
    assert sorted(full) == list(range(len(layers.buffer.buckets)))


def test_records_of_an_abandoned_step_are_forgotten() -> None:
    layers = Layers(_linear, torch.float32, torch.float32)
    layers.backward(1)
    layers.buffer.begin_grads()
    layers.weight_grads.begin_step(separate=True)
    with pytest.raises(KeyError):
        layers.weight_grads.compute(1)
    full = list[int]()
    layers.buffer.notify_when_full(full.append)
    layers.backward(0)
    layers.weight_grads.compute(0)
    assert sorted(full) == list(range(len(layers.buffer.buckets)))
    *expected, _ = _reference(_linear, layers.params, layers.inputs[0])
    torch.testing.assert_close(layers.grads(), expected, rtol=1e-5, atol=1e-5)


def test_backward_computes_all_gradients_in_a_schedule_without_weight_passes() -> None:
    layers = Layers(_linear, torch.float64, torch.float64)
    layers.weight_grads.begin_step(separate=False)
    _linear(layers.params, layers.inputs[0]).square().sum().backward()
    layers.buffer.complete_grads()
    *expected, _ = _reference(_linear, layers.params, layers.inputs[0])
    torch.testing.assert_close(layers.grads(), expected, rtol=1e-12, atol=1e-12)
