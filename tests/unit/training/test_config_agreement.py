"""Messages of a rank that cannot start to the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.distributed.errors import CommunicationError
from megatron.distributed.process_group import LaunchEnvironment
from megatron.training import config_agreement as meeting
from megatron.training.config_agreement import RankAgreement


@pytest.mark.parametrize("failed_rank", [0, 1])
@pytest.mark.parametrize("bad_input", [False, True])
def test_a_failure_is_one_line_with_its_rank(
    failed_rank: int, bad_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "open_rendezvous_store", lambda env, minutes: store)

    def rank(number: int) -> str:
        agreement = RankAgreement(LaunchEnvironment(number, 2, number), 0.2)
        if number == failed_rank:
            assert agreement.refuse("KeyError: 'x'\nmore of it", bad_input=bad_input)
            return ""
        with pytest.raises(UserError if bad_input else CommunicationError) as error:
            agreement.agree({})
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        message = "".join(pool.map(rank, range(2)))
    # Bad input on rank 0 is taken to be bad input on every rank.
    assert message == ("KeyError: 'x'" if bad_input and failed_rank == 0 else f"rank {failed_rank}: KeyError: 'x'")
