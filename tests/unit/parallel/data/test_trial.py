"""Measurements of trial reductions."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.compression.api import Trial
from megatron.distributed.clock import HostClock
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.parallel.data.trial import TrialReduction, run_trial


def test_a_trial_is_the_mean_of_all_repeats_but_the_first() -> None:
    """The first repeat creates the states. Times of several reductions of a rank add up."""
    clock = [0.0]
    durations = iter([7.0, 2.0, 4.0, 70.0, 20.0, 40.0])

    def run(copy: Tensor) -> None:
        clock[0] += next(durations)
        copy += copy[0].clone()

    reduced = torch.tensor([1.0, 3.0])
    tried = TrialReduction(reduced, slice(0, 2), lambda copy: None, run, 2, [])
    world, ledger = Group(None, (0,), 0, "world", "none"), Ledger(HostClock(lambda: clock[0]))
    assert run_trial(Trial(None), [tried, tried], world, ledger).tolist() == [33.0, 2.0, 20.0]
    durations = iter([5.0])
    assert run_trial(Trial(None, repeats=1), [tried], world, ledger).tolist() == [5.0, 1.0, 10.0]
