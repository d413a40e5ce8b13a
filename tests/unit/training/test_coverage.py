"""Advice on low-rank compressors' ranks, against every rank."""

from __future__ import annotations

import pytest
import torch

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.builtin import BUILTIN
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import Spec, read_spec
from megatron.training.coverage import highest_rank


def _spec(text: str) -> Spec:
    return read_spec(text, Registry(BUILTIN), RunLength(1000))


def _pays(text: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    compressor = _spec(f"{text},rank={rank}").make_compressor()
    if isinstance(compressor, RoundCompressor):
        return compressor.should_compress(shape)
    assert isinstance(compressor, Codec)
    return compressor.should_compress(torch.Size(shape), dtype)


@pytest.mark.parametrize("factors", ["fp32", "bf16", "fixpoint8", "fixpoint4"])
@pytest.mark.parametrize("point", ["pp-backward=lowrank", "dp-grad=powersgd,min-ratio=6", "embedding=powersgd"])
def test_only_ranks_up_to_the_highest_save_bytes(point: str, factors: str) -> None:
    text = f"{point},factors={factors}"
    for shape in ((16, 1, 32), (96, 32), (32, 128), (5, 7), (1, 40), (300, 200)):
        for dtype in (torch.float32, torch.bfloat16):
            highest = highest_rank(_spec(text), shape, dtype)
            ranks = range(1, min(torch.Size(shape[:-1]).numel(), shape[-1]) + 1)
            assert [rank for rank in ranks if _pays(text, rank, shape, dtype)] == list(range(1, highest + 1))


def test_small_factors_leave_room_for_higher_ranks() -> None:
    """An eighth of (128, 32) is 2,048 bytes: 1 byte per number and a scale per column of 128, or 4 bytes per number."""
    at = "dp-grad=powersgd,min-ratio=8,factors="
    assert highest_rank(_spec(at + "fp32"), (128, 32)) == 2048 // (4 * 160) == 3
    assert highest_rank(_spec(at + "fixpoint8"), (128, 32)) == 12
    assert highest_rank(_spec("dp-grad=fixpoint,bits=4"), (128, 32)) == 0
