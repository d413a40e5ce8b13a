"""Where the time of a step goes on slow links: computing, coding and waiting add up to it, and each is right.

Time is not taken from a clock but made: every rank counts seconds for its computing and coding, and for its messages
on a slow link. So the figures are exact, on a busy machine too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.compression.error_feedback import ErrorFeedback
from megatron.compression.fixpoint import Quantizer
from megatron.distributed.clock import HostClock
from megatron.distributed.group import Group, Pending
from megatron.distributed.work import Work
from megatron.optimizer import optimizer
from megatron.training import assembly
from megatron.training.step import ChunkProgram, take_batches, train_step
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_batches, tiny_engines

pytestmark = pytest.mark.multiprocess

BYTES_PER_SECOND = 2e3
"""Of the links; a step of the tiny model sends some 100 kB."""

RECEIVING = 0.25
"""Seconds from posting a receive to its message."""


class _Time:
    """Seconds that this rank spent, by purpose."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spent = {"computing": 0.0, "coding": 0.0, "waiting": 0.0}

    def spend(self, kind: str, seconds: float) -> None:
        self.now += seconds
        self.spent[kind] += seconds


class _OnSlowLink:
    """A communication that is done when its link has carried it, and not before it really is."""

    def __init__(self, time: _Time, work: Work, done_at: float) -> None:
        self.time, self.work, self.done_at = time, work, done_at

    def wait(self) -> None:
        self.work.wait()
        self.time.spend("waiting", max(0.0, self.done_at - self.time.now))

    def is_completed(self) -> bool:
        return self.time.now >= self.done_at and self.work.is_completed()


class _Tick(torch.autograd.Function):
    """Backward takes a second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, time: _Time) -> Tensor:
        ctx.time = time
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.time.spend("computing", 1.0)
        return grads[0], None


def _slow_links(time: _Time) -> None:
    """Makes every group of this process slow; a link carries messages one at a time."""
    start = Group.start
    free: dict[int, float] = {}

    def slow(group: Group, operation: str, sent: int, call: Callable[[], Work | None]) -> Pending:
        pending = start(group, operation, sent, call)
        assert pending.work is not None
        begins = max(time.now, free.get(id(group), 0.0)) if sent else time.now
        done_at = begins + (sent / BYTES_PER_SECOND if sent else RECEIVING)
        free[id(group)] = done_at
        pending.work = _OnSlowLink(time, pending.work, done_at)
        return pending

    setattr(Group, "start", slow)  # noqa: B010


def _takes(owner: Any, name: str, time: _Time, kind: str, seconds: float) -> None:
    """Makes a function take time."""
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        time.spend(kind, seconds)
        return function(*args, **kwargs)

    setattr(owner, name, timed)


def _steps(changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Three steps of this rank: the ledger's figures of the last two, and the true ones."""
    time = _Time()
    assembly.clock_of = lambda device: HostClock(lambda: time.now)
    _slow_links(time)
    forward = ChunkProgram.forward

    def computes(program: ChunkProgram, micro_batch: int, x_sbh: Tensor | None) -> Tensor:
        time.spend("computing", 0.5)
        result: Tensor = _Tick.apply(forward(program, micro_batch, x_sbh), time)
        return result

    setattr(ChunkProgram, "forward", computes)  # noqa: B010
    _takes(optimizer, "step_inner", time, "computing", 0.125)
    _takes(Quantizer, "encode", time, "coding", 0.25)
    _takes(Quantizer, "decode", time, "coding", 0.25)
    _takes(ErrorFeedback, "finalize", time, "coding", 0.75)
    engines = tiny_engines(changes)
    config, layout = engines.config, engines.topology.layout
    count = config.training.global_batch_size // (config.training.micro_batch_size * layout.dp)
    batches = tiny_batches(config, engines.topology, masked=False)
    began = 0.0
    for iteration in range(3):
        if iteration == 1:
            engines.ledger.clear()
            time.spent = dict.fromkeys(time.spent, 0.0)
            began = time.now
        step_batches = take_batches(batches, count, engines.topology.device)
        train_step(engines, step_batches, iteration, config.optimizer.lr, config.optimizer.weight_decay)
    accounts = engines.ledger.take_totals().values()
    figures = {
        "computing": engines.ledger.take_computed(),
        "coding": sum(account["coded_s"] for account in accounts),
        "waiting": sum(account["waited_s"] for account in accounts),
    }
    return {"reported": figures, "spent": time.spent, "total": time.now - began}


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "pp2 dp2": {
        "parallel": {"pipeline_model_parallel_size": 2},
        "compression": {
            "compress": ["pp-forward=fixpoint,bits=8", "pp-backward=fixpoint,bits=8", "dp-grad=powersgd,rank=2"]
        },
    },
    "tp2 dp2": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
        "compression": {"compress": ["tp-forward=fixpoint,bits=8"]},
    },
    "pp2 interleaved, eager sums": {
        "parallel": {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_grad_reduce": True,
            "ddp_bucket_size": 2000,
        },
        "compression": {"compress": ["pp-backward=fixpoint,bits=4"]},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_computing_coding_and_waiting_add_up_to_the_steps_time(layout: str) -> None:
    for rank, figures in enumerate(run_ranks(4, _steps, LAYOUTS[layout], timeout=240)):
        assert figures["reported"] == pytest.approx(figures["spent"], abs=1e-6), f"rank {rank}"
        assert sum(figures["reported"].values()) == pytest.approx(figures["total"], abs=1e-6), f"rank {rank}"
        assert min(figures["reported"].values()) > 0, f"rank {rank}"
        assert figures["reported"]["waiting"] > 0.3 * figures["total"], f"rank {rank}: the links are not slow"
