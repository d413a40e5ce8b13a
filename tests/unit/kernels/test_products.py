"""This library's own matrix products: sums in fp64 as the oracle, on any processor that has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.kernels import native, products
from megatron.kernels.products import own_products
from megatron.parallel.tensor.grouped import grouped_linear
from megatron.parallel.tensor.linear import linear
from tests.support.products import need_products, products_chosen
from tests.support.tiny import tiny_run

pytestmark = need_products


@pytest.fixture(autouse=True)
def own() -> Iterator[list[str]]:
    """Own products, in each test; the names of the operators that are called."""
    with products_chosen(True) as calls:
        yield calls


def _matrix(rows: int, columns: int, seed: int, transposed: bool = False) -> Tensor:
    numbers = torch.randn(rows * columns, generator=torch.Generator().manual_seed(seed))
    return numbers.view(columns, rows).t() if transposed else numbers.view(rows, columns)


def _check(found: Tensor, a: Tensor, b: Tensor, held: Tensor | None = None) -> None:
    """Each number is within what rounding of k products may cost of the sum in fp64."""
    a, b = a.double(), b.double()
    wanted, room = a @ b, a.abs() @ b.abs()
    if held is not None:
        wanted, room = wanted + held.double(), room + held.double().abs()
    assert ((found.double() - wanted).abs() <= room * (a.shape[1] + 2) * 2.0**-24).all()


def _product(a: Tensor, b: Tensor, add_to: Tensor | None = None) -> Tensor:
    out = torch.full((a.shape[0], b.shape[1]), torch.nan) if add_to is None else add_to.clone()
    torch.ops.megatron_cc.product(a, b, out, add_to is not None)
    return out


SIZES = st.one_of(st.integers(0, 40), st.sampled_from([95, 96, 97, 191, 192, 193, 255, 257, 600]))
DEPTHS = st.one_of(SIZES, st.sampled_from([511, 512, 513, 1025]))


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, DEPTHS, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 100))
def test_a_product_of_any_shape(m: int, n: int, k: int, across: bool, down: bool, adds: bool, seed: int) -> None:
    a, b = _matrix(m, k, seed, across), _matrix(k, n, seed + 1, down)
    held = _matrix(m, n, seed + 2) if adds else None
    _check(_product(a, b, held), a, b, held)


@pytest.mark.parametrize(("m", "n", "k"), [(40, 2100, 70), (1000, 30, 1100), (7, 1025, 513)])
def test_a_product_of_several_blocks(m: int, n: int, k: int) -> None:
    for across in (False, True):
        a, b = _matrix(m, k, 1, across), _matrix(k, n, 2, across)
        _check(_product(a, b), a, b)


def test_factors_with_numbers_at_any_distance() -> None:
    a, b = _matrix(50, 70, 1)[::2, 1::3], _matrix(90, 50, 2)[:46:2, ::2]
    around = torch.full((27, 40), 7.0)
    torch.ops.megatron_cc.product(a, b, around[1:26, 5:30], False)
    _check(around[1:26, 5:30], a, b)
    around[1:26, 5:30] = 7.0
    assert (around == 7.0).all()  # nothing beside the result was written
    row = _matrix(1, 9, 3)
    _check(_product(row.expand(30, 9), b[:9]), row.expand(30, 9), b[:9])


def test_numbers_that_are_not_finite_stay_visible() -> None:
    a, b = _matrix(20, 30, 1), _matrix(30, 40, 2)
    a[3, 4], b[5, 6] = torch.nan, torch.inf
    found, wanted = _product(a, b), a @ b
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())


def test_a_number_depends_on_nothing_but_its_row_and_column() -> None:
    """The same bits with any number of threads, and beside any other rows, columns and groups."""
    a, b = _matrix(330, 700, 1), _matrix(700, 1100, 2)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(_product(a, b))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(_product(a[100:117], b), found[0][100:117])
    assert torch.equal(_product(a, b[:, 50:67]), found[0][:, 50:67])
    out = torch.empty(330, 1100)
    ends = torch.tensor([200, 330], dtype=torch.int32)
    torch.ops.megatron_cc.grouped_product(a, torch.stack([b, b]), ends, out)
    assert torch.equal(out, found[0])


@pytest.mark.parametrize("counts", [[3, 0, 17, 44], [0, 0, 64, 0], [64, 0, 0, 0], [16, 16, 16, 16]])
def test_groups_have_factors_of_their_own(counts: list[int]) -> None:
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    rows, weights, grad = _matrix(64, 40, 1), torch.randn(4, 33, 40), _matrix(64, 33, 2)
    out = products.grouped_product(rows, weights.transpose(1, 2), ends)
    grads = products.grouped_product(grad.t(), rows, ends)
    first = 0
    for group, end in enumerate(ends.tolist()):
        _check(out[first:end], rows[first:end], weights[group].t())
        _check(grads[group], grad[first:end].t(), rows[first:end])
        assert counts[group] or not grads[group].any()
        first = end


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_and_its_gradients(bias: bool, own: list[str]) -> None:
    x, weight = torch.randn(5, 9, 30, requires_grad=True), torch.randn(50, 30, requires_grad=True)
    bias_o = torch.randn(50, requires_grad=True) if bias else None
    inputs = [t for t in (x, weight, bias_o) if t is not None]
    out = linear(x, weight, bias_o)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    assert own == ["product"] * 3
    linear(x, weight, bias_o).add_(1.0)  # as a sum over ranks works in place
    wide = [t.detach().double().requires_grad_() for t in inputs]
    wanted = F.linear(wide[0], wide[1], wide[2] if bias else None)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    for own_grad, grad in zip(grads, torch.autograd.grad(wanted.square().sum(), wide), strict=True):
        torch.testing.assert_close(own_grad.double(), grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [10, 16, 30])
def test_experts_of_any_width_have_gradients(width: int) -> None:
    """Adjacent weights whose rows are few: what the products of backward do not take, the forward does not group."""
    changes = {"model": {"num_experts": [2], "moe_ffn_hidden_size": width}}
    norms = tiny_run(changes, 2).grad_norms
    with products_chosen(False):
        torch.testing.assert_close(norms, tiny_run(changes, 2).grad_norms, rtol=1e-4, atol=0)


def test_torch_counts_the_operations_of_own_products() -> None:
    x, weight = torch.randn(20, 30, requires_grad=True), torch.randn(50, 30, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, None).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 20 * 30 * 50


def test_what_is_left_to_torch(own: list[str]) -> None:
    """Few rows, other types, other devices, and code that is being compiled."""
    few, rows, weight = torch.randn(15, 30), torch.randn(16, 30), torch.randn(50, 30)
    assert products.multiplies(rows, weight)
    assert not products.multiplies(few, weight)
    for dtype in (torch.float64, torch.bfloat16):
        assert not products.multiplies(rows.to(dtype), weight.to(dtype))
    assert not products.multiplies(rows.to("meta"), weight.to("meta"))
    torch.testing.assert_close(linear(few, weight, None), F.linear(few, weight))
    assert not own
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(rows, weight, None), F.linear(rows, weight))
    assert not own


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"num_experts": [4], "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True},
    ],
)
def test_training_is_that_with_torchs_products(form: dict[str, object], own: list[str]) -> None:
    own_run = tiny_run({"model": form}, 4)
    assert own.count("product") > 4 * 4 * 3 * 3  # iterations, micro-batches, products of a layer and of the head
    assert ("grouped_product" in own) == ("num_experts" in form)
    with products_chosen(False) as calls:
        torchs = tiny_run({"model": form}, 4)
    assert not {"product", "grouped_product"} & {*calls}
    torch.testing.assert_close(own_run.losses, torchs.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(own_run.grad_norms, torchs.grad_norms, rtol=1e-4, atol=0)


@pytest.mark.parametrize("groups", [0, 2])
def test_second_derivatives_are_those_of_torchs_products(groups: int, own: list[str]) -> None:
    """Of a curvature along the gradient, which goes through the gradients of all factors."""
    x, weights = torch.randn(32, 24, requires_grad=True), torch.randn(2, 16, 24, requires_grad=True)

    def curvature(plain: bool) -> tuple[Tensor, ...]:
        pairs = zip(x.split(32 // max(groups, 1)), weights, strict=False)
        if plain:
            out = torch.cat([F.linear(*pair) for pair in pairs])
        elif groups:
            out = grouped_linear(x, weights.unbind(), torch.full((groups,), 32 // groups))
        else:
            out = linear(x, weights[0], None)
        first = torch.autograd.grad(out.tanh().sum(), (x, weights), create_graph=True)
        return torch.autograd.grad(torch.stack([grad.square().sum() for grad in first]).sum(), (x, weights))

    got = curvature(False)
    assert own.count("grouped_product" if groups else "product") == 3  # not for gradients that have gradients
    torch.testing.assert_close(got, curvature(True), rtol=1e-4, atol=1e-4)


def _outdoes_mkl() -> bool:
    """Whether this is one of AMD's processors before Zen 4, by what the system says."""
    told = Path("/proc/cpuinfo").read_text()
    flags = next(line for line in told.splitlines() if line.startswith("flags")).split()
    return "AuthenticAMD" in told and "avx512f" not in flags


