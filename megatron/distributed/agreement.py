"""Small collectives for agreement on failures, so that no rank waits for a failed rank.

Everything works without a process group: ``group=None`` means a single process. Groups are gloo.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.base.errors import UserError, first_line
from megatron.distributed.errors import CommunicationError

T = TypeVar("T")


def rank_of(group: dist.ProcessGroup | None) -> int:
    """This process's rank in the group."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in the group."""
    return 1 if group is None else dist.get_world_size(group)


def run_communication(operation: str, call: Callable[[], T]) -> T:
    """Run a call that communicates.

    Raises:
        CommunicationError: when a peer is gone or too slow.
    """
    try:
        return call()
    except RuntimeError as error:
        raise CommunicationError(f"{operation} failed, a rank is gone or too slow: {first_line(error)}") from error


def any_rank(group: dist.ProcessGroup | None, flag: bool) -> bool:
    """Whether ``flag`` is true on any rank; the same on every rank."""
    if group is None:
        return flag
    value = torch.tensor([int(flag)])
    run_communication("agreement between ranks", lambda: dist.all_reduce(value, dist.ReduceOp.MAX, group=group))
    return bool(value.item())


def gather_texts(group: dist.ProcessGroup | None, text: str) -> list[str]:
    """All-gather texts, which may differ in length; in rank order."""
    if group is None:
        return [text]
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([len(text.encode())])
    lengths = [torch.zeros_like(length) for _ in range(size_of(group))]
    run_communication("agreement between ranks", lambda: dist.all_gather(lengths, length, group=group))
    longest = max(1, *(int(n) for n in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data[:longest]
    rows = [torch.zeros_like(padded) for _ in lengths]
    run_communication("agreement between ranks", lambda: dist.all_gather(rows, padded, group=group))
    return [bytes(row[: int(n)].numpy()).decode() for row, n in zip(rows, lengths, strict=True)]


def take_from_rank_0(group: dist.ProcessGroup | None, value: T) -> T:
    """Return rank 0's value on all ranks: a value of JSON, whose tuples become lists."""
    agreed: T = json.loads(gather_texts(group, json.dumps(value))[0])
    return agreed


def first_problem(group: dist.ProcessGroup | None, problem: str | None) -> str | None:
    """The problem of the lowest rank with a problem, the same on every rank; None if there is none."""
    if not any_rank(group, problem is not None):
        return None
    return next(text for text in gather_texts(group, problem or "") if text)


def raise_together(group: dist.ProcessGroup | None, problem: str | None) -> None:
    """Raise an error on every rank if any rank has a problem.

    Raises:
        UserError: on every rank, with the same text, if any rank has a problem.
    """
    agreed = first_problem(group, problem)
    if agreed is not None:
        raise UserError(agreed)


def run_together(group: dist.ProcessGroup | None, call: Callable[[], T]) -> T:
    """Run a call on every rank, and fail on all ranks if it fails on any.

    Raises:
        UserError: on every rank if any rank raised it.
    """
    result: T | None = None
    problem = None
    try:
        result = call()
    except UserError as error:
        problem = str(error)
    raise_together(group, problem)
    assert problem is None
    return result  # type: ignore[return-value]  # the call may return None
