"""Devices of the compiled kernels, and the note of a run on other devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.distributed.topology import single_process
from megatron.kernels import native, ops
from megatron.training.kernel_check import check_kernels


@pytest.fixture(autouse=True)
def _cleared_cache() -> Iterator[None]:
    native.problem_on.cache_clear()
    yield
    native.problem_on.cache_clear()


class _Operators:
    """Kernels that a GPU runs, or refuses for its architecture."""

    def __init__(self, refusal: str | None) -> None:
        self.refusal = refusal
        self.started = 0

    def finite_norm(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.started += 1
        if self.refusal is not None:
            raise RuntimeError(f"a kernel could not be started: {self.refusal}\nmore lines")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with a GPU and a library built with CUDA."""

    def make(refusal: str | None, built: bool = True) -> _Operators:
        operators, zeros = _Operators(refusal), torch.zeros
        monkeypatch.setattr(native, "problem", lambda: None)
        monkeypatch.setattr(native, "operators", lambda: operators)
        monkeypatch.setattr("megatron.training.kernel_check.own_products", lambda: False)
        monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: built or key == "CPU")
        monkeypatch.setattr(torch, "zeros", lambda *shape, device="cpu", **kind: zeros(*shape, **kind))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
        return operators

    return make


REFUSED = "no kernel image is available for execution on the device"


def test_a_gpu_of_another_architecture_is_tried_once_and_named(gpu: Any) -> None:
    operators = gpu(REFUSED)
    message = check_kernels(single_process("cuda"))
    assert message == (
        "compiled kernels are not in use, pure torch is slower: they do not run on Tesla T4, compute capability 7.5 "
        f"(a kernel could not be started: {REFUSED}): add it to ARCHITECTURES in setup.py and run `pip install -e .`"
    )
    assert check_kernels(single_process("cuda")) == message
    assert operators.started == 1
    assert native.devices() == {"cpu"}


def test_tensors_of_an_unsupported_gpu_go_to_the_reference(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = gpu(REFUSED)
    monkeypatch.setattr(native, "_KINDS", {"cpu": "CPU", "cuda": "CUDA"})
    traits = {"device": torch.device("cuda"), "dtype": torch.float32, "is_floating_point": lambda _: True}
    assert not native.serves(type("OnGpu", (), traits)())
    assert native.serves(torch.ones(2))
    assert operators.started == 1


def test_a_supported_gpu_runs_the_kernels(gpu: Any) -> None:
    operators = gpu(None)
    assert check_kernels(single_process("cuda")) is None
    assert native.devices() == {"cpu", "cuda"}
    assert operators.started == 1


def test_a_library_without_cuda_is_noted_on_gpus_only(gpu: Any) -> None:
    operators = gpu(None, built=False)
    assert "they were built without cuda" in str(check_kernels(single_process("cuda")))
    assert check_kernels(single_process("cpu")) is None
    assert operators.started == 0


def test_required_kernels_on_an_unsupported_gpu_are_an_error(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(REFUSED)
    monkeypatch.setenv(native.CHOICE, "native")
    with pytest.raises(RuntimeError, match="MEGATRON_CC_KERNELS=native, but they do not run on Tesla T4"):
        native.problem_on("cuda")


def test_without_a_gpu_no_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cuda" not in native.devices()
    assert not native.serves(torch.ones(1, device="meta"))
    assert float(ops.finite_norm(torch.full((3,), 2.0))[0]) == 12.0
