"""A group of one rank communicates nothing; errors are one line that names the group."""

from __future__ import annotations

import pytest
import torch

from megatron.topology.errors import CommunicationError, first_line
from megatron.topology.group import Group, Pending
from megatron.topology.topology import single_process


@pytest.fixture
def alone() -> Group:
    return Group(None, (0,), 0, "alone", "none")


def test_a_lone_rank_gets_its_own_values_back_for_nothing(alone: Group) -> None:
    x = torch.arange(3.0)
    sent = 0
    for call in (alone.all_reduce, alone.broadcast):
        pending = call(x)
        pending.wait()
        assert pending.done()
        sent += pending.sent_bytes
    assert torch.equal(x, torch.arange(3.0))
    for collect in (alone.all_gather, alone.reduce_scatter):
        out = torch.full((3,), -1.0)
        pending = collect(out, x)
        pending.wait()
        sent += pending.sent_bytes
        assert torch.equal(out, x)
        collect(x, x).wait()
    assert torch.equal(x, torch.arange(3.0))
    alone.barrier()
    assert sent == 0


def test_a_failure_names_operation_and_peers() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("connection reset by peer\nmore of it")

    pending = Pending(Broken(), 0, "all-reduce over data-parallel (ranks 1, 3)")  # type: ignore[arg-type]
    with pytest.raises(CommunicationError) as caught:
        pending.wait()
    assert str(caught.value) == "all-reduce over data-parallel (ranks 1, 3) failed: connection reset by peer"


def test_an_error_without_text_is_named_by_its_type() -> None:
    assert first_line(KeyError()) == "KeyError"


def test_finishing_work_runs_once(alone: Group) -> None:
    calls: list[int] = []
    pending = Pending(None, 0, "local", finish=lambda: calls.append(1))
    pending.wait()
    pending.wait()
    assert calls == [1]


def test_a_single_process_is_every_end_of_the_mesh() -> None:
    topology = single_process()
    assert topology.layout.world_size == 1
    assert topology.is_first_stage
    assert topology.is_last_stage
    assert topology.is_last_rank
    assert topology.embedding is None
    groups = (topology.world, topology.control, topology.tp, topology.dp, topology.pp)
    assert all(group.size == 1 and group.rank == 0 for group in groups)
