"""PowerSGD against torch's own communication hook, step by step."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from megatron.compression.builtin import BUILTIN
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.reducer import GradBucket, ParamRange
from tests.support.spawn import run_ranks

SHAPES = {"a": (12, 8), "b": (12, 8), "c": (20, 6), "bias": (7,), "tiny": (2, 2)}
RANK, WARMUP, STEPS = 2, 2, 8


class _Gradients(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.weights[name] * gradients[name]).sum() for name in SHAPES]).sum()


def _gradient(name: str, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def _theirs(steps: int, error_feedback: bool) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Averages after each step, and the first Q of each matrix."""
    model = DistributedDataParallel(_Gradients())
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=RANK,
        start_powerSGD_iter=WARMUP,
        min_compression_rate=1,
        use_error_feedback=error_feedback,
        warm_start=True,
        random_seed=5,
    )
    rank = dist.get_rank()
    order: list[str] = []
    step = 0

    def hook(state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Notes the order of the gradients in the bucket: the hook draws its first Qs in that order."""
        if step == WARMUP:
            order.extend(
                next(name for name in SHAPES if torch.equal(_gradient(name, step, rank), grad))
                for grad in bucket.gradients()
            )
        return powerSGD_hook.powerSGD_hook(state, bucket)

    hook.__annotations__.clear()  # torch compares them with classes, and these are strings
    model.register_comm_hook(state, hook)
    averages: list[dict[str, Tensor]] = []
    for step in range(steps):
        model.zero_grad()
        model({name: _gradient(name, step, rank) for name in SHAPES}).backward()
        averages.append({n: p.grad.clone() for n, p in model.module.weights.items() if p.grad is not None})
    matrices = [name for name in order if len(SHAPES[name]) == 2 and name != "tiny"]
    shapes = dict.fromkeys(SHAPES[name] for name in matrices)
    starts = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.RandomState(5).randint(1_000_000_000)))
        for name in sorted(matrices, key=lambda name: list(shapes).index(SHAPES[name])):
            starts[name] = torch.randn(1, SHAPES[name][1], RANK)[0]
    return averages, starts


def _ours(steps: int, starts: dict[str, Tensor], feedback: str) -> list[dict[str, Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(dist.group.WORLD, tuple(range(size)), rank, "dp", "gloo")
    text = f"dp-grad=powersgd,rank={RANK},warmup={WARMUP},error-feedback={feedback}"
    plan = CompressionPlan(read_specs([text], Registry(BUILTIN), RunLength()))
    places, position = [], 0
    for name, shape in SHAPES.items():
        places.append(ParamRange(name, position, shape))
        position += torch.Size(shape).numel()
    flat = torch.zeros(position)
    reducer = GradReducer([GradBucket(flat, tuple(places))], group, plan, Ledger(), sharded=False)
    for unit in reducer.units[0]:
        unit.state.tensors["q"] = torch.stack([starts[slot.name] for slot in unit.ranges])
    averages = []
    for step in range(steps):
        for slot in places:
            flat[slot.start : slot.stop].view(slot.shape).copy_(_gradient(slot.name, step, rank) / size)
        reducer.begin_step(step, 1.0)
        reducer.finish_reduction()
        for unit in reducer.units[0]:
            unit.state.commit()
        averages.append({slot.name: flat[slot.start : slot.stop].view(slot.shape).clone() for slot in places})
    return averages


def _compare(feedback: str) -> list[str]:
    theirs, starts = _theirs(STEPS, feedback != "off")
    ours = _ours(STEPS, starts, feedback)
    wrong = []
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in SHAPES:
            error = float((a[name] - b[name]).abs().max())
            if error > 1e-5:
                wrong.append(f"step {step} {name}: {error}")
    return wrong


def test_powersgd_equals_torchs_hook_with_the_aggregate_residual() -> None:
    assert run_ranks(3, _compare, "aggregate") == [[]] * 3


def test_powersgd_equals_torchs_hook_without_error_feedback() -> None:
    assert run_ranks(2, _compare, "off") == [[]] * 2


def test_the_local_residual_is_another_algorithm() -> None:
    """The oracle can tell the definitions apart."""
    assert all(run_ranks(2, _compare, "local"))
