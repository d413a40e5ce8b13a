"""Groups of a single rank, pairs that post all messages at once, and errors of a single line."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.distributed import group as groups
from megatron.distributed.errors import CommunicationError, first_line, reason
from megatron.distributed.group import Group, Pending
from megatron.distributed.topology import single_process


@pytest.fixture
def alone() -> Group:
    return Group(None, (0,), 0, "alone", "none")


def test_a_single_rank_gets_its_values_without_sending(alone: Group) -> None:
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


def test_blanks_before_an_error_are_no_part_of_its_first_line() -> None:
    assert first_line(ValueError("\n no registry at 'sqlite:'\nmore")) == "no registry at 'sqlite:'"
    assert first_line(ValueError(" \n")) == "ValueError"


def test_the_finish_function_runs_once(alone: Group) -> None:
    calls: list[int] = []
    pending = Pending(None, 0, "local", finish=lambda: calls.append(1))
    pending.wait()
    pending.wait()
    assert calls == [1]


def test_a_single_process_is_first_and_last_in_every_group() -> None:
    topology = single_process()
    assert topology.layout.world_size == 1
    assert topology.coordinates.pp == topology.layout.pp - 1 == 0
    assert topology.is_last_rank
    assert topology.embedding == {}
    groups = (topology.world, topology.control, topology.tp, topology.dp, topology.pp)
    assert all(group.size == 1 and group.rank == 0 for group in groups)


class Silent:
    """Handle of a completed operation."""

    def __init__(self, events: list[str], operation: str) -> None:
        self.events, self.what = events, operation

    def wait(self) -> None:
        self.events.append(f"wait for {self.what}")

    def is_completed(self) -> bool:
        return True


def test_two_ranks_post_all_messages_of_exchanges_at_once() -> None:
    """Receives are posted before messages arrive, whatever is in flight."""
    events: list[str] = []

    def irecv(x: Tensor, group: object, tag: int, group_src: int) -> Silent:
        events.append(f"receive {x.numel()} from {group_src}")
        return Silent(events, f"receive {x.numel()}")

    def isend(x: Tensor, group: object, tag: int, group_dst: int) -> Silent:
        events.append(f"send {x.view(-1).tolist()} to {group_dst}")
        return Silent(events, f"send {x.numel()}")

    pair = Group(None, (4, 7), 1, "pair", "gloo")
    received, gathered = torch.zeros(2, 2), torch.zeros(6)
    with mock.patch.object(groups.dist, "irecv", irecv), mock.patch.object(groups.dist, "isend", isend):
        exchange = pair.all_to_all(received, torch.arange(4.0).view(2, 2))
        gather = pair.all_gather(gathered, torch.ones(3))
    posted = ["receive 2 from 0", "send [0.0, 1.0] to 0", "receive 3 from 0", "send [1.0, 1.0, 1.0] to 0"]
    assert events == posted
    assert received[1].tolist() == [2.0, 3.0]
    assert gathered[3:].tolist() == [1.0] * 3
    deadline = time.monotonic() + 30
    for pending in (gather, exchange):
        while not pending.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        pending.wait()
    waits = ["wait for receive 3", "wait for send 3", "wait for receive 2", "wait for send 2"]
    assert events[len(posted) :] == waits


RECORDED = {
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\n"
    "ncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer user<50260>\n": (
        "NCCL: internal error: Net : Connection closed by remote peer user<50260>"
    ),
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000": (
        "NCCL: invalid usage (run with NCCL_DEBUG=WARN for details): "
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000"
    ),
    "NCCL error: remote process exited or there was a network error, NCCL version 2.14.3\nncclRemoteError: A call "
    "failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129": (
        "NCCL: remote process exited or there was a network error: "
        "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129"
    ),
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, "
    "NumelOut=112, Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out.\nException raised from "
    "checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632 (most recent call first):\n"
    "frame #0: c10::Error::Error": ("NCCL: no answer in 1800 s (broadcast)"),
    "NCCL communicator was aborted on rank 0.": "NCCL communicator was aborted on rank 0.",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3411": (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3411"
    ),
}


@pytest.mark.parametrize("text", RECORDED)
def test_errors_of_backends_become_one_line(text: str) -> None:
    assert reason(RuntimeError(text)) == RECORDED[text]


def test_an_error_of_the_device_names_the_receive() -> None:
    class Lost:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later")

    pending = Pending(None, 0, "receive from rank 1 over pipeline-forward (ranks 0, 1)", _event=Lost())  # type: ignore[arg-type]
    with pytest.raises(CommunicationError) as caught:
        pending.synchronize()
    expected = "receive from rank 1 over pipeline-forward (ranks 0, 1) failed: CUDA error: unspecified launch failure"
    assert str(caught.value) == expected
