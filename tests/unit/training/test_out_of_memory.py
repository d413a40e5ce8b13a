"""Failed allocations give a single line with advice and no traceback."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron.distributed.errors import CommunicationError
from megatron.training.program import EXIT_BUG, Ranks, explain_out_of_memory, run_program


def _output_of_failed_run(body: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    def program(ranks: Ranks) -> None:
        body()

    assert run_program(program) == EXIT_BUG
    return capsys.readouterr().err


def _fail(message: str) -> None:
    raise RuntimeError(message)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: bytearray(1 << 62),
        lambda: np.zeros(1 << 58),
        lambda: torch.empty(1 << 58),
        lambda: torch.empty(1 << 62),  # more bytes than a 64-bit integer counts
    ],
    ids=["python", "numpy", "torch", "overflow"],
)
def test_a_failed_allocation_is_one_line(allocate: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> None:
    output = _output_of_failed_run(allocate, capsys)
    assert output.startswith("rank 0: out of memory: ")
    assert output.count("\n") == 1
    assert "lower --micro-batch-size" in output


def test_other_failures_have_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" in _output_of_failed_run(lambda: _fail("something else"), capsys)


TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. "
    "GPU 1 has a total capacity of 79.11 GiB of which 1.20 GiB is free. "
    "Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated memory 76.00 GiB is "
    "allocated by PyTorch, and 1.31 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def _gpu_is_full() -> object:
    raise torch.OutOfMemoryError(TORCH_SAYS)


def _gpu_is_full_during_an_all_reduce() -> object:
    try:
        _gpu_is_full()
    except RuntimeError as error:
        raise CommunicationError(f"all-reduce over data-parallel failed: {error}") from error
    return None


@pytest.mark.parametrize("allocate", [_gpu_is_full, _gpu_is_full_during_an_all_reduce])
def test_the_message_of_a_full_gpu(
    allocate: Callable[[], object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H100 number {index}")
    assert _output_of_failed_run(allocate, capsys) == (
        "rank 0: out of memory: GPU 1 (NVIDIA H100 number 1) needed 2.50 GiB more, and 1.20 GiB of its 79.11 GiB are "
        "free; lower --micro-batch-size or --seq-length, recompute activations (--recompute-granularity full), or "
        "split the model over more processes (--tensor-model-parallel-size, --pipeline-model-parallel-size)\n"
    )


def test_a_gpu_without_an_answer_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: _fail("CUDA error: out of memory"))
    assert "GPU 1 needed 2.50 GiB more" in explain_out_of_memory(torch.OutOfMemoryError(TORCH_SAYS))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_failed_allocation_of_a_library_is_one_line(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = _output_of_failed_run(lambda: _fail(message), capsys)
    assert output.startswith(f"rank 0: out of memory: {message.splitlines()[0]}; lower --micro-batch-size")
    assert output.count("\n") == 1
