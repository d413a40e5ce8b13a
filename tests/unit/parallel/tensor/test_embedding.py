"""Gradients of table rows on CPUs."""

import pytest
import torch
from torch import nn

from megatron.parallel.tensor.embedding import look_up_rows
from megatron.parallel.tensor.main_grad import MainGrad, WeightGrads, attach_main_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_the_gradient_of_a_frequent_row_is_rounded_once(dtype: torch.dtype, has_main_grad: bool) -> None:
    """A sum in bf16 would stop growing at 256. Token types and frequent tokens occur thousands of times."""
    index = torch.cat([torch.zeros(2000, dtype=torch.int64), torch.arange(4)]).view(4, -1)
    weight = nn.Parameter(torch.zeros(5, 4, dtype=dtype))
    memory = torch.full((5, 4), torch.nan, dtype=dtype)
    main_grad = MainGrad(memory, WeightGrads(), direct=True, on_added=lambda: None)
    if has_main_grad:
        attach_main_grad(weight, main_grad)
        main_grad.begin_step()
    grad = (torch.rand(*index.shape, 4, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    look_up_rows(weight, index).backward(grad)
    result = memory if has_main_grad else weight.grad
    assert result is not None
    expected = torch.zeros(5, 4, dtype=torch.float64).index_add_(0, index.flatten(), grad.flatten(0, 1).double())
    sums = torch.finfo(torch.float32).eps * index.numel()
    torch.testing.assert_close(result.double(), expected, rtol=torch.finfo(dtype).eps + sums, atol=0)
