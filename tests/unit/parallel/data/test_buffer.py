"""Gradients in flat buffers: first and later gradients, conversion, alignment and padding."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from megatron.distributed.group import Group
from megatron.distributed.topology import single_process
from megatron.kernels import native
from megatron.parallel.data.buffer import FlatBuffer, NamedParam
from megatron.parallel.tensor.grouped import grouped_linear
from megatron.parallel.tensor.linear import linear
from megatron.parallel.tensor.main_grad import main_grad_of
from megatron.parallel.tensor.shards import ParamSpec
from tests.support.products import need_products, products_chosen
from tests.support.tiny import tiny_engines


def _buffer(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, grad_dtype: torch.dtype | None = None
) -> tuple[list[nn.Parameter], FlatBuffer]:
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()}
    specs = [
        NamedParam(name, name, ParamSpec(tuple(param.shape), of_expert="experts" in name), param)
        for name, param in params.items()
    ]
    buffer = FlatBuffer(specs, grad_dtype or dtype, single_process("cpu").dp, None)
    return list(params.values()), buffer


def _begin_stale(buffer: FlatBuffer) -> None:
    """Begin a step on top of stale gradients."""
    buffer.grads_flat.fill_(torch.nan)
    buffer.begin_grads()


def _grads_of(buffer: FlatBuffer, param: nn.Parameter) -> Tensor:
    slot = next(s for b in buffer.buckets for s in b.slots if s.param is param)
    return buffer.grads_flat[slot.start : slot.stop].view(param.shape)


def test_the_first_gradient_overwrites_stale_values_and_others_are_added() -> None:
    (w, unused), buffer = _buffer({"w": (3, 4), "unused": (2, 2)})
    _begin_stale(buffer)
    for factor in (2.0, 3.0, 5.0):
        (w * factor).sum().backward()
    buffer.complete_grads()
    for param, value in ((w, 10.0), (unused, 0.0)):
        assert torch.equal(_grads_of(buffer, param), torch.full(param.shape, value))
        assert param.grad is not None
        assert param.grad.data_ptr() == _grads_of(buffer, param).data_ptr()
        assert main_grad_of(param) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [1, 5, 1 << 18])
def test_gradients_of_another_type_are_converted_and_added_in_fp32(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in the type of the parameters would be rounded."""
    monkeypatch.setattr("megatron.parallel.tensor.main_grad._CONVERTED_ELEMENTS", at_once)
    (w, unused), buffer = _buffer({"w": (3, 4), "unused": (2, 2)}, dtype, torch.float32)
    for _ in range(2):
        _begin_stale(buffer)
        factors = [torch.full((4, 3), value, dtype=dtype).t() for value in (256.0, 0.5, 0.25)]
        factors[2][1, 2] = 3.0
        for factor in factors:
            (w * factor).sum().backward()
            assert w.grad is None
        buffer.complete_grads()
        expected = torch.stack([factor.float() for factor in factors]).sum(0)
        assert torch.equal(_grads_of(buffer, w), expected)
        assert not torch.equal(expected, expected.to(torch.bfloat16).float())
        assert torch.equal(_grads_of(buffer, unused), torch.zeros(2, 2))


def test_a_bucket_of_another_type_is_complete_when_announced() -> None:
    w, late = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    four_replicas = cast(Group, SimpleNamespace(size=4))
    params = [NamedParam(name, name, ParamSpec((3,)), param) for name, param in (("w", w), ("late", late))]
    buffer = FlatBuffer(params, torch.float32, four_replicas, None, sharded=True)
    _begin_stale(buffer)
    launched: list[list[float]] = []
    buffer.notify_when_full(lambda index: launched.append(buffer.grads_of(buffer.buckets[index]).tolist()))
    (2 * w).sum().backward()
    assert not launched
    (3 * late).sum().backward()
    assert launched == [[3.0, 3.0, 3.0, 2.0, 2.0, 2.0, *[0.0] * 26]]


