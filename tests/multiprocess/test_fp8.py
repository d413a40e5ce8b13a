"""8-bit products on several ranks: the codes of a single rank, and runs on other layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import Trace, tiny_run

pytestmark = pytest.mark.multiprocess

S, B, H, OUT = 8, 4, 32, 64
CPU = torch.device("cpu")
RECIPES = ["tensorwise", "rowwise"]
TINY = 2.0**-24
"""Times the largest number of a tensor: rounds to zero in 8 bits, beside it."""


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _second_half_tiny(x: Tensor, dim: int) -> Tensor:
    """The same with another rank's half so small that only its own scale would keep it."""
    x = x.clone()
    x.narrow(dim, x.shape[dim] // 2, x.shape[dim] // 2).mul_(TINY)
    return x


class _Layers:
    """A column-parallel and a row-parallel layer with the parts of given weights."""

    def __init__(self, comm: TensorComm, recipe: Any, w1: Tensor, w2: Tensor) -> None:
        self.first = ColumnParallelLinear((OUT, H), False, comm, CPU, torch.bfloat16)
        self.second = RowParallelLinear(OUT, H, False, comm, CPU, torch.bfloat16)
        self.own = slice(comm.rank * OUT // comm.size, (comm.rank + 1) * OUT // comm.size)
        with torch.no_grad():
            self.first.weight.copy_(w1[self.own])
            self.second.weight.copy_(w2[:, self.own])
        for layer in (self.first, self.second):
            layer.compute_in_fp8(recipe)


def _column(layers: _Layers, x: Tensor, grad: Tensor, rows: slice) -> dict[str, Tensor]:
    x_rows = x[rows].clone().requires_grad_()
    out = layers.first(x_rows)
    out.backward(grad[..., layers.own])
    assert x_rows.grad is not None
    assert layers.first.weight.grad is not None
    return {"output": out.detach(), "input": x_rows.grad, "weight": layers.first.weight.grad}


def _row(layers: _Layers, x: Tensor, grad: Tensor, rows: slice) -> dict[str, Tensor]:
    x_columns = x[..., layers.own].clone().requires_grad_()
    out = layers.second(F.relu(x_columns))[0]
    out.backward(grad[rows])
    assert x_columns.grad is not None
    assert layers.second.weight.grad is not None
    return {"output": out.detach(), "input": x_columns.grad, "weight": layers.second.weight.grad}


def _cases() -> list[tuple[str, Any, Tensor, Tensor, Tensor, Tensor]]:
    """Split tensors with a tiny half, and products of that half alone: the other factors are zero."""
    w1, w2, x, inner, grad = (
        _noise(seed, *shape)
        for seed, shape in enumerate([(OUT, H), (H, OUT), (S, B, H), (S, B, OUT), (S, B, H)], start=1)
    )
    first = OUT // 2
    only_first = torch.cat((torch.zeros(first, H), torch.ones(OUT - first, H))).bfloat16()
    return [
        ("column, plain", _column, w1, w2, x, inner),
        ("column, small weights", _column, _second_half_tiny(w1, 0), w2, x, inner),
        ("column, small gradients", _column, w1 * only_first, w2, x, _second_half_tiny(inner, 2)),
        ("row, plain", _row, w1, w2, inner, grad),
        ("row, small inputs", _row, w1, w2 * only_first.t(), _second_half_tiny(inner, 2), grad),
        ("row, small weights", _row, w1, _second_half_tiny(w2, 1), inner, grad),
    ]


def _against_one_rank(recipe: str, sequence_parallel: bool) -> list[str]:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = Group(dist.group.WORLD, tuple(range(size)), rank, "tensor-parallel", "gloo")
    comm = TensorComm(group, Ledger(), CompressionPlan({}), sequence_parallel)
    alone = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    rows = slice(rank * S // size, (rank + 1) * S // size) if sequence_parallel else slice(None)
    wrong = []
    for name, run, w1, w2, x, grad in _cases():
        layers, full = _Layers(comm, recipe, w1, w2), _Layers(alone, recipe, w1, w2)
        tensors, expected = run(layers, x, grad, rows), run(full, x, grad, slice(None))
        # This rank's part of the whole layer's results.
        if run is _column:
            slices = {"output": (..., layers.own), "input": (rows,), "weight": (layers.own,)}
        else:
            slices = {"output": (rows,), "input": (..., layers.own), "weight": (..., layers.own)}
        for tensor_name, at in slices.items():
            theirs = expected[tensor_name][at]
            # Sums of the ranks' rounded sums; zeros there are zeros here.
            close = torch.allclose(tensors[tensor_name], theirs, rtol=2.0**-6, atol=2.0**-7 * float(theirs.abs().max()))
            if not close:
                wrong.append(f"{name}: {tensor_name}")
    return wrong


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_round_to_the_codes_of_one(recipe: str, sequence_parallel: bool) -> None:
    assert run_ranks(2, _against_one_rank, recipe, sequence_parallel) == [[], []]


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "tp2": {"parallel": {"tensor_model_parallel_size": 2}},
    "tp2 sp, recomputed": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "recompute": {"recompute_granularity": "full", "recompute_method": "uniform"},
    },
    "pp2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "pp2 zb-h1": {"parallel": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}},
    "dp2 sharded": {"parallel": {"use_distributed_optimizer": True}},
}


def _traces(recipe: str | None, names: list[str]) -> list[Trace]:
    return [tiny_run({**LAYOUTS.get(name, {}), "precision": {"bf16": True, "fp8": recipe}}, 3) for name in names]


@pytest.mark.parametrize("recipe", mark_repeats(RECIPES, keep=["tensorwise"]))  # its scales are those of all ranks
def test_layouts_agree(recipe: str) -> None:
    """Where sums have another order, to bf16's rounding, which sometimes changes a code."""
    (alone,) = _traces(recipe, ["one process"])
    (plain,) = _traces(None, ["one process"])
    assert alone.losses != plain.losses
    names = list(LAYOUTS)
    for traces in run_ranks(2, _traces, recipe, names, timeout=120):
        for name, trace in zip(names, traces, strict=True):
            assert trace.losses == pytest.approx(alone.losses, rel=2e-3), name
            assert trace.grad_norms == pytest.approx(alone.grad_norms, rel=2e-2), name
            if name == "dp2 sharded":
                assert trace.losses == alone.losses
        joint, apart = traces[names.index("pp2")], traces[names.index("pp2 zb-h1")]
        assert (joint.losses, joint.grad_norms) == (apart.losses, apart.grad_norms)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_repeats_the_codes(recipe: str) -> None:
    saved, again = (
        tiny_run({"precision": {"bf16": True, "fp8": recipe}, "recompute": recompute}, 3)
        for recompute in ({}, {"recompute_granularity": "full", "recompute_method": "uniform"})
    )
    assert (saved.losses, saved.grad_norms) == (again.losses, again.grad_norms)
