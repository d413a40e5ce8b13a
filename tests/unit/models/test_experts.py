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
from megatron.parallel.tensor.grouped import are_adjacent, stack_weights
from megatron.parallel.tensor.random import DropoutKeys
from megatron.parallel.tensor.shards import collect_specs
from tests.support.tiny import tiny_gpt

TOKENS, SAMPLES, HIDDEN = 6, 3, 8
GATED = {"swiglu": True, "add_bias_linear": False}
Statistics = dict[tuple[int, int], tuple[Tensor, Tensor]]


def _layer(**changes: Any) -> Experts:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "seq_length": TOKENS}
    experts: dict[str, Any] = {"num_experts": [4], "ffn_hidden_size": 16, "moe_ffn_hidden_size": 12}
    config = resolve_model(ModelConfig(**{**sizes, **experts, **changes}))
    check_model(config)
    comm = TensorComm(single_process("cpu").tp, Ledger(), CompressionPlan({}))
    layer = Experts(RankContext(config, comm, torch.device("cpu"), torch.float64), 0)
    generator = torch.Generator().manual_seed(3)
    for param in layer.parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.5
    return layer


def _input() -> Tensor:
    return torch.randn(TOKENS, SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _step(statistics: Statistics, loss_grad: float = 0.0, shares: Mapping[int, Tensor] | None = None) -> ForwardContext:
    """A training step of two micro-batches, with the last step's shares."""
    scale = torch.tensor(loss_grad, dtype=torch.float64)
    return ForwardContext(experts=ExpertContext(2, scale, shares or {}, statistics))


def _mlp(x_h: Tensor, expert: nn.Module, swiglu: bool = False) -> Tensor:
    assert isinstance(expert, Expert)
    up, down = expert.dense_h_to_4h, expert.dense_4h_to_h
    if swiglu:
        gate, value = (x_h @ weight.t() for weight in up.weight)
        return (F.silu(gate) * value) @ down.weight.t()
    assert up.bias is not None
    assert down.bias is not None
    return F.gelu(x_h @ up.weight.t() + up.bias, approximate="tanh") @ down.weight.t() + down.bias


def _chosen(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


def _by_token(layer: Experts, x_sbh: Tensor, dropped: Collection[tuple[int, int]] = ()) -> Tensor:
    """Sums each token's experts by the softmax of their logits, except for dropped pairs of token and expert."""
    rows = []
    for number, x_h in enumerate(x_sbh.flatten(0, 1)):
        logits = layer.router.weight @ x_h
        chosen = _chosen(logits.tolist(), layer.config.moe_router_topk)
        weights = torch.stack([logits[e] for e in chosen]).softmax(0)
        terms = [
            weight * _mlp(x_h, layer.experts[str(e)], layer.config.swiglu)
            for weight, e in zip(weights, chosen, strict=True)
            if (number, e) not in dropped
        ]
        rows.append(sum(terms, start=torch.zeros_like(x_h)))
    return torch.stack(rows).view_as(x_sbh)


def _results(layer: Experts, x_sbh: Tensor, by_token: bool = False) -> list[Any]:
    """Outputs and gradients of a layer, or of the loop over tokens, which does not use every expert."""
    x_sbh = x_sbh.detach().requires_grad_()
    layer.zero_grad()
    out_sbh = _by_token(layer, x_sbh) if by_token else layer(x_sbh, ForwardContext())[0]
    (out_sbh.square() * torch.arange(1, 1 + out_sbh.numel()).view_as(out_sbh)).sum().backward()
    params = (x_sbh, *layer.parameters())
    assert by_token or all(param.grad is not None for param in params)
    return [out_sbh.detach(), *(torch.zeros_like(param) if param.grad is None else param.grad for param in params)]


@pytest.mark.parametrize("form", [{}, GATED, {"moe_router_topk": 3}])
def test_outputs_and_gradients_match_a_loop_over_tokens(form: dict[str, Any]) -> None:
    layer, x_sbh = _layer(**form), _input()
    assert layer(x_sbh, ForwardContext())[1] is None, "the bias of a layer with experts is in its output"
    for actual, expected in zip(_results(layer, x_sbh), _results(layer, x_sbh, by_token=True), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", [{}, GATED])
@pytest.mark.parametrize("contiguous", [True, False])
def test_grouped_products_match_a_loop_over_experts(form: dict[str, Any], contiguous: bool) -> None:
    """The code for CUDA, on the CPU; weights may lie anywhere."""
    layer = _layer(num_experts=[16], **form).float()
    for name in ("dense_h_to_4h", "dense_4h_to_h") if contiguous else ():
        weights = [getattr(expert, name).weight for expert in layer.experts.values()]
        stack = torch.stack([weight.detach() for weight in weights])
        for weight, row in zip(weights, stack, strict=True):
            weight.data = row
        with torch.no_grad():
            assert stack_weights(weights).data_ptr() == stack.data_ptr()
    results = []
    for grouped in (False, True):
        with mock.patch("megatron.models.experts.supports_grouped_products", return_value=grouped):
            results.append(_results(layer, _input().float()))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert any(not gradient.any() for gradient in results[1][2:]), "some expert has no token"


@pytest.mark.parametrize("form", [{}, GATED])
def test_padded_groups_change_nothing(form: dict[str, Any]) -> None:
    layer, results, sizes = _layer(num_experts=[16], **form), [], []
    for padding in (0, 5):
        with (
            mock.patch("megatron.models.experts.supports_grouped_products", return_value=False),
            mock.patch("megatron.models.experts.round_up_rows", lambda rows, padding=padding: len(rows) + padding),
            mock.patch("megatron.models.experts.linear", side_effect=F.linear) as products,
        ):
            results.append(_results(layer, _input()))
        sizes.append([len(call.args[0]) for call in products.call_args_list])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert [size + 5 for size in sizes[0]] == sizes[1] != []


@pytest.mark.parametrize("form", [{"swiglu": True}, {"moe_ffn_hidden_size": HIDDEN}])
@pytest.mark.parametrize("bucket_elements", [None, 1])
def test_grouped_products_need_no_copy_in_a_bucket(bucket_elements: int | None, form: dict[str, Any]) -> None:
    layers = [_layer(num_experts=[4], add_bias_linear=False, **form) for _ in range(2)]
    model = nn.ModuleList(layers)
    FlatBuffer(named_params(collect_specs(model), model), torch.float64, single_process("cpu").dp, bucket_elements)
    for layer in layers:
        experts = [expert for expert in layer.experts.values() if isinstance(expert, Expert)]
        for weights in ([expert.up[0] for expert in experts], [expert.down[0] for expert in experts]):
            assert are_adjacent(weights) == (bucket_elements is None)
            with torch.no_grad():
                assert (stack_weights(weights).data_ptr() == weights[0].data_ptr()) == (bucket_elements is None)
                assert torch.equal(stack_weights(weights), torch.stack(weights))


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    layer = _layer(num_experts=[64])
    out_sbh, _ = layer(_input(), ForwardContext())
    out_sbh.sum().backward()
    grads: list[Any] = [expert.get_parameter("dense_4h_to_h.weight").grad for expert in layer.experts.values()]
    assert sum(not grad.any() for grad in grads) > 20


@pytest.mark.parametrize("policy", ["position", "probs"])
def test_tokens_beyond_the_capacity_skip_their_expert(policy: str) -> None:
    factor = 0.6
    layer = _layer(moe_expert_capacity_factor=factor, moe_min_capacity=1, moe_token_drop_policy=policy)
    x_sbh, tokens = _input(), TOKENS * SAMPLES
    capacity = math.ceil(tokens * 2 / 4 * factor)
    requests: dict[int, list[tuple[float, int]]] = {}
    for number, x_h in enumerate(x_sbh.flatten(0, 1)):
        logits = (layer.router.weight @ x_h).tolist()
        chosen = _chosen(logits, 2)
        weights = torch.tensor([logits[e] for e in chosen]).softmax(0).tolist()
        for weight, e in zip(weights, chosen, strict=True):
            requests.setdefault(e, []).append((-weight if policy == "probs" else number, number))
    dropped = {(number, e) for e, queue in requests.items() for _, number in sorted(queue)[capacity:]}
    assert len(dropped) > 3
    out_sbh, _ = layer(x_sbh, _step({}))
    torch.testing.assert_close(out_sbh, _by_token(layer, x_sbh, dropped), rtol=1e-12, atol=1e-12)


def test_an_integer_capacity_is_not_rounded_up() -> None:
    """50 choices per expert times 1.1 are 55, but 55.00000000000001 in floats."""
    x_sbh = torch.randn(50, 1, HIDDEN, dtype=torch.float64)
    for factor, capacity in ((1.1, 55), (1.11, 56), (0.3, 15)):
        layer = _layer(num_experts=[2], moe_expert_capacity_factor=factor, moe_min_capacity=1)
        assert layer.router(x_sbh, context=_step({}).experts).capacity == capacity


def test_capacities_of_evaluation_and_of_few_tokens() -> None:
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
    layer, x_sbh = _layer(**form), _input()
    routing = layer.router(x_sbh)
    for number, x_h in enumerate(x_sbh.flatten(0, 1)):
        logits = layer.router.weight @ x_h
        chosen = _chosen(logits.tolist(), layer.config.moe_router_topk)
        assert routing.experts_tk[number].tolist() == chosen
        torch.testing.assert_close(routing.weights_tk[number], weights_of(logits, chosen), rtol=1e-12, atol=0)


def test_expert_biases_affect_the_choice_but_not_the_weights() -> None:
    layer, x_sbh = _layer(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True), _input()
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
def test_gradients_are_finite_when_scores_underflow(score: str) -> None:
    layer = _layer(moe_router_score_function=score).float()
    layer.router.weight.data.fill_(-100.0)
    x_sbh = torch.full((2, 1, HIDDEN), 10.0, requires_grad=True)
    routing = layer.router(x_sbh)
    (gradient,) = torch.autograd.grad(routing.weights_tk.sum() + routing.losses.sum(), x_sbh)
    assert gradient.isfinite().all()


def test_the_routers_input_is_jittered_in_training_alone() -> None:
    """By independent numbers, uniform within eps of 1."""
    layer = _layer(num_experts=[HIDDEN], moe_input_jitter_eps=0.2)
    layer.router.weight.data = torch.eye(HIDDEN, dtype=torch.float64)
    x_sbh = torch.ones(100, SAMPLES, HIDDEN, dtype=torch.float64)
    with mock.patch.object(layer.router, "_routing_weights", wraps=layer.router._routing_weights) as weights:
        for keys in (None, DropoutKeys(1, (0, 1, 2))):
            layer.router(x_sbh, keys)
    exact, jittered = (call.args[0] for call in weights.call_args_list)
    assert (exact == 1.0).all()
    assert jittered.unique().numel() > 0.9 * jittered.numel()
    assert 0.8 <= jittered.min().item() < 0.81
    assert 1.19 < jittered.max().item() <= 1.2
    assert jittered.mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("sizes", [(16, 4, 2, 3), (6, 6, 2, 2), (12, 2, 1, 4), (8, 4, 4, 5)])
def test_a_token_chooses_within_its_best_groups(score: str, sizes: tuple[int, int, int, int]) -> None:
    """The score of a group is the sum of its two best experts' scores, with their biases."""
    experts, groups, top_groups, k = sizes
    form = {"moe_router_num_groups": groups, "moe_router_group_topk": top_groups, "moe_router_score_function": score}
    layer = _layer(num_experts=[experts], moe_router_topk=k, moe_router_enable_expert_bias=True, **form)
    bias = layer.router.expert_bias
    assert bias is not None
    bias.copy_(torch.randn(experts, generator=torch.Generator().manual_seed(4)) * 0.05 - 2.0)
    x_sbh, differ = _input(), 0
    experts_tk = layer.router(x_sbh).experts_tk
    functions = {"softmax": lambda x: x.softmax(0), "sigmoid": torch.sigmoid, "sqrtsoftplus": lambda x: x.exp().log1p()}
    for number, x_h in enumerate(x_sbh.flatten(0, 1)):
        scores = functions[score](layer.router.weight @ x_h)
        ranking = ((scores.sqrt() if score == "sqrtsoftplus" else scores) + bias).tolist()
        size = experts // groups
        members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
        best = [sum(sorted((ranking[e] for e in group), reverse=True)[:2]) for group in members]
        candidates = [e for g in _chosen(best, top_groups) for e in members[g]]
        expected = sorted(candidates, key=lambda e: -ranking[e])[:k]
        assert experts_tk[number].tolist() == expected
        differ += set(expected) != set(_chosen(ranking, k))
    assert (differ > 3) == (top_groups < groups < experts)


LOSSES = ["aux_loss", "seq_aux_loss", "global_aux_loss", "global_aux_loss at first", "all", "aux_loss of sigmoids"]


@pytest.mark.parametrize("kind", LOSSES)
def test_the_layers_losses_and_their_gradients(kind: str) -> None:
    kinds, weights = [kind.partition(" ")[0]], [0.3]
    score = "sigmoid" if kind.endswith("sigmoids") else "softmax"
    if kind == "all":
        kinds, weights = ["seq_aux_loss", "aux_loss", "global_aux_loss"], [0.5, 0.0, 0.2]
    flags = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": weights, "moe_router_score_function": score}
    layer, x_sbh = _layer(**flags, moe_z_loss_coeff=0.02), _input().requires_grad_()
    statistics: Statistics = {}
    shares_e = torch.tensor([0.1, 0.5, 0.25, 0.15], dtype=torch.float64)
    out_sbh, _ = layer(x_sbh, _step(statistics, 7.0, None if kind.endswith("first") else {0: shares_e}))
    (out_sbh * 0.0).sum().backward()
    gradients = [x_sbh.grad, layer.router.weight.grad]
    x_sbh.grad = layer.router.weight.grad = None
    logits_sbe = x_sbh @ layer.router.weight.t()
    chosen_sbe = F.one_hot(logits_sbe.topk(2).indices, 4).sum(-2).double() / 2
    sigmoids_sbe = logits_sbe.sigmoid()
    scores_sbe = logits_sbe.softmax(-1) if score == "softmax" else sigmoids_sbe / sigmoids_sbe.sum(-1, keepdim=True)
    balances = [4 * (scores_sbe[:, b].mean(0) * chosen_sbe[:, b].mean(0)).sum() for b in range(SAMPLES)]
    balance = 4 * (scores_sbe.mean((0, 1)) * chosen_sbe.mean((0, 1))).sum()
    losses_by_kind = {
        "aux_loss": balance,
        "seq_aux_loss": sum(balances, start=torch.zeros(())) / SAMPLES,
        "global_aux_loss": balance if kind.endswith("first") else 4 * (scores_sbe.mean((0, 1)) * shares_e).sum(),
    }
    z = logits_sbe.exp().sum(-1).log().square().mean()
    expected = [losses_by_kind[name] for name in kinds]
    (7.0 * (sum(w * loss for w, loss in zip(weights, expected, strict=True)) + 0.02 * z)).backward()
    torch.testing.assert_close(gradients, [x_sbh.grad, layer.router.weight.grad], rtol=1e-11, atol=1e-13)
    counts, losses = statistics[0, 2]
    assert counts.tolist() == (chosen_sbe.sum((0, 1)) * 2).long().tolist()
    assert losses.tolist() == pytest.approx([float(loss.detach()) for loss in (*expected, z)], rel=1e-12)


def test_shared_and_residual_experts() -> None:
    x_sbh = _input()
    for form in (
        {"moe_shared_expert_intermediate_size": 10},
        {"moe_shared_expert_intermediate_size": 10, "moe_shared_expert_gate": True},
        {"mlp_type": "residual"},
    ):
        layer = _layer(**form)
        assert layer.shared is not None
        shared, bias = layer.shared(x_sbh)
        shared = shared if bias is None else shared + bias
        routed = _by_token(layer, x_sbh)
        if layer.mixing is None:
            expected = routed + shared
        elif "mlp_type" in form:
            share = F.linear(x_sbh, layer.mixing.weight, layer.mixing.bias).softmax(-1)
            expected = shared * share[..., :1] + routed * share[..., 1:]
        else:
            expected = routed + shared * (x_sbh @ layer.mixing.weight.t()).sigmoid()
        torch.testing.assert_close(layer(x_sbh, ForwardContext())[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("flags", "expert_layers"),
    [
        ({"num_experts": [4]}, dict.fromkeys(range(5), 4)),
        ({"num_experts": [4], "expert_interval": 2}, {1: 4, 3: 4}),
        ({"num_experts": [4], "moe_layer_freq": 2}, {0: 4, 2: 4, 4: 4}),
        ({"num_experts": [4, 8], "expert_interval": 2}, {1: 4, 3: 8}),
        ({"num_experts": [1, 8], "expert_interval": 2}, {3: 8}),
        ({"num_experts": [1]}, {}),
        ({}, {}),
    ],
)
def test_layers_with_experts(flags: dict[str, Any], expert_layers: dict[int, int]) -> None:
    sizes: dict[str, Any] = {"num_layers": 5, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    assert resolve_model(ModelConfig(**sizes, **flags)).expert_layers == expert_layers


def test_a_single_coefficient_is_for_all_balancing_losses() -> None:
    config = ModelConfig(moe_router_load_balancing_type=["seq_aux_loss", "aux_loss"], moe_aux_loss_coeff=[0.25])
    assert config.expert_losses == {"seq_aux_loss": 0.25, "aux_loss": 0.25, "z": 0.0}
    config = dataclasses.replace(config, moe_aux_loss_coeff=[0.25, 0.5], moe_z_loss_coeff=2.0)
    assert config.expert_losses == {"seq_aux_loss": 0.25, "aux_loss": 0.5, "z": 2.0}
    assert config.balance_weight == 0.75


def test_layers_with_experts_are_neither_compiled_nor_in_8_bits() -> None:
    """Both experts get all 32 tokens, enough for 8-bit products."""
    stage, compiled = tiny_gpt({"model": {"num_experts": [2], "expert_interval": 2}}), []
    with mock.patch.object(nn.Module, "compile", lambda layer, **_: compiled.append(layer.layer)):
        stage.compile_layers()
    assert compiled == [0, 2]
    layer = next(module for module in stage.modules() if isinstance(module, Experts))
    x_sbh = torch.randn(16, 2, stage.config.hidden_size)
    before, _ = layer(x_sbh, ForwardContext())
    stage.compute_in_fp8("rowwise")
    assert torch.equal(layer(x_sbh, ForwardContext())[0], before)
