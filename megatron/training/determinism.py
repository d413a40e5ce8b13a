"""``--deterministic-mode``: the same run on the same devices gives the same bits, twice and after a resume.

On CPUs every run is deterministic. On CUDA some torch operations add in thread order, cuBLAS may share workspace
between streams, and NVLink's switches sum in no fixed order. An operation that torch cannot do deterministically ends
the run with its name.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.utils.deterministic

from megatron.base.errors import UserError

_CUBLAS, _CUBLAS_CHOICES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_NCCL, _NCCL_CHOICES = "NCCL_ALGO", ("ring", "collnetdirect", "collnetchain", "^nvls")


def make_deterministic(cuda: bool) -> None:
    """Make torch and its libraries deterministic. Call it before CUDA starts, since cuBLAS and NCCL read it only once.

    Args:
        cuda: whether the run is on GPUs.

    Raises:
        UserError: when a variable is set to something else.
    """
    if cuda:
        _set(_CUBLAS, os.environ.get(_CUBLAS, "").split(), _CUBLAS_CHOICES, ":4096:8")
        # A ring adds in rank order.
        _set(_NCCL, os.environ.get(_NCCL, "").lower().replace(",", " ").split(), _NCCL_CHOICES, "Ring")
    torch.use_deterministic_algorithms(True)
    deterministic: Any = torch.utils.deterministic  # a module property that type checkers do not see
    deterministic.fill_uninitialized_memory = False  # uninitialized memory is never read
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash and memory-efficient attention have a fixed order


def _set(name: str, words: list[str], choices: tuple[str, ...], default: str) -> None:
    """Set an environment variable, unless it has an allowed value."""
    if not words:
        os.environ[name] = default
    elif any(word not in choices for word in words):
        raise UserError(
            f"--deterministic-mode: the environment variable {name} is {os.environ[name][:60]!r}, with which sums have "
            f"no fixed order; unset it, or set it to {default}"
        )
