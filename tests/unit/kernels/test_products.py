"""Native matrix products against sums in fp64, on any processor that supports them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
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
def called() -> Iterator[list[str]]:
    """Choose native products; return the names of the called operators."""
    with products_chosen(True) as calls:
        yield calls


def _matrix(rows: int, columns: int, seed: int, transposed: bool = False) -> Tensor:
    numbers = torch.randn(rows * columns, generator=torch.Generator().manual_seed(seed))
    return numbers.view(columns, rows).t() if transposed else numbers.view(rows, columns)


def _check(actual: Tensor, a: Tensor, b: Tensor, addend: Tensor | None = None) -> None:
    """Check that the error is within the rounding of k products."""
    a, b = a.double(), b.double()
    expected, room = a @ b, a.abs() @ b.abs()
    if addend is not None:
        expected, room = expected + addend.double(), room + addend.double().abs()
    assert ((actual.double() - expected).abs() <= room * (a.shape[1] + 2) * 2.0**-24).all()


def _product(a: Tensor, b: Tensor, add_to: Tensor | None = None) -> Tensor:
    out = torch.full((a.shape[0], b.shape[1]), torch.nan) if add_to is None else add_to.clone()
    torch.ops.megatron_cc.product(a, b, out, add_to is not None)
    return out


def _of_parts() -> bool:
    """Whether products split numbers into bf16 parts."""
    return bool(torch.ops.megatron_cc.smallest_product() == OF_PARTS)


OF_PARTS = 256
"""Smallest product for which AMX pays; without AMX it is 16."""
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([95, 96, 97, 191, 192, 193, 255, 257, 600]))
DEPTHS = st.one_of(SIZES, st.sampled_from([511, 512, 513, 1025]))


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, DEPTHS, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 100))
def test_a_product_of_any_shape(m: int, n: int, k: int, across: bool, down: bool, adds: bool, seed: int) -> None:
    a, b = _matrix(m, k, seed, across), _matrix(k, n, seed + 1, down)
    addend = _matrix(m, n, seed + 2) if adds else None
    _check(_product(a, b, addend), a, b, addend)


@pytest.mark.parametrize(("m", "n", "k"), [(40, 2100, 70), (1000, 30, 1100), (7, 1025, 513)])
def test_a_product_of_several_blocks(m: int, n: int, k: int) -> None:
    for across in (False, True):
        a, b = _matrix(m, k, 1, across), _matrix(k, n, 2, across)
        _check(_product(a, b), a, b)


def test_factors_with_any_strides() -> None:
    a, b = _matrix(50, 70, 1)[::2, 1::3], _matrix(90, 50, 2)[:46:2, ::2]
    around = torch.full((27, 40), 7.0)
    torch.ops.megatron_cc.product(a, b, around[1:26, 5:30], False)
    _check(around[1:26, 5:30], a, b)
    around[1:26, 5:30] = 7.0
    assert (around == 7.0).all()  # nothing outside the result was written
    row = _matrix(1, 9, 3)
    _check(_product(row.expand(30, 9), b[:9]), row.expand(30, 9), b[:9])


def test_non_finite_numbers_stay_visible() -> None:
    """Where numbers are split into parts, infinities become NaN."""
    a, b = _matrix(20, 30, 1), _matrix(30, 40, 2)
    a[3, 4], b[5, 6] = torch.nan, torch.inf
    actual, expected = _product(a, b), a @ b
    assert torch.equal(actual.isfinite(), expected.isfinite())
    if not _of_parts():
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.isinf(), expected.isinf())


@pytest.mark.parametrize("sizes", [(70, 90, 300), (64, 33, 1100)])
def test_errors_are_similar_to_those_of_torchs_products(sizes: tuple[int, int, int]) -> None:
    """Relative to the product of absolute values, for similar and different exponents; with AMX no larger."""
    m, n, k = sizes
    for spread in (0.0, 3.0):
        a, b = (x * (spread * _matrix(x.shape[0], x.shape[1], 3)).exp() for x in (_matrix(m, k, 1), _matrix(k, n, 2)))
        exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        error, torch_error = (
            ((product.double() - exact) / magnitude).square().mean().sqrt() for product in (_product(a, b), a @ b)
        )
        assert error <= (1.0 if _of_parts() else 2.0) * torch_error


def test_small_and_large_numbers() -> None:
    """A factor loses less than 2^-126; numbers whose parts overflow may become NaN."""
    for size in (1e-42, 1e-37, 1e-30, 1e-20, 1e20, 1e38):
        a, b = _matrix(20, 30, 1) * size, _matrix(30, 40, 2) * min(1.0, 1.0 / size)
        error = (_product(a, b).double() - a.double() @ b.double()).abs()
        room = a.double().abs() @ b.double().abs()
        lost = 2.0**-126 * (a.abs() + b.abs().sum(0).max()).max().item() * 32
        assert (error <= room * 32 * 2.0**-24 + lost).all()
    huge = torch.full((16, 16), torch.finfo(torch.float32).max)
    tiny = torch.eye(16) * 1e-10
    actual = _product(huge, tiny)
    assert (actual.isnan() | torch.isclose(actual, torch.tensor(3.4028235e28))).all()


TILE_SETTINGS = """
#include <cstring>
extern "C" void set(const void *of) { char s[64]; std::memcpy(s, of, 64); __asm__ volatile("ldtilecfg %0" ::"m"(s)); }
extern "C" void get(void *to) { char s[64]; __asm__ volatile("sttilecfg %0" : "=m"(s)); std::memcpy(to, s, 64); }
"""


def test_products_restore_the_tile_settings(tmp_path: Path) -> None:
    """Other libraries, such as oneDNN, use tiles in the same thread."""
    if not _of_parts():
        pytest.skip("these products use no tiles")
    source, library = tmp_path / "tiles.cpp", tmp_path / "tiles.so"
    source.write_text(TILE_SETTINGS)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    tiles = ctypes.CDLL(str(library))
    theirs = bytes([1, *[0] * 15, *[48, 0] * 8, *[0] * 16, *[5] * 8, *[0] * 8])  # 8 tiles of 5 rows of 48 bytes
    buffer = ctypes.create_string_buffer(64)
    torch.set_num_threads(1)
    try:
        for settings in (theirs, bytes(64)):
            tiles.set(settings)
            _check(_product(_matrix(40, 70, 1), _matrix(70, 50, 2)), _matrix(40, 70, 1), _matrix(70, 50, 2))
            tiles.get(buffer)
            assert buffer.raw == settings
    finally:
        tiles.set(bytes(64))


def test_a_number_depends_only_on_its_row_and_column() -> None:
    """The same bits with any number of threads and any other rows, columns and groups."""
    a, b = _matrix(330, 700, 1), _matrix(700, 1100, 2)
    outputs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(_product(a, b))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(_product(a[100:117], b), outputs[0][100:117])
    assert torch.equal(_product(a, b[:, 50:67]), outputs[0][:, 50:67])
    out = torch.empty(330, 1100)
    ends = torch.tensor([200, 330], dtype=torch.int32)
    torch.ops.megatron_cc.grouped_product(a, torch.stack([b, b]), ends, out)
    assert torch.equal(out, outputs[0])


@pytest.mark.parametrize("counts", [[3, 0, 17, 44], [0, 0, 64, 0], [64, 0, 0, 0], [16, 16, 16, 16]])
def test_each_group_has_its_factor(counts: list[int]) -> None:
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
def test_a_linear_layer_and_its_gradients(bias: bool, called: list[str]) -> None:
    x, weight = torch.randn(5, 9, 30, requires_grad=True), torch.randn(50, 30, requires_grad=True)
    bias_o = torch.randn(50, requires_grad=True) if bias else None
    inputs = [t for t in (x, weight, bias_o) if t is not None]
    out = linear(x, weight, bias_o)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    assert called == ["product"] * 3
    linear(x, weight, bias_o).add_(1.0)  # like an in-place sum over ranks
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = F.linear(wide[0], wide[1], wide[2] if bias else None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for own_grad, grad in zip(grads, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(own_grad.double(), grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [10, 16, 30])
def test_experts_of_any_width_have_gradients(width: int) -> None:
    """Weights with few rows: the forward does not group products that backward does not support."""
    changes = {"model": {"num_experts": [2], "moe_ffn_hidden_size": width}}
    norms = tiny_run(changes, 2).grad_norms
    with products_chosen(False):
        torch.testing.assert_close(norms, tiny_run(changes, 2).grad_norms, rtol=1e-4, atol=0)


def test_torch_counts_the_operations_of_native_products() -> None:
    x, weight = torch.randn(20, 30, requires_grad=True), torch.randn(50, 30, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, None).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 20 * 30 * 50


def test_torch_multiplies_unsupported_factors(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, other types, other devices, and compiled code."""
    monkeypatch.setattr(products, "smallest_product", lambda: 16)
    few, rows, weight = torch.randn(15, 30), torch.randn(16, 30), torch.randn(50, 30)
    assert products.multiplies(rows, weight)
    assert not products.multiplies(few, weight)
    for dtype in (torch.float64, torch.bfloat16):
        assert not products.multiplies(rows.to(dtype), weight.to(dtype))
    assert not products.multiplies(rows.to("meta"), weight.to("meta"))
    torch.testing.assert_close(linear(few, weight, None), F.linear(few, weight))
    assert not called
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(rows, weight, None), F.linear(rows, weight))
    assert not called


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"num_experts": [4], "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True},
    ],
)
def test_training_matches_torchs_products(form: dict[str, object], called: list[str]) -> None:
    own_run = tiny_run({"model": form}, 4)
    assert called.count("product") > 4 * 4 * 3 * 3  # iterations, micro-batches, products of a layer and of the head
    assert ("grouped_product" in called) == ("num_experts" in form)
    with products_chosen(False) as calls:
        torchs = tiny_run({"model": form}, 4)
    assert not {"product", "grouped_product"} & {*calls}
    torch.testing.assert_close(own_run.losses, torchs.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(own_run.grad_norms, torchs.grad_norms, rtol=1e-4, atol=0)


@pytest.mark.parametrize("groups", [0, 2])
def test_second_derivatives_match_torchs_products(groups: int, called: list[str]) -> None:
    """Curvature along the gradient, through the gradients of all factors."""
    torch.manual_seed(0)
    x, weights = torch.randn(32, 24, requires_grad=True), torch.randn(2, 16, 24, requires_grad=True)

    def curvature(x: Tensor, weights: Tensor, plain: bool) -> tuple[Tensor, ...]:
        pairs = zip(x.split(32 // max(groups, 1)), weights, strict=False)
        if plain:
            out = torch.cat([F.linear(*pair) for pair in pairs])
        elif groups:
            out = grouped_linear(x, weights.unbind(), torch.full((groups,), 32 // groups))
        else:
            out = linear(x, weights[0], None)
        first = torch.autograd.grad(out.tanh().sum(), (x, weights), create_graph=True)
        return torch.autograd.grad(torch.stack([grad.square().sum() for grad in first]).sum(), (x, weights))

    got = curvature(x, weights, plain=False)
    assert called.count("grouped_product" if groups else "product") == 3  # not in a differentiable backward
    wide_x, wide_weights = (t.detach().double().requires_grad_() for t in (x, weights))
    for actual, expected in zip(got, curvature(wide_x, wide_weights, plain=True), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("size", [15, 16])
def test_every_dimension_must_be_large_enough(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For groups, the average dimension."""
    monkeypatch.setattr(products, "smallest_product", lambda: 16)
    wide, takes = 50, size == 16
    for m, n, k in ((size, wide, wide), (wide, size, wide), (wide, wide, size)):
        assert products.multiplies(torch.empty(m, k), torch.empty(k, n)) == takes
        assert products.multiplies(torch.empty(m, k), torch.empty(n, k)) == takes  # a linear layer's weight
        assert products.multiplies(torch.empty(3 * m, k), torch.empty(3, k, n), 3) == takes
        assert products.multiplies(torch.empty(m, 3 * k), torch.empty(3 * k, n), 3) == takes
    total = torch.zeros(wide, wide)
    calls: list[str] = []
    operators = SimpleNamespace(product=lambda *args: calls.append("product"))
    monkeypatch.setattr(native, "operators", lambda: operators)
    products.add_product_(total, torch.empty(size, wide), torch.empty(size, wide))
    assert calls == ["product"] * takes
    assert not products.multiplies(torch.empty(5, 0), torch.empty(0, 5))


def _flags() -> set[str]:
    cpu_info = Path("/proc/cpuinfo").read_text()
    return set(next(line for line in cpu_info.splitlines() if line.startswith("flags")).split())


def _has_amx() -> bool:
    """Whether the processor has the instructions of AMX products, by /proc/cpuinfo."""
    return {"amx_tile", "amx_bf16", "avx512_bf16", "avx512vl"} <= _flags()


def _outdoes_mkl() -> bool:
    """Whether this is a processor with AMX, or of AMD before Zen 4, by /proc/cpuinfo."""
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text() and "avx512f" not in _flags()
    return amd or (_has_amx() and "MCC_ISA" not in os.environ)


def test_only_amx_splits_numbers() -> None:
    assert _of_parts() == (_has_amx() and "MCC_ISA" not in os.environ)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("instructions", ["avx512", "avx2"])
def test_products_of_older_processors(instructions: str) -> None:
    """The tests of products in a process without AMX."""
    env = {**os.environ, "MCC_ISA": instructions}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not older and not experts and not training",
        __file__,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.parametrize("outdoes", [True, False])
def test_native_products_are_the_default_where_they_are_faster(outdoes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(products.CHOICE, raising=False)
    monkeypatch.setattr(
        native, "operators", lambda: SimpleNamespace(multiplies=lambda: True, outdoes_mkl=lambda: outdoes)
    )
    assert own_products.__wrapped__() == outdoes
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)  # the speed of other libraries is not known
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
