"""Settings of --deterministic-mode, which changes no bit on CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor

from megatron.base.errors import UserError
from megatron.parallel.tensor.embedding import _SortedRows, look_up_rows
from megatron.training.determinism import make_deterministic
from megatron.training.program import EXIT_BUG, Ranks, run_program
from tests.support.tiny import tiny_run

FILLING: Any = torch.utils.deterministic


@pytest.fixture(autouse=True)
def _settings_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    fills = FILLING.fill_uninitialized_memory
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    attention = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.use_deterministic_algorithms(False)
    FILLING.fill_uninitialized_memory = fills
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.backends.cuda.enable_cudnn_sdp(attention)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        os.environ.pop(name, None)


def test_settings_for_gpus() -> None:
    torch.backends.cudnn.benchmark = True
    make_deterministic(cuda=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not FILLING.fill_uninitialized_memory


def test_the_environment_is_unchanged_on_cpus() -> None:
    make_deterministic(cuda=False)
    assert torch.are_deterministic_algorithms_enabled()
    assert "NCCL_ALGO" not in os.environ
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUBLAS_WORKSPACE_CONFIG", ":16:8"), *(("NCCL_ALGO", value) for value in ("ring", "^NVLS", "Ring,CollnetChain"))],
)
def test_valid_environment_variables_are_kept(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    make_deterministic(cuda=True)
    assert os.environ[name] == value


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_ALGO", "Tree"), ("NCCL_ALGO", "Ring,NVLS"), ("NCCL_ALGO", "^Ring")],
)
def test_invalid_environment_variables_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"--deterministic-mode.*{name} is '{value.replace('^', '.')}'.*unset it"):
        make_deterministic(cuda=True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic", [False, True])
def test_embedding_rows_and_their_gradient(deterministic: bool) -> None:
    """Accelerators use sorted rows: the gradient of torch's embedding has no fixed order on CUDA."""
    index = torch.tensor([[3, 0, 3], [3, 1, 0]])
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    grad = torch.arange(24.0).view(2, 3, 4)
    (expected,) = torch.autograd.grad(F.embedding(index, weight), weight, grad)
    torch.use_deterministic_algorithms(deterministic)
    node = look_up_rows(weight.to("meta"), index.to("meta")).grad_fn
    assert node is not None
    assert ("SortedRows" in type(node).__name__) is deterministic
    rows = look_up_rows(weight, index)
    rows.backward(grad)
    assert torch.equal(rows, weight[index])
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def _one_by_one(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``index_add_`` with a rounding at each step, as on CUDA."""
    assert dim == 0
    for number, row in zip(index.tolist(), source, strict=True):
        self[number] += row
    return self


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sorted_rows_keep_the_gradient_of_a_frequent_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in bf16 would stop growing at 256."""
    index = torch.cat([torch.zeros(2000, dtype=torch.int64), torch.arange(5)])
    weight = torch.zeros(5, 4, dtype=dtype, requires_grad=True)
    grad = (torch.rand(len(index), 4, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    expected = torch.zeros(5, 4, dtype=torch.float64).index_add_(0, index, grad.double())
    monkeypatch.setattr(Tensor, "index_add_", _one_by_one)
    _SortedRows.apply(weight, index).backward(grad)
    assert weight.grad is not None
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * len(index)
    torch.testing.assert_close(weight.grad.double(), expected, rtol=torch.finfo(dtype).eps + sums, atol=0)


RUNS: dict[str, dict[str, Any]] = {
    "fp32 with dropout": {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}},
    "bf16, rope, grouped queries": {
        "precision": {"bf16": True},
        "model": {"position_embedding_type": "rope", "num_query_groups": 2, "swiglu": True},
    },
    "fp16 with full recomputation": {
        "precision": {"fp16": True, "initial_loss_scale": 1024.0},
        "recompute": {"recompute_granularity": "full", "recompute_method": "uniform"},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_no_bit_changes_on_cpus(name: str) -> None:
    plain = tiny_run(RUNS[name], 6)
    make_deterministic(cuda=False)
    strict = tiny_run(RUNS[name], 6)
    assert (strict.losses, strict.grad_norms) == (plain.losses, plain.grad_norms)


def test_an_operation_without_a_deterministic_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def body(ranks: Ranks) -> None:
        raise RuntimeError(
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation."
        )

    assert run_program(body) == EXIT_BUG
    assert capsys.readouterr().err == (
        "rank 0: --deterministic-mode: torch's cumsum_cuda_kernel does not have a deterministic implementation on this "
        "device; leave out what uses it, or the flag\n"
    )
