"""Loss of the output layer in a single process: groups of tokens, half precision, sums of the weight gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.kernels import products, reference
from megatron.parallel.tensor import cross_entropy
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.cross_entropy import LogitsWorkspace, head_loss
from megatron.parallel.tensor.embedding import VocabShard

S, B, H, VOCAB, PADDED = 9, 4, 24, 90, 96


def _rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _check(dtype: torch.dtype, weight_of_token: float, scale: float, near: float) -> None:
    """Check losses and both gradients of a weighted sum, scaled in backward, against fp64."""
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    shard = VocabShard(VOCAB, PADDED, comm)
    x_sbh, weight = _rand(1, S, B, H).to(dtype).requires_grad_(), (_rand(2, PADDED, H) / 4).to(dtype).requires_grad_()
    labels_sb = torch.randint(0, VOCAB, (S, B), generator=torch.Generator().manual_seed(3))
    weights_sb = (torch.arange(S * B).view(S, B) % 4 > 0) * weight_of_token
    total, losses_sb = head_loss(x_sbh, weight, labels_sb, weights_sb, comm, shard)
    total.backward(torch.tensor(scale, dtype=total.dtype))

    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x_sbh, weight))
    logits = (exact_x @ exact_weight[:VOCAB].t()).flatten(0, 1)
    expected = F.cross_entropy(logits, labels_sb.flatten(), reduction="none").view(S, B)
    (expected * weights_sb.double()).sum().backward(torch.tensor(scale, dtype=torch.float64))
    torch.testing.assert_close(losses_sb.double(), expected.detach(), rtol=near, atol=near)
    for grad, other in ((x_sbh.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert grad is not None
        assert other is not None
        assert grad.dtype == dtype
        assert float((grad.double() - other).norm()) <= near * float(other.norm())


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "near"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)],
)
def test_losses_and_gradients(dtype: torch.dtype, near: float, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy._GROUP_ELEMENTS, "cpu", -(-S * B // groups) * PADDED)
    _check(dtype, 1 / (S * B), 1.0, near)
    _check(dtype, 1.0, 3.0, near)


def test_calls_that_share_memory_for_logits_give_the_same_results() -> None:
    """For different sizes and types, before the backward of the last call, and after an evaluation."""
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    shard, space = VocabShard(VOCAB, PADDED, comm), LogitsWorkspace()

    def pending(seed: int, length: int, dtype: torch.dtype, scratch: LogitsWorkspace | None) -> tuple[Tensor, ...]:
        x_sbh, weight = (_rand(seed, *shape).to(dtype).requires_grad_() for shape in ((length, B, H), (PADDED, H)))
        labels_sb = torch.randint(0, VOCAB, (length, B), generator=torch.Generator().manual_seed(seed))
        total, losses_sb = head_loss(x_sbh, weight, labels_sb, torch.ones(length, B), comm, shard, workspace=scratch)
        return total, losses_sb, x_sbh, weight

    def finished(calls: list[tuple[Tensor, ...]]) -> list[Tensor]:
        for total, *_ in calls:
            total.backward()
        return [output for _, losses_sb, *leaves in calls for output in (losses_sb, *(leaf.grad for leaf in leaves))]  # type: ignore[misc]

    shapes = [(1, S, torch.float32), (2, S - 4, torch.float32), (3, S, torch.float64), (4, S + 5, torch.float32)]
    with torch.inference_mode():
        evaluated = pending(5, S, torch.float32, space)[1]
    assert torch.equal(evaluated, pending(5, S, torch.float32, None)[1])
    sharing, apart = ([pending(*shape, scratch) for shape in shapes] for scratch in (space, None))
    for actual, expected in zip(finished(sharing), finished(apart), strict=True):
        assert torch.equal(actual, expected)


def test_memory_for_logits_is_reused() -> None:
    space, x_th = LogitsWorkspace(), _rand(1, S, H)
    first = space.scratch(x_th, S, PADDED)
    assert first.shape == (S, PADDED)
    assert space.scratch(x_th, S - 1, PADDED).data_ptr() == first.data_ptr()
    assert space.scratch(x_th, S, PADDED).data_ptr() == first.data_ptr()
    assert space.scratch(x_th.double(), S, PADDED).dtype == torch.float64
    assert space.scratch(x_th.to("meta"), S, PADDED).is_meta


def test_gradients_in_fp16_do_not_vanish_before_the_loss_scale() -> None:
    _check(torch.float16, 2.0**-22, 2.0**20, 2**-8)
    _check(torch.float16, 0.0, 1.0, 2**-8)  # no token counts: zeros instead of NaN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_adds_in_a_wider_total(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums keep the precision of the total; on CUDA the product itself adds to it."""
    a_tn, b_tm, held_nm = _rand(1, 40, 7).to(dtype), _rand(2, 40, 5).to(dtype), _rand(3, 7, 5) * 1000
    exact = a_tn.double().t() @ b_tm.double()
    half_of_a_place = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for fresh in (False, True):
        total = torch.full_like(held_nm, torch.nan) if fresh else held_nm.clone()
        products.add_product_(total, a_tn, b_tm, fresh)
        expected = exact if fresh else held_nm.double() + exact
        off = (total.double() - expected).abs()
        assert (off <= half_of_a_place * exact.abs() + 1e-4 * (not fresh) + 1e-5).all()
    calls = []
    monkeypatch.setattr(products, "adds_wide_products", lambda total: True)
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: calls.append((args, options)))
    monkeypatch.setattr(reference, "add_product_", None)
    products.add_product_(held_nm, a_tn, b_tm)
    products.add_product_(held_nm, a_tn, b_tm, fresh=True)
    for (args, options), beta in zip(calls, (1, 0), strict=True):
        assert args[0] is held_nm
        assert args[1].shape == (7, 40)
        assert args[2] is b_tm
        assert options == {"out_dtype": torch.float32, "beta": beta, "out": held_nm}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_adds_in_a_total_of_its_type(dtype: torch.dtype) -> None:
    a_tn, b_tm, held_nm = (_rand(seed, *shape).to(dtype) for seed, shape in ((1, (40, 7)), (2, (40, 5)), (3, (7, 5))))
    total = held_nm.clone()
    products.add_product_(total, a_tn, b_tm)
    torch.testing.assert_close(total, held_nm + a_tn.t() @ b_tm)
    products.add_product_(total.fill_(torch.nan), a_tn, b_tm, fresh=True)
    torch.testing.assert_close(total, a_tn.t() @ b_tm)