def test_the_padding_of_a_full_bucket_is_zero() -> None:
    """At the moment when it is launched, before the gradients of the step are completed."""
    w = nn.Parameter(torch.ones(3))
    two_replicas = cast(Group, SimpleNamespace(size=2))
    buffer = FlatBuffer([NamedParam("w", "w", ParamSpec((3,)), w)], torch.float32, two_replicas, None, sharded=True)
    _begin_stale(buffer)
    launched: list[list[float]] = []
    buffer.notify_when_full(lambda index: launched.append(buffer.grads_of(buffer.buckets[index]).tolist()))
    w.sum().backward()
    assert launched == [[1.0, 1.0, 1.0, *[0.0] * 13]]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket", [None, 1, 300])
def test_odd_sizes_do_not_misalign_others(replicas: int, bucket: int | None) -> None:
    """Products on GPUs need factors aligned to 16 bytes of bf16 within a bucket or share."""
    sizes = ((2,), (97, 32), (3, 5), (24,), (16, 24), (1,), (8, 8), (7,))
    params = [
        NamedParam(f"p{n}", f"p{n}", ParamSpec(size), nn.Parameter(torch.zeros(size))) for n, size in enumerate(sizes)
    ]
    group = cast(Group, SimpleNamespace(size=replicas))
    buffer = FlatBuffer(params, torch.float32, group, bucket, sharded=True)
    assert all(b.start % 8 == 0 and (b.stop - b.start) % (8 * replicas) == 0 for b in buffer.buckets)
    slots = [slot for b in buffer.buckets for slot in b.slots]
    assert len(slots) == len(sizes)
    assert all(slot.start % 8 == 0 for slot in slots if (slot.stop - slot.start) % 8 == 0)


def test_the_end_of_a_step_completes_its_gradients() -> None:
    engines = tiny_engines({})
    for buffer in engines.buffers:
        _begin_stale(buffer)
    engines.sync.begin_step(0, 1.0)
    assert engines.sync.reduce_gradients(1.0).finite
    assert not any(buffer.grads_flat.any() for buffer in engines.buffers)


Form = Callable[[Tensor, nn.Parameter, list[nn.Parameter]], Tensor]


def _linear(x: Tensor, w: nn.Parameter, _: list[nn.Parameter]) -> Tensor:
    return linear(x, w, None)


def _stacked(x: Tensor, w: nn.Parameter, _: list[nn.Parameter]) -> Tensor:
    return linear(x, w.view(2, 8, 24).flatten(0, -2), None)


def _grouped(x: Tensor, w: nn.Parameter, weights: list[nn.Parameter]) -> Tensor:
    return grouped_linear(x, [w, *weights], torch.tensor([20, 0, 12]))


@need_products
@pytest.mark.parametrize("form", [_linear, _stacked, _grouped])
@pytest.mark.parametrize("times", [1, 2])
def test_products_write_the_first_gradient_into_the_buffer(
    form: Form, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a parameter is used twice in a backward, and again in the next."""
    (w, *weights), buffer = _buffer({f"experts.{number}.up.weight": (16, 24) for number in range(3)})
    used = [w, *weights] if form is _grouped else [w]
    x = torch.randn(32, 24)
    written: list[int] = []
    with products_chosen(True):
        plain = native.operators()

        def product(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
            written.append(out.data_ptr())
            plain.product(a, b, out, add)

        def grouped_product(a: Tensor, b: Tensor, ends: Tensor, out: Tensor) -> None:
            written.append(out.data_ptr())
            plain.grouped_product(a, b, ends, out)

        operators = SimpleNamespace(product=product, grouped_product=grouped_product)
        monkeypatch.setattr(native, "operators", lambda: operators)
        loss = torch.stack([form(x, w, weights).square().sum() for _ in range(times)]).sum()
        expected = torch.autograd.grad(form(x, w, weights).square().sum(), used)
        _begin_stale(buffer)
        for step in range(2):
            written.clear()
            loss.backward(retain_graph=True)
            assert written.count(_grads_of(buffer, used[0]).data_ptr()) == (step == 0), (
                "written into the buffer once, at first"
            )
    buffer.complete_grads()
    for param, grad in zip(used, expected, strict=True):
        torch.testing.assert_close(_grads_of(buffer, param), 2 * times * grad, rtol=1e-5, atol=1e-5)
        assert param.grad is not None
        assert param.grad.data_ptr() == _grads_of(buffer, param).data_ptr()
