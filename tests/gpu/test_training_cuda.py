"""Training on a CUDA device, against the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from megatron.distributed.topology import single_process
from megatron.training.assembly import build_engines
from tests.support.tiny import VOCAB, tiny_config, tiny_run, tiny_train

pytestmark = pytest.mark.gpu


def _cuda_run(changes: dict, iterations: int):
    config = tiny_config(changes, 1)
    parallel = dataclasses.replace(config.parallel, distributed_backend="nccl")
    topology = single_process("cuda")
    return tiny_train(build_engines(dataclasses.replace(config, parallel=parallel), topology, VOCAB), iterations)


def test_double_precision_equals_the_cpu() -> None:
    double = {"precision": {"fp64": True}}
    reference, trace = tiny_run(double, 10), _cuda_run(double, 10)
    assert trace.losses == pytest.approx(reference.losses, rel=1e-10)
    assert trace.grad_norms == pytest.approx(reference.grad_norms, rel=1e-10)


def test_single_precision_is_close_to_the_cpu() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    reference, trace = tiny_run({}, 10), _cuda_run({}, 10)
    assert trace.losses == pytest.approx(reference.losses, rel=1e-5)


def test_compiled_layers_give_the_losses_of_eager_ones() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (_cuda_run({"training": {"compile": choice}}, 5) for choice in ("off", "on"))
    assert counters["inductor"]
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_learn(precision: str) -> None:
    trace = _cuda_run({"precision": {precision: True, "initial_loss_scale": 65536.0}}, 30)
    assert trace.losses[-1] < trace.losses[0] - 0.3


def test_dropout_repeats_and_recomputes() -> None:
    dropout = {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.1}}
    first = _cuda_run(dropout, 5)
    again = _cuda_run({**dropout, "recompute": {"recompute_granularity": "full", "recompute_method": "uniform"}}, 5)
    assert again.losses == pytest.approx(first.losses, rel=1e-5)
