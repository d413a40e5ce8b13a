"""Layers with experts, against a loop over tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.check_model import check_model
from megatron.config.model import ModelConfig
from megatron.config.resolve_model import resolve_model
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.models.context import ForwardContext
from megatron.models.experts import Expert, Experts
from megatron.models.rank_context import RankContext
from megatron.parallel.data.buffer import FlatBuffer, named_params
from megatron.parallel.expert.router import ExpertContext
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.grouped import adjacent, stacked
from megatron.parallel.tensor.random import DropoutKeys
from megatron.parallel.tensor.shards import collect_specs
from tests.support.tiny import tiny_gpt

TOKENS, SAMPLES, HIDDEN = 6, 3, 8
_NONE: Mapping[int, Tensor] = {}


def _layer(**changes: Any) -> Experts:
    given: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "seq_length": TOKENS,
        "num_experts": [4],
        "ffn_hidden_size": 16,
        "moe_ffn_hidden_size": 12,
        **changes,
    }
    config = resolve_model(ModelConfig(**given))
    check_model(config)
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    layer = Experts(RankContext(config, comm, torch.device("cpu"), torch.float64), 0)
    generator = torch.Generator().manual_seed(3)
    for param in layer.parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.5
    return layer


def _input() -> Tensor:
    return torch.randn(TOKENS, SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _step(
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]], loss_grad: float = 0.0, before: Mapping[int, Tensor] = _NONE
) -> ForwardContext:
    return ForwardContext(experts=ExpertContext(2, torch.tensor(loss_grad, dtype=torch.float64), before, seen))


def _mlp(x_h: Tensor, expert: nn.Module, swiglu: bool = False) -> Tensor:
    assert isinstance(expert, Expert)
    up, down = expert.dense_h_to_4h, expert.dense_4h_to_h
    if swiglu:
        gate, value = (x_h @ part.t() for part in up.weight)
        return (F.silu(gate) * value) @ down.weight.t()
    assert up.bias is not None
    assert down.bias is not None
    return F.gelu(x_h @ up.weight.t() + up.bias, approximate="tanh") @ down.weight.t() + down.bias


def _chosen(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


def _by_token(layer: Experts, x_sbh: Tensor, dropped: Collection[tuple[int, int]] = ()) -> Tensor:
    """The softmax over a token's own experts, token by token; ``dropped`` are pairs of tokens and experts."""
    rows = []
    for number, x_h in enumerate(x_sbh.flatten(0, 1)):
        logits = layer.router.weight @ x_h
        chosen = _chosen(logits.tolist(), layer.config.moe_router_topk)
        weights = torch.stack([logits[e] for e in chosen]).softmax(0)
        parts = [
            weight * _mlp(x_h, layer.experts[str(e)], layer.config.swiglu)
            for weight, e in zip(weights, chosen, strict=True)
            if (number, e) not in dropped
        ]
        rows.append(sum(parts, start=torch.zeros_like(x_h)))
    return torch.stack(rows).view_as(x_sbh)


@pytest.mark.parametrize("form", [{}, {"swiglu": True, "add_bias_linear": False}, {"moe_router_topk": 3}])
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(form: dict[str, Any]) -> None:
    layer, x_sbh = _layer(**form), _input().requires_grad_()
    grad_sbh = torch.randn_like(x_sbh)
    out_sbh, bias = layer(x_sbh, ForwardContext())
    assert bias is None
    out_sbh.backward(grad_sbh)
    assert x_sbh.grad is not None
    found = [x_sbh.grad, *(param.grad for param in layer.parameters())]
    x_sbh.grad = None
    layer.zero_grad()
    wanted_sbh = _by_token(layer, x_sbh)
    torch.testing.assert_close(out_sbh, wanted_sbh, rtol=1e-12, atol=1e-12)
    wanted_sbh.backward(grad_sbh)
    for own, param in zip(found, [x_sbh, *layer.parameters()], strict=True):
        assert own is not None
        wanted = torch.zeros_like(own) if param.grad is None else param.grad
        torch.testing.assert_close(own, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", [{}, {"swiglu": True, "add_bias_linear": False}])
@pytest.mark.parametrize("adjoining", [True, False])
def test_grouped_products_are_those_of_the_loop(form: dict[str, Any], adjoining: bool) -> None:
    """CUDA's way, on the CPU; weights may lie anywhere."""
    layer = _layer(num_experts=[16], **form).float()
    experts = list(layer.experts.values())
    for name in ("dense_h_to_4h", "dense_4h_to_h") if adjoining else ():
        weights = [getattr(expert, name).weight for expert in experts]
        together = torch.stack([weight.detach() for weight in weights])
        for weight, own in zip(weights, together, strict=True):
            weight.data = own
        with torch.no_grad():
            assert stacked(weights).data_ptr() == together.data_ptr()
    x_sbh, found = _input().float(), []
    for grouped in (False, True):
        x_sbh.requires_grad_().grad = None
        layer.zero_grad()
        with mock.patch("megatron.models.experts.groups_products", lambda rows, weights, on=grouped: on):
            out_sbh, _ = layer(x_sbh, ForwardContext())
        out_sbh.square().sum().backward()
        found.append([out_sbh.detach(), x_sbh.grad, *(param.grad for param in layer.parameters())])
    for own, wanted in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)
    zero = [not grad.any() for grad in found[1][2:]]
    assert any(zero)


