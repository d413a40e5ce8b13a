"""Several NCCL ranks on one GPU: NCCL takes each for a separate host, and connects them over sockets."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.device import sharing

ONE_CHANNEL = {
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_NSOCKS_PERTHREAD": "1",
    "NCCL_SOCKET_NTHREADS": "1",
}
"""Makes NCCL's sockets as slow as a single stream of bytes, so that large messages saturate them."""


@contextmanager
def turn_on_the_gpu(alone: bool) -> Iterator[None]:
    """A test's turn among those of all processes: with others, or (``alone``) once no other's goes on, and before any
    other's begins."""
    with (Path(tempfile.gettempdir()) / f"megatron-gpu-tests-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child may have inherited the file


def be_a_host() -> None:
    """Sets NCCL's variables; call it before the process group is made."""
    os.environ.update(sharing(int(os.environ["RANK"])))


def join_on_one_gpu(timeout_s: float) -> torch.device:
    """Joins the other ranks of ``run_ranks(..., init=False)`` over NCCL, all of them on GPU 0."""
    be_a_host()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s))
    return device
