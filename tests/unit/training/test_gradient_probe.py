"""Places and energy of the largest gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.distributed.topology import single_process
from megatron.parallel.data.buffer import FlatBuffer, NamedParam
from megatron.parallel.tensor.shards import ParamSpec
from megatron.training.gradient_probe import GradientProbe


def _probe_and_gradient(bins: int = 0, **shapes: tuple[int, ...]) -> tuple[GradientProbe, torch.Tensor]:
    """A probe of the largest fifth of each gradient, and the flat gradient of ``w``."""
    params = [
        NamedParam(name, name, ParamSpec(shape), nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()
    ]
    buffer = FlatBuffer(params, torch.float32, single_process().dp, None)
    slot = next(slot for bucket in buffer.buckets for slot in bucket.slots if slot.name == "w")
    probe = GradientProbe([buffer], single_process(torch.device("cpu")), 0.2, bins)
    return probe, buffer.grads_flat[slot.start : slot.stop]


def test_kept_places_and_their_energy() -> None:
    probe, grad = _probe_and_gradient(w=(4, 5), b=(5,))
    grad[:] = 0.5
    grad[:4] = torch.tensor([3.0, -4.0, 5.0, 1.0])
    assert probe.look() == {"w": {"energy": pytest.approx(51 / (51 + 16 * 0.25))}}
    grad[:] = 0.0
    grad[2:6] = 1.0
    assert probe.look() == {"w": {"energy": 1.0, "kept": 0.5}}
    grad[:] = 0.0
    assert probe.look()["w"]["energy"] == 0.0


def test_gradients_are_read_before_the_update_replaces_them() -> None:
    """After the step, the buffers hold the optimizer's update if a compressor needs it."""
    probe, grad = _probe_and_gradient(w=(4, 5))
    probe.begin_step(0)
    grad[:] = 0.0
    grad[:4] = 1.0
    with probe.span("optimizer"):
        grad[:] = 1.0
    (finding,) = probe.findings(1)
    assert finding.values["parameters"]["w"]["energy"] == 1.0
    probe.begin_step(-1)
    with probe.span("optimizer"):
        assert next(iter(probe.findings(2))).values["parameters"] == {}


def test_the_largest_are_counted_by_place() -> None:
    """20 numbers in 3 bins are 7, 7 and 6; a matrix of 2 numbers has 2 bins."""
    probe, grad = _probe_and_gradient(bins=3, w=(4, 5), small=(1, 2))
    grad[torch.tensor([0, 6, 7, 19])] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    statistics = probe.look()
    assert statistics["w"]["places"] == [2, 1, 1]
    assert statistics["small"]["places"] in ([0, 1], [1, 0])
