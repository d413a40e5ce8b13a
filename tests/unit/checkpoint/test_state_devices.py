"""Loaded state of compressors is on the device that uses it."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoint.compressor_state import _LoadableState
from megatron.checkpoint.state_slice import COUNTER, StateSlice
from megatron.compression.delta import DeltaCodec, DeltaConfig
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.sample_cache import SampleCache
from megatron.compression.state import CompressorState

META = torch.device("meta")
"""Stands in for a GPU."""


@pytest.mark.parametrize(
    ("kind", "shape", "device"),
    [
        ("q", (2, 1, 5, 3), "meta"),
        (RESIDUAL, (2, 1, 5, 3), "meta"),
        ("momentum", (2, 1, 15), "meta"),
        (f"{COUNTER}steps", (1, 1, 1), "cpu"),
        ("cache.ids", (7,), "cpu"),
        ("cache.rows", (7, 5, 3), "cpu"),
    ],
)
@pytest.mark.parametrize("length", [0, 4])
def test_loaded_state_is_on_its_device(kind: str, shape: tuple[int, ...], device: str, length: int) -> None:
    """Factors, residuals and moments are on the device, of a stack of ``length`` tensors or of a single tensor."""
    state = CompressorState()
    stacked = length if device == "meta" else 0
    state_slice = StateSlice("dp-grad.weight", state, (2, 1), (0, 0), index=1 if stacked else None, length=stacked)
    dtype = torch.int64 if kind.endswith("ids") or kind.startswith(COUNTER) else torch.float32
    item = _LoadableState(state_slice, kind, shape, dtype, META)
    item.write(room := item.allocate())
    assert room.device.type == device
    assert all(x.device.type == device for x in state.tensors.values())


def test_cached_samples_stay_on_the_cpu_until_their_next_visit() -> None:
    """The device may not have memory for all of them."""
    codec, cache = DeltaCodec(DeltaConfig(cache_dtype="fp32")), SampleCache(4)
    cache.load(torch.tensor([3, 5]), torch.zeros(2, 6, 16))
    assert codec._recall(cache, 3, torch.Size([6, 16]), META).device == META
    assert cache.row(3).device.type == "cpu"
