"""Gradients match the logged losses, for every loss of every kind of model, masked or not."""

from __future__ import annotations

import pytest

from megatron.config.model import LM_LOSS
from megatron.training.experts import MOE_LOSS
from tests.support.descent import Changes, descent_ratio, plain_engines
from tests.support.tiny import T5, tiny_train

EXPERTS = {"num_experts": [4], "moe_aux_loss_coeff": 2.0}

MODELS: dict[str, Changes] = {
    "gpt": {},
    "gpt, two samples a micro-batch": {"training": {"micro_batch_size": 2}},
    "experts, balance": {"model": EXPERTS},
    "experts, balance of sequences": {
        "model": {**EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss"},
        "training": {"micro_batch_size": 2},
    },
    "experts, balance of the batch": {"model": {**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"}},
    "experts, z-loss": {"model": {**EXPERTS, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1.0}},
    "bert": {"model": {"model_type": "bert"}},
    "bert, words alone": {"model": {"model_type": "bert", "bert_binary_head": False}},
    "t5": T5,
    "deberta, classes": {"model": {"model_type": "deberta", "task_head": "classification", "task_classes": 2}},
    "gpt, classes": {"model": {"task_head": "classification", "task_classes": 3}},
    "bert, numbers": {"model": {"model_type": "bert", "task_head": "regression"}},
    "bert, choices": {
        "model": {"model_type": "bert", "task_head": "choice", "task_classes": 2},
        "training": {"micro_batch_size": 2, "global_batch_size": 12},
    },
}


@pytest.mark.parametrize("masked", [False, True], ids=["all count", "masked"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_fall_by_the_square_of_their_gradient(model: str, masked: bool) -> None:
    assert descent_ratio(MODELS[model], masked) == pytest.approx(1.0, abs=1e-6)


def test_the_losses_of_experts_are_means_over_all_tokens() -> None:
    """A loss mask changes the language model's loss alone."""
    masked, unmasked = (
        tiny_train(plain_engines({"model": EXPERTS}, masked), 1, masked).named[0] for masked in (True, False)
    )
    assert masked[MOE_LOSS] == unmasked[MOE_LOSS] > 0
    assert masked[LM_LOSS] != unmasked[LM_LOSS]
