"""Memory of compressors with residuals, and their state after a step that cannot be taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.compression.builtin import BUILTIN
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.compression.state import CompressorState
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket, ParamRange
from megatron.parallel.tensor.main_grad import main_grad_of
from megatron.training.assembly import Engines
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train

SHAPES = [(96, 64)] * 3 + [(64, 48)] * 2 + [(64,)] * 2


class _LargestAllocation(TorchDispatchMode):
    """The largest memory that an operation returned and was not given, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage().data_ptr() for x in _tensors([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            if x.untyped_storage().data_ptr() not in inputs:
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [x for item in value for x in _tensors(item)] if isinstance(value, list | tuple) else []


def _state_bytes(states: list[CompressorState]) -> int:
    return sum(x.numel() * x.element_size() for state in states for x in state.tensors.values())


def _cost(spec: str) -> tuple[int, int, int]:
    """Bytes of a bucket, of the largest allocation of its fourth reduction, and of the state after it."""
    group = Group(dist.group.WORLD, tuple(range(dist.get_world_size())), dist.get_rank(), "dp", "gloo")
    places, position = [], 0
    for number, shape in enumerate(SHAPES):
        places.append(ParamRange(f"p{number}", position, shape))
        position = places[-1].stop
    flat = torch.zeros(position)
    plan = CompressionPlan(read_specs([spec], Registry(BUILTIN), RunLength()))
    reducer = GradReducer([GradBucket(flat, tuple(places))], group, plan, Ledger(), sharded=False)
    states = [unit.state for unit in reducer.units[0]]
    mode = _LargestAllocation()
    for step in range(4):
        flat.copy_(torch.randn(position, generator=torch.Generator().manual_seed(10 * step + group.rank)))
        reducer.begin_step(step, 2.0, checks=True)
        mode.nbytes = 0
        with mode:
            reducer.finish_reduction()
        if reducer.needs_update:
            reducer.observe()
        for state in states:
            state.commit()
    return flat.numel() * flat.element_size(), mode.nbytes, _state_bytes(states)


MATRICES = sum(shape[0] * shape[1] for shape in SHAPES if len(shape) > 1)
BUCKET = MATRICES + 128


@pytest.mark.parametrize(
    ("spec", "allocated", "residual_share"),
    [
        ("dp-grad=powersgd,rank=4", 0.2, MATRICES + 4 * (3 * 64 + 2 * 48)),
        ("dp-grad=powersgd,rank=4,error-feedback=aggregate", 0.2, MATRICES + 4 * (3 * 64 + 2 * 48)),
        ("dp-grad=stable-topk,density=0.05,interval=100", 0.2, MATRICES + 2 * 0.05 * MATRICES),
        ("dp-grad=topk,density=0.02", 0.2, MATRICES),
        ("dp-grad=chunked-topk,chunk=1024,k=16", 0.2, MATRICES),
        ("dp-grad=fixpoint,bits=8,error-feedback=on", 0.56, BUCKET),  # half: the part that a rank of two sums
        ("dp-grad=quantized-adam,bits=8,warmup=1", 0.56, 2 * BUCKET),  # with the momentum
    ],
)
def test_one_residual_is_kept_and_nothing_of_full_size_allocated(
    spec: str, allocated: float, residual_share: float
) -> None:
    for bucket, largest, residual_bytes in run_ranks(2, _cost, spec):
        assert 0 < largest <= allocated * bucket
        assert 0 < residual_bytes <= 4 * residual_share


def _tensors_of(engines: Engines) -> list[dict[str, Tensor]]:
    return [{name: x.clone() for name, x in state.export_tensors().items()} for state in engines.compressor_states()]


def _infinite(param: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """An infinite gradient in place of autograd's gradient or, without it, of the gradient written to the bucket."""
    if gradient is not None:
        return torch.full_like(gradient, torch.inf)
    main_grad = main_grad_of(param)
    assert main_grad is not None
    main_grad.memory.fill_(torch.inf)
    return None


def _spoilt_step(changes: dict[str, dict[str, Any]]) -> list[str]:
    """Trains, then takes a step with an infinite gradient on the last rank; returns the changes of that step."""
    engines = tiny_engines(changes)
    tiny_train(engines, 4, epoch=8)
    before = _tensors_of(engines)
    counters = [dict(state.counters) for state in engines.compressor_states()]
    handle = None
    if engines.topology.rank == engines.topology.layout.world_size - 1:
        param = next(p for p in engines.stages[-1].parameters() if p.dim() > 1)
        handle = param.register_hook(lambda gradient: _infinite(param, gradient))
    parameters = [buffer.params_flat.clone() for buffer in engines.buffers]
    tiny_train(engines, 1, epoch=8)
    if handle is not None:
        handle.remove()
    wrong = [
        f"{name} of state {number}"
        for number, (old, new) in enumerate(zip(before, _tensors_of(engines), strict=True))
        for name in old.keys() | new.keys()
        if name not in old or name not in new or not torch.equal(old[name], new[name])
    ]
    if [dict(state.counters) for state in engines.compressor_states()] != counters:
        wrong.append("counters")
    if not all(torch.equal(a, b.params_flat) for a, b in zip(parameters, engines.buffers, strict=True)):
        wrong.append("parameters")
    tiny_train(engines, 2, epoch=8)
    if not all(bool(torch.isfinite(x).all()) for state in _tensors_of(engines) for x in state.values()):
        wrong.append("not finite afterwards")
    return wrong


SPOILT: list[tuple[int, list[str], dict[str, Any]]] = [
    (
        4,
        ["dp-grad=powersgd,rank=2", "pp-backward=lowrank,rank=2,error-feedback=lazy"],
        {"pipeline_model_parallel_size": 2},
    ),
    (4, ["dp-grad=stable-topk,density=0.2,interval=3"], {"tensor_model_parallel_size": 2}),
    (2, ["dp-grad=quantized-adam,bits=8,warmup=1"], {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}),
    (2, ["dp-grad=fixpoint,bits=4,error-feedback=on"], {"use_distributed_optimizer": True}),
    (4, ["embedding=powersgd,rank=2", "pp-forward=delta,bits=4"], {"pipeline_model_parallel_size": 2}),
    (4, ["dp-grad=powersgd,rank=2,stages=first:1"], {"pipeline_model_parallel_size": 2}),
]


# The tensor-parallel ranks' sparse sums and sums of a single stage are sums over replicas like the others.
@pytest.mark.parametrize(
    ("ranks", "specs", "parallel"), mark_repeats(SPOILT, keep=[SPOILT[number] for number in (0, 2, 3, 4)])
)
def test_an_infinite_gradient_on_one_rank_changes_nothing_anywhere(
    ranks: int, specs: list[str], parallel: dict[str, Any]
) -> None:
    changes = {
        "parallel": parallel,
        "compression": {"compress": specs},
        "data": {"sample_order": "fixed"},
    }
    assert run_ranks(ranks, _spoilt_step, changes) == [[]] * ranks
