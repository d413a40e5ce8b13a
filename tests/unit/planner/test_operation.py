"""Single operations of a dry run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron.planner.operation import Cost, run_operation

aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mul.Tensor, (_meta(3, 1), _meta(4).bfloat16())),
        (aten.add.Scalar, (_meta(3, dtype=torch.int64), 1)),
        (aten.add.Scalar, (_meta(3, dtype=torch.int64), 1.0)),
        (aten.gelu.default, (_meta(3, 4).t(),)),
        (aten.native_layer_norm.default, (_meta(2, 3, 4), [4], _meta(4), None, 1e-5)),
        (aten.native_layer_norm_backward.default,
         (_meta(2, 4), _meta(2, 4), [4], _meta(2, 1), _meta(2, 1), _meta(4), None, [True, True, False])),
        (aten.split_with_sizes_copy.default, (_meta(5, 2), [2, 3])),
        (aten.sum.dim_IntList, (_meta(3, 4), [0], True)),
    ],
)  # fmt: skip
def test_repeated_operations_return_the_same_forms(func: Any, args: Any) -> None:
    expected = func(*args)
    for _ in range(2):
        out, cost = run_operation(func, args, {})
        assert type(out) is type(expected)
        for x, y in zip(tree_leaves(out), tree_leaves(expected), strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
                assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes()
        tensors = [x for x in tree_leaves((args, expected)) if isinstance(x, Tensor)]
        assert cost == Cost(0.0, sum(x.nbytes for x in tensors))


def test_results_in_the_storage_of_an_argument_stay_there() -> None:
    x = _meta(2, 3)
    for _ in range(2):
        assert run_operation(aten.add_.Tensor, (x, x), {})[0] is x
        for func, args in ((aten._unsafe_view.default, (x, [6])), (aten.t.default, (x,))):
            out, cost = run_operation(func, args, {})
            assert out.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert cost is None
        first, second = run_operation(aten.relu.default, (x,), {})[0], run_operation(aten.relu.default, (x,), {})[0]
        assert len({each.untyped_storage()._cdata for each in (x, first, second)}) == 3


def test_operations_on_values_compute_them() -> None:
    for value in (1.0, 2.0):
        out, cost = run_operation(aten.mul.Tensor, (torch.full((3,), value), torch.full((3,), 2.0)), {})
        assert out.tolist() == [2 * value] * 3
        assert cost == Cost(0.0, 36)
    assert run_operation(aten.full.default, ([2], 3.0), {"device": torch.device("cpu")})[0].tolist() == [3.0, 3.0]


def test_products_count_flops() -> None:
    a, b, c = _meta(2, 3), _meta(3, 5), _meta(2, 5)
    assert run_operation(aten.mm.default, (a, b), {})[1] == Cost(60.0, 4 * (6 + 15 + 10))
    assert run_operation(aten.addmm_.default, (c, a, b), {})[1] == Cost(60.0, 4 * (6 + 15 + 10 + 10))
