"""The tally of experts: what the next step's losses know of the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.comm.ledger import Ledger
from megatron.config.model import ModelConfig, resolve_model
from megatron.topology.topology import single_process
from megatron.training.experts import ExpertTally


def _tally() -> ExpertTally:
    given: dict[str, Any] = {"num_experts": [2, 3], "moe_router_load_balancing_type": ["global_aux_loss"]}
    given |= {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    return ExpertTally(resolve_model(ModelConfig(**given)), [], single_process("cpu"), Ledger())


def _step(
    tally: ExpertTally, counts: list[tuple[list[int], list[int]]], taken: bool = True, again: bool = False
) -> None:
    tally.begin()
    for micro_batch, of_layers in enumerate(counts):
        for _ in range(1 + again):
            for layer, one in enumerate(of_layers):
                tally.seen[layer, micro_batch] = (torch.tensor(one), torch.zeros(2))
    tally.finish(len(counts), taken)


def _shares(tally: ExpertTally) -> dict[int, list[float]]:
    return {layer: one.tolist() for layer, one in tally.context(0, torch.ones(())).shares.items()}


def test_the_next_step_knows_the_shares_of_all_micro_batches_of_the_last() -> None:
    tally = _tally()
    assert _shares(tally) == {}
    _step(tally, [([3, 1], [0, 2, 2]), ([1, 3], [4, 0, 0])], again=True)
    assert _shares(tally) == {0: [0.5, 0.5], 1: [0.5, 0.25, 0.25]}
    _step(tally, [([4, 0], [1, 1, 2])])
    assert _shares(tally) == {0: [1.0, 0.0], 1: [0.25, 0.25, 0.5]}


def test_a_skipped_step_is_not_the_last() -> None:
    tally = _tally()
    _step(tally, [([3, 1], [0, 2, 2])])
    _step(tally, [([4, 0], [4, 0, 0])], taken=False)
    assert _shares(tally) == {0: [0.75, 0.25], 1: [0.0, 0.5, 0.5]}


def test_counts_are_saved_and_loaded() -> None:
    tally, other = _tally(), _tally()
    assert tally.state_dict() == {}
    other.load_state_dict({})  # as of a version that did not save them
    assert _shares(other) == {}
    _step(tally, [([3, 1], [0, 2, 2])])
    other.load_state_dict(tally.state_dict())
    assert _shares(other) == _shares(tally)
    assert other.state_dict() == tally.state_dict() == {"0": [3.0, 1.0], "1": [0.0, 2.0, 2.0]}
    with pytest.raises(ValueError, match="invalid literal"):
        other.load_state_dict({"x": [1.0]})
