"""Where the largest gradients are, against counting by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.distributed.topology import single_process
from megatron.parallel.data.buffer import FlatBuffer
from megatron.parallel.tensor.shards import ParamSpec
from megatron.training.gradient_probe import GradientProbe


def test_kept_places_and_their_energy() -> None:
    params = {"w": nn.Parameter(torch.zeros(4, 5)), "b": nn.Parameter(torch.zeros(5))}
    buffer = FlatBuffer(
        [(name, name, ParamSpec(tuple(p.shape)), p) for name, p in params.items()],
        torch.float32,
        single_process().dp,
        None,
    )
    probe = GradientProbe([buffer], single_process(torch.device("cpu")), 0.2)  # 4 of 20
    slot = next(slot for bucket in buffer.buckets for slot in bucket.slots if slot.name == "w")
    grad = buffer.grads_flat[slot.start : slot.stop]
    grad[:] = 0.5
    grad[:4] = torch.tensor([3.0, -4.0, 5.0, 1.0])
    assert probe.look() == {"w": {"energy": pytest.approx(51 / (51 + 16 * 0.25))}}
    grad[:] = 0.0
    grad[2:6] = 1.0
    assert probe.look() == {"w": {"energy": 1.0, "kept": 0.5}}
    grad[:] = 0.0
    assert probe.look()["w"]["energy"] == 0.0


def test_the_largest_are_counted_by_place() -> None:
    """Parts are as equal as can be: 20 numbers in 3 parts are 7, 7 and 6, and all of a smaller matrix's."""
    params = {"w": nn.Parameter(torch.zeros(4, 5)), "small": nn.Parameter(torch.zeros(1, 2))}
    buffer = FlatBuffer(
        [(name, name, ParamSpec(tuple(p.shape)), p) for name, p in params.items()],
        torch.float32,
        single_process().dp,
        None,
    )
    slots = {slot.name: slot for bucket in buffer.buckets for slot in bucket.slots}
    grad = buffer.grads_flat[slots["w"].start : slots["w"].stop]
    grad[torch.tensor([0, 6, 7, 19])] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    found = GradientProbe([buffer], single_process(torch.device("cpu")), 0.2, bins=3).look()
    assert found["w"]["places"] == [2, 1, 1]
    assert found["small"]["places"] in ([0, 1], [1, 0])
