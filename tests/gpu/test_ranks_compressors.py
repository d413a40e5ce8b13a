"""Compressors over NCCL, all ranks on one GPU: replicas agree, and the loss falls."""

from __future__ import annotations

import pytest

from tests.multiprocess import test_compression as compression

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

NAMES = (
    "powersgd bf16 overlapped",
    "stable top-k with neighbors, overlapped bf16",
    "embedding top-k fused, fp16",
    "chunked top-k over senders, fading",
    "fixpoint of tiles",
    "quantized adam, bf16 sharded",
    "tensor powersgd, recomputed",
    "fixpoint sequence",
    "parameters bf16 stochastic, gradients too",
    "parameters and gradients in 8-bit floats",
    "delta bf16 virtual stochastic",
    "delta fp16 four stages gpipe",
    "schedules",
    "edgc",
    "lowrank epilogue virtual fp16",
    "all three",
)
"""Every compressor, and every kind of overlap, once."""


@pytest.mark.parametrize("name", NAMES)
def test_replicas_agree_and_the_loss_falls(name: str) -> None:
    compression.test_replicas_agree_and_the_loss_falls(None, name)


@pytest.mark.parametrize("name", ["powersgd, full rank, sharded", "fused embedding, virtual"])
def test_lossless_settings_give_the_dense_run(name: str) -> None:
    compression.test_lossless_settings_give_the_dense_run(None, name)
