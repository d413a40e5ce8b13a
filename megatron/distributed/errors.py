"""Failures of the network or of a peer, and their messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.base.errors import first_line


class CommunicationError(RuntimeError):
    """Raised when a collective or a message failed. The message is a single line naming the operation and its ranks."""


_NCCL = re.compile(r"NCCL error(?: in)?: (?:\S+:\d+, )?(?P<what>[^\n]*?)(?:, NCCL version [\d.]+)?(?:\n|$)")
_NCCL_LAST = re.compile(r"Last error:\s*(?P<what>[^\n]+)")
_NCCL_TIMEOUT = re.compile(r"OpType=(?P<what>\w+),.*?Timeout\(ms\)=(?P<limit>\d+)", re.DOTALL)


def reason(error: BaseException) -> str:
    """The one-line reason of a failed collective or message: the end of NCCL's text, or another error's first line."""
    text = str(error)
    timeout, failure, last = _NCCL_TIMEOUT.search(text), _NCCL.search(text), _NCCL_LAST.search(text)
    if timeout:
        return f"NCCL: no answer in {int(timeout['limit']) / 1000:g} s ({timeout['what'].lower()})"
    if failure:
        return f"NCCL: {failure['what']}" + (f": {last['what'].strip()}" if last else "")
    return first_line(error)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for people: "rank 3", "ranks 1, 2 and 4 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed_ranks = ", ".join(map(str, ranks[:4]))
    return f"ranks {listed_ranks}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
