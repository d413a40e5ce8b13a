"""Expert loads of the last step, for the losses and biases of the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.resolve_model import resolve_model
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import single_process
from megatron.models.experts import Experts
from megatron.models.rank_context import RankContext
from megatron.models.stage import Stage
from megatron.parallel.data.sync_warmup import no_sync_warmup
from megatron.parallel.tensor.collectives import TensorComm
from megatron.training.experts import MOE_LOSS, ExpertTally


def _model(num_layers: int = 2, **options: Any) -> ModelConfig:
    return resolve_model(
        ModelConfig(num_layers=num_layers, hidden_size=8, num_attention_heads=2, seq_length=4, **options)
    )


def _tally() -> ExpertTally:
    model = _model(num_experts=[2, 3], moe_router_load_balancing_type=["global_aux_loss"])
    return ExpertTally(model, [], single_process("cpu"), Ledger(), no_sync_warmup())


def _step(
    tally: ExpertTally, counts: Sequence[Sequence[list[int]]], step_taken: bool = True, again: bool = False
) -> None:
    tally.begin_step()
    for micro_batch, layer_counts in enumerate(counts):
        for _ in range(1 + again):
            for layer, expert_counts in enumerate(layer_counts):
                tally.statistics[layer, micro_batch] = (torch.tensor(expert_counts), torch.zeros(2))
    tally.finish_step(len(counts), step_taken)


def _shares(tally: ExpertTally) -> dict[int, list[float]]:
    return {layer: shares.tolist() for layer, shares in tally.context(0, torch.ones(())).shares.items()}


def test_shares_are_over_all_micro_batches_of_the_last_step() -> None:
    tally = _tally()
    assert _shares(tally) == {}
    _step(tally, [([3, 1], [0, 2, 2]), ([1, 3], [4, 0, 0])], again=True)
    assert _shares(tally) == {0: [0.5, 0.5], 1: [0.5, 0.25, 0.25]}
    _step(tally, [([4, 0], [1, 1, 2])])
    assert _shares(tally) == {0: [1.0, 0.0], 1: [0.25, 0.25, 0.5]}


def test_a_skipped_step_leaves_the_shares_unchanged() -> None:
    tally = _tally()
    _step(tally, [([3, 1], [0, 2, 2])])
    _step(tally, [([4, 0], [4, 0, 0])], step_taken=False)
    assert _shares(tally) == {0: [0.75, 0.25], 1: [0.0, 0.5, 0.5]}


def test_biases_move_towards_balance() -> None:
    """Down for overloaded experts, up for underloaded experts; not after a skipped step."""
    config = _model(1, num_experts=[4], moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    topology = single_process("cpu")
    comm = TensorComm(topology.tp, Ledger(), CompressionPlan({}))
    layer = Experts(RankContext(config, comm, torch.device("cpu"), torch.float32), 0)
    tally = ExpertTally(config, cast("list[Stage]", [layer]), topology, Ledger(), no_sync_warmup())
    bias = layer.router.expert_bias
    assert bias is not None
    once = [-0.25, 0.0, 0.25, 0.25]
    for step_taken, expected in ((True, once), (False, once), (True, [-0.5, 0, 0.5, 0.5])):
        _step(tally, [([4, 1, 0, 0],), ([2, 1, 0, 0],)], step_taken)
        assert bias.tolist() == expected


def test_the_loss_is_a_sum_over_layers_and_a_mean_over_micro_batches() -> None:
    model = _model(num_experts=[2], moe_aux_loss_coeff=[0.5], moe_z_loss_coeff=0.25)
    tally = ExpertTally(model, [], single_process("cpu"), Ledger(), no_sync_warmup())
    for micro_batch in range(3):
        for layer in range(2):
            losses = torch.tensor([2.0 + layer, 4.0 * micro_batch])
            tally.statistics[layer, micro_batch] = (torch.tensor([1, 1]), losses)
    named, loads = tally.finish_step(3, step_taken=True)
    assert named == {MOE_LOSS: pytest.approx(0.5 * (2 + 3) + 0.25 * 2 * 4)}
    assert loads == {0: (3.0, 3.0), 1: (3.0, 3.0)}


def test_counts_are_saved_and_loaded() -> None:
    tally, other = _tally(), _tally()
    assert tally.state_dict() == {}
    other.load_state_dict({})  # of an earlier version
    assert _shares(other) == {}
    _step(tally, [([3, 1], [0, 2, 2])])
    other.load_state_dict(tally.state_dict())
    assert _shares(other) == _shares(tally)
    assert other.state_dict() == tally.state_dict() == {"0": [3.0, 1.0], "1": [0.0, 2.0, 2.0]}
    with pytest.raises(ValueError, match="invalid literal"):
        other.load_state_dict({"x": [1.0]})