@pytest.mark.parametrize("form", [{}, {"swiglu": True, "add_bias_linear": False}])
def test_rows_that_fill_a_group_up_change_nothing(form: dict[str, Any]) -> None:
    layer, x_sbh, found, sizes = _layer(num_experts=[16], **form), _input(), [], []
    for more in (0, 5):
        x_sbh.requires_grad_().grad = None
        layer.zero_grad()

        def filled(rows: Tensor, more: int = more) -> int:
            return len(rows) + more

        def seen(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            sizes.append(len(x))
            return F.linear(x, weight, bias)

        with (
            mock.patch("megatron.models.experts.groups_products", return_value=False),
            mock.patch("megatron.models.experts.recurring", filled),
            mock.patch("megatron.models.experts.linear", seen),
        ):
            out_sbh, _ = layer(x_sbh, ForwardContext())
        (out_sbh * torch.arange(1.0, 1.0 + out_sbh.numel()).view_as(out_sbh)).sum().backward()
        found.append([out_sbh.detach(), x_sbh.grad, *(param.grad for param in layer.parameters())])
    for own, wanted in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
    half = len(sizes) // 2
    assert [size + 5 for size in sizes[:half]] == sizes[half:]


@pytest.mark.parametrize("form", [{"swiglu": True}, {"moe_ffn_hidden_size": HIDDEN}])
@pytest.mark.parametrize("bucket_elements", [None, 1])
def test_gradient_buffers_lay_experts_out_for_grouped_products(
    bucket_elements: int | None, form: dict[str, Any]
) -> None:
    """No copy of the weights is made where a bucket holds all of a layer's experts."""
    layers = [_layer(num_experts=[4], add_bias_linear=False, **form) for _ in range(2)]
    model = nn.ModuleList(layers)
    FlatBuffer(named_params(collect_specs(model), model), torch.float64, single_process("cpu").dp, bucket_elements)
    for layer in layers:
        experts = [expert for expert in layer.experts.values() if isinstance(expert, Expert)]
        for weights in ([expert.up[0] for expert in experts], [expert.down[0] for expert in experts]):
            assert adjacent(weights) == (bucket_elements is None)
            with torch.no_grad():
                assert (stacked(weights).data_ptr() == weights[0].data_ptr()) == (bucket_elements is None)
                assert torch.equal(stacked(weights), torch.stack(weights))


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    """Its bucket waits for it."""
    layer = _layer(num_experts=[64])
    out_sbh, _ = layer(_input(), ForwardContext())
    out_sbh.sum().backward()
    experts = [expert for expert in layer.experts.values() if isinstance(expert, Expert)]
    grads = [expert.dense_4h_to_h.weight.grad for expert in experts]
    assert all(grad is not None for grad in grads)
    assert sum(not grad.any() for grad in grads if grad is not None) > 20


@pytest.mark.parametrize("policy", ["position", "probs"])
def test_tokens_beyond_the_capacity_skip_their_expert(policy: str) -> None:
    factor = 0.6
    layer = _layer(moe_expert_capacity_factor=factor, moe_min_capacity=1, moe_token_drop_policy=policy)
    x_sbh, tokens = _input(), TOKENS * SAMPLES
    capacity = math.ceil(tokens * 2 / 4 * factor)
    asking: dict[int, list[tuple[float, int]]] = {}
    for number, x_h in enumerate(x_sbh.flatten(0, 1)):
        logits = (layer.router.weight @ x_h).tolist()
        chosen = _chosen(logits, 2)
        weights = torch.tensor([logits[e] for e in chosen]).softmax(0).tolist()
        for weight, e in zip(weights, chosen, strict=True):
            asking.setdefault(e, []).append((-weight if policy == "probs" else number, number))
    dropped = {(number, e) for e, tokens_of in asking.items() for _, number in sorted(tokens_of)[capacity:]}
    assert len(dropped) > 3
    out_sbh, _ = layer(x_sbh, _step({}))
    torch.testing.assert_close(out_sbh, _by_token(layer, x_sbh, dropped), rtol=1e-12, atol=1e-12)


def test_a_capacity_that_is_a_whole_number_is_not_rounded_up() -> None:
    """Fifty choices an expert times 1.1 are 55, and 55.00000000000001 in floats."""
    x_sbh = torch.randn(50, 1, HIDDEN, dtype=torch.float64)
    for factor, capacity in ((1.1, 55), (1.11, 56), (0.3, 15)):
        layer = _layer(num_experts=[2], moe_expert_capacity_factor=factor, moe_min_capacity=1)
        assert layer.router(x_sbh, step=_step({}).experts).capacity == capacity


def test_evaluation_has_a_capacity_of_its_own() -> None:
    x_sbh = _input()
    layer = _layer(moe_expert_capacity_factor=0.3, moe_min_capacity=1, moe_eval_capacity_factor=4.0)
    torch.testing.assert_close(layer(x_sbh, ForwardContext())[0], _by_token(layer, x_sbh), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x_sbh, _step({}))[0], _by_token(layer, x_sbh))
    least = _layer(moe_expert_capacity_factor=0.3, moe_min_capacity=100)
    torch.testing.assert_close(least(x_sbh, _step({}))[0], _by_token(least, x_sbh), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("form", "weights_of"),
    [
        ({"moe_router_pre_softmax": True}, lambda logits, chosen: logits.softmax(0)[chosen]),
        ({"moe_router_topk": 1}, lambda logits, chosen: logits.softmax(0)[chosen]),
        (
            {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
            lambda logits, chosen: 2.5 * logits.sigmoid()[chosen] / logits.sigmoid()[chosen].sum(),
        ),
        (
            {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
            lambda logits, chosen: logits.sigmoid()[chosen],
        ),
        (
            {"moe_router_score_function": "sqrtsoftplus"},
            lambda logits, chosen: (scores := (1 + logits.exp()).log().sqrt()[chosen]) / scores.sum(),
        ),
    ],
)
def test_weights_of_experts(form: dict[str, Any], weights_of: Any) -> None:
    layer = _layer(**form)
    x_sbh = _input()
    routing = layer.router(x_sbh)
    for number, x_h in enumerate(x_sbh.flatten(0, 1)):
        logits = layer.router.weight @ x_h
        chosen = _chosen(logits.tolist(), layer.config.moe_router_topk)
        assert routing.experts_tk[number].tolist() == chosen
        torch.testing.assert_close(routing.weights_tk[number], weights_of(logits, chosen), rtol=1e-12, atol=0)


def test_biases_choose_experts_and_weigh_nothing() -> None:
    layer = _layer(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    x_sbh = _input()
    before = layer.router(x_sbh)
    bias = layer.router.expert_bias
    assert bias is not None
    bias[1] = 10.0
    after = layer.router(x_sbh)
    assert (after.experts_tk == 1).any(-1).all()
    assert not (before.experts_tk == 1).any(-1).all()
    scores_te = (x_sbh.flatten(0, 1) @ layer.router.weight.t()).sigmoid().gather(1, after.experts_tk)
    torch.testing.assert_close(after.weights_tk, scores_te / scores_te.sum(-1, keepdim=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_scores_of_logits_that_underflow_have_gradients(score: str) -> None:
    layer = _layer(moe_router_score_function=score)
    layer.float().router.weight.data.fill_(-100.0)
    x_sbh = torch.full((2, 1, HIDDEN), 10.0, requires_grad=True)
    routing = layer.router(x_sbh)
    (routing.weights_tk.sum() + routing.losses.sum()).backward()
    assert x_sbh.grad is not None
    assert x_sbh.grad.isfinite().all()


def test_what_the_router_reads_is_jittered_in_training_alone() -> None:
    """By numbers that lie evenly within eps of 1, another for each: seen through rows of ones, one hidden unit each."""
    layer = _layer(num_experts=[HIDDEN], moe_input_jitter_eps=0.2)
    layer.router.weight.data = torch.eye(HIDDEN, dtype=torch.float64)
    x_sbh, seen = torch.ones(100, SAMPLES, HIDDEN, dtype=torch.float64), []
    weights = layer.router._routing_weights

    def noting(logits_te: Tensor, scores_te: Tensor, experts_tk: Tensor) -> Tensor:
        seen.append(logits_te.detach())
        return weights(logits_te, scores_te, experts_tk)

    with mock.patch.object(layer.router, "_routing_weights", noting):
        for keys in (None, DropoutKeys(1, (0, 1, 2))):
            layer.router(x_sbh, keys)
    exact, jittered = seen
    assert (exact == 1.0).all()
    assert jittered.unique().numel() > 0.9 * jittered.numel()
    assert 0.8 <= jittered.min().item() < 0.81
    assert 1.19 < jittered.max().item() <= 1.2
    assert jittered.mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("experts", "groups", "kept", "k"), [(16, 4, 2, 3), (6, 6, 2, 2), (12, 2, 1, 4), (8, 4, 4, 5)])
def test_a_token_chooses_within_its_groups(score: str, experts: int, groups: int, kept: int, k: int) -> None:
    """Group by group: the two best of each, with their biases, are added up; of the best groups the best experts."""
    form = {"moe_router_num_groups": groups, "moe_router_group_topk": kept, "moe_router_score_function": score}
    layer = _layer(num_experts=[experts], moe_router_topk=k, moe_router_enable_expert_bias=True, **form)
    bias = layer.router.expert_bias
    assert bias is not None
    bias.copy_(torch.randn(experts, generator=torch.Generator().manual_seed(4)) * 0.05 - 2.0)
    x_sbh, differ = _input(), 0
    found_tk = layer.router(x_sbh).experts_tk
    of_scores = {"softmax": lambda x: x.softmax(0), "sigmoid": torch.sigmoid, "sqrtsoftplus": lambda x: x.exp().log1p()}
    for number, x_h in enumerate(x_sbh.flatten(0, 1)):
        scores = of_scores[score](layer.router.weight @ x_h)
        ranking = ((scores.sqrt() if score == "sqrtsoftplus" else scores) + bias).tolist()
        size = experts // groups
        members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
        best = [sum(sorted((ranking[e] for e in group), reverse=True)[:2]) for group in members]
        open_to = [e for g in _chosen(best, kept) for e in members[g]]
        wanted = sorted(open_to, key=lambda e: -ranking[e])[:k]
        assert found_tk[number].tolist() == wanted
        differ += set(wanted) != set(_chosen(ranking, k))
    assert (differ > 3) == (kept < groups < experts)


LOSSES = ["aux_loss", "seq_aux_loss", "global_aux_loss", "global_aux_loss at first", "all", "aux_loss of sigmoids"]


@pytest.mark.parametrize("kind", LOSSES)
def test_the_layers_losses_and_their_gradients(kind: str) -> None:
    kinds, weights = [kind.partition(" ")[0]], [0.3]
    score = "sigmoid" if kind.endswith("sigmoids") else "softmax"
    if kind == "all":
        kinds, weights = ["seq_aux_loss", "aux_loss", "global_aux_loss"], [0.5, 0.0, 0.2]
    given = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": weights, "moe_router_score_function": score}
    layer = _layer(**given, moe_z_loss_coeff=0.02)
    x_sbh = _input().requires_grad_()
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    before_e = torch.tensor([0.1, 0.5, 0.25, 0.15], dtype=torch.float64)
    out_sbh, _ = layer(x_sbh, _step(seen, loss_grad=7.0, before=_NONE if kind.endswith("first") else {0: before_e}))
    (out_sbh * 0.0).sum().backward()
    found = layer.router.weight.grad
    assert x_sbh.grad is not None
    found_x = x_sbh.grad
    x_sbh.grad = layer.router.weight.grad = None
    logits_sbe = x_sbh @ layer.router.weight.t()
    chosen_sbe = F.one_hot(logits_sbe.topk(2).indices, 4).sum(-2).double() / 2
    sigmoids_sbe = logits_sbe.sigmoid()
    scores_sbe = logits_sbe.softmax(-1) if score == "softmax" else sigmoids_sbe / sigmoids_sbe.sum(-1, keepdim=True)
    balances = [4 * (scores_sbe[:, b].mean(0) * chosen_sbe[:, b].mean(0)).sum() for b in range(SAMPLES)]
    own = 4 * (scores_sbe.mean((0, 1)) * chosen_sbe.mean((0, 1))).sum()
    each = {
        "aux_loss": own,
        "seq_aux_loss": sum(balances, start=torch.zeros(())) / SAMPLES,
        "global_aux_loss": own if kind.endswith("first") else 4 * (scores_sbe.mean((0, 1)) * before_e).sum(),
    }
    z = logits_sbe.exp().sum(-1).log().square().mean()
    wanted = [each[name] for name in kinds]
    (7.0 * (sum(w * loss for w, loss in zip(weights, wanted, strict=True)) + 0.02 * z)).backward()
    torch.testing.assert_close(found, layer.router.weight.grad, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(found_x, x_sbh.grad, rtol=1e-11, atol=1e-13)
    counts, losses = seen[0, 2]
    assert counts.tolist() == (chosen_sbe.sum((0, 1)) * 2).long().tolist()
    assert losses.tolist() == pytest.approx([float(loss.detach()) for loss in (*wanted, z)], rel=1e-12)


def test_what_is_beside_the_experts() -> None:
    x_sbh = _input()
    for form in (
        {"moe_shared_expert_intermediate_size": 10},
        {"moe_shared_expert_intermediate_size": 10, "moe_shared_expert_gate": True},
        {"mlp_type": "residual"},
    ):
        layer = _layer(**form)
        assert layer.shared is not None
        beside, bias = layer.shared(x_sbh)
        beside = beside if bias is None else beside + bias
        routed = _by_token(layer, x_sbh)
        if layer.mixing is None:
            wanted = routed + beside
        elif "mlp_type" in form:
            share = F.linear(x_sbh, layer.mixing.weight, layer.mixing.bias).softmax(-1)
            wanted = beside * share[..., :1] + routed * share[..., 1:]
        else:
            wanted = routed + beside * (x_sbh @ layer.mixing.weight.t()).sigmoid()
        torch.testing.assert_close(layer(x_sbh, ForwardContext())[0], wanted, rtol=1e-12, atol=1e-12)


def test_which_layers_have_experts() -> None:
    def of(**changes: Any) -> dict[int, int]:
        given = {"num_layers": 5, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, **changes}
        return resolve_model(ModelConfig(**given)).expert_layers

    assert of(num_experts=[4]) == dict.fromkeys(range(5), 4)
    assert of(num_experts=[4], expert_interval=2) == {1: 4, 3: 4}
    assert of(num_experts=[4], moe_layer_freq=2) == {0: 4, 2: 4, 4: 4}
    assert of(num_experts=[4, 8], expert_interval=2) == {1: 4, 3: 8}
    assert of(num_experts=[1, 8], expert_interval=2) == {3: 8}
    assert of(num_experts=[1]) == {}
    assert of() == {}


def test_one_weight_is_for_all_losses_that_balance_experts() -> None:
    given = ModelConfig(moe_router_load_balancing_type=["seq_aux_loss", "aux_loss"], moe_aux_loss_coeff=[0.25])
    assert given.expert_losses == {"seq_aux_loss": 0.25, "aux_loss": 0.25, "z": 0.0}
    each = dataclasses.replace(given, moe_aux_loss_coeff=[0.25, 0.5], moe_z_loss_coeff=2.0)
    assert each.expert_losses == {"seq_aux_loss": 0.25, "aux_loss": 0.5, "z": 2.0}
    assert each.balance_weight == 0.75


def test_layers_with_experts_are_not_compiled_nor_experts_in_8_bits() -> None:
    """Both experts get all 32 tokens, whose products would fit."""
    stage, compiled = tiny_gpt({"model": {"num_experts": [2], "expert_interval": 2}}), []
    with mock.patch.object(nn.Module, "compile", lambda layer, **_: compiled.append(layer.layer)):
        stage.compile_layers()
    assert compiled == [0, 2]
    layer = next(module for module in stage.modules() if isinstance(module, Experts))
    x_sbh = torch.randn(16, 2, stage.config.hidden_size)
    before, _ = layer(x_sbh, ForwardContext())
    stage.compute_in_fp8("rowwise")
    assert torch.equal(layer(x_sbh, ForwardContext())[0], before)
