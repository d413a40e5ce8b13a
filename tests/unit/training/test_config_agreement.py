"""What a rank that will not take part lets the others know."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.distributed.errors import CommunicationError
from megatron.distributed.process_group import LaunchEnvironment
from megatron.training import config_agreement as meeting
from megatron.training.config_agreement import RankAgreement


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("bad_input", [False, True])
def test_a_failure_names_its_rank_and_is_one_line(gone: int, bad_input: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "meet", lambda env, minutes: store)

    def rank(number: int) -> str:
        here = RankAgreement(LaunchEnvironment(number, 2, number), 0.2)
        if number == gone:
            assert here.refuse("KeyError: 'x'\nmore of it", bad_input=bad_input)
            return ""
        with pytest.raises(UserError if bad_input else CommunicationError) as error:
            here.agree({})
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        said = "".join(pool.map(rank, range(2)))
    # What rank 0 refuses is taken to be everyone's bad input.
    assert said == ("KeyError: 'x'" if bad_input and gone == 0 else f"rank {gone}: KeyError: 'x'")