@pytest.mark.parametrize("outdoes", [True, False])
def test_own_products_are_the_default_where_they_are_faster(outdoes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(products.CHOICE, raising=False)
    monkeypatch.setattr(
        native, "operators", lambda: SimpleNamespace(multiplies=lambda: True, outdoes_mkl=lambda: outdoes)
    )
    assert own_products.__wrapped__() == outdoes
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)  # another library's rate is not known
    assert not own_products.__wrapped__()
    monkeypatch.undo()
    monkeypatch.delenv(products.CHOICE, raising=False)
    monkeypatch.setattr(native, "problem_on", lambda kind: "they were not built")
    assert not own_products.__wrapped__()


@pytest.mark.parametrize("choice", ["own", "torch", "", "mine"])
def test_the_environment_chooses(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, products.CHOICE, choice)
    if choice == "mine":
        with pytest.raises(RuntimeError, match="MEGATRON_CC_PRODUCTS=mine: the choices are own and torch"):
            own_products.__wrapped__()
    else:
        assert own_products.__wrapped__() == {"own": True, "torch": False, "": _outdoes_mkl()}[choice]
    if choice == "own":
        monkeypatch.setattr(native, "problem_on", lambda kind: "they were not built")
        with pytest.raises(RuntimeError, match="MEGATRON_CC_PRODUCTS=own, but they were not built"):
            own_products.__wrapped__()
