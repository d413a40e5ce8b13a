"""Allocations that fail: one line that says what to do, no trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron.distributed.errors import CommunicationError
from megatron.training.program import EXIT_BUG, Ranks, out_of_memory, run_program


def _too_large_for_python() -> object:
    return bytearray(1 << 62)


def _too_large_for_numpy() -> object:
    return np.zeros(1 << 58)


def _too_large_for_torch() -> object:
    return torch.empty(1 << 58)


def _too_large_to_count() -> object:
    return torch.empty(1 << 62)


@pytest.mark.parametrize(
    "ask", [_too_large_for_python, _too_large_for_numpy, _too_large_for_torch, _too_large_to_count]
)
def test_no_room_is_one_line(ask: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> None:
    def body(ranks: Ranks) -> None:
        ask()

    assert run_program(body) == EXIT_BUG
    said = capsys.readouterr().err
    assert said.startswith("rank 0: out of memory: ")
    assert said.count("\n") == 1
    assert "lower --micro-batch-size" in said


def test_other_failures_keep_their_trace(capsys: pytest.CaptureFixture[str]) -> None:
    def body(ranks: Ranks) -> None:
        raise RuntimeError("something else")

    assert run_program(body) == EXIT_BUG
    assert "Traceback" in capsys.readouterr().err


TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. "
    "GPU 1 has a total capacity of 79.11 GiB of which 1.20 GiB is free. "
    "Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated memory 76.00 GiB is "
    "allocated by PyTorch, and 1.31 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def _gpu_is_full() -> object:
    raise torch.OutOfMemoryError(TORCH_SAYS)


def _gpu_is_full_during_a_sum() -> object:
    try:
        _gpu_is_full()
    except RuntimeError as error:
        raise CommunicationError(f"all-reduce over data-parallel failed: {error}") from error
    return None


@pytest.mark.parametrize("ask", [_gpu_is_full, _gpu_is_full_during_a_sum])
def test_a_full_gpu_is_named_with_what_was_needed_and_three_flags(
    ask: Callable[[], object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H100 number {index}")

    def body(ranks: Ranks) -> None:
        ask()

    assert run_program(body) == EXIT_BUG
    assert capsys.readouterr().err == (
        "rank 0: out of memory: GPU 1 (NVIDIA H100 number 1) needed 2.50 GiB more, and 1.20 GiB of its 79.11 GiB are "
        "free; lower --micro-batch-size or --seq-length, recompute activations (--recompute-granularity full), or "
        "split the model over more processes (--tensor-model-parallel-size, --pipeline-model-parallel-size)\n"
    )


def test_a_gpu_that_does_not_answer_any_more_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(index: int) -> str:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "get_device_name", fails)
    assert "GPU 1 needed 2.50 GiB more" in out_of_memory(torch.OutOfMemoryError(TORCH_SAYS))


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_libraries_that_find_no_room_are_one_line_too(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body(ranks: Ranks) -> None:
        raise RuntimeError(said)

    assert run_program(body) == EXIT_BUG
    told = capsys.readouterr().err
    assert told.startswith(f"rank 0: out of memory: {said.splitlines()[0]}; lower --micro-batch-size")
    assert told.count("\n") == 1
