"""Devices of tests with several ranks: the CPU over gloo, or a GPU that all ranks share, over NCCL."""

from __future__ import annotations

import os
from typing import Literal

import torch

from megatron.distributed.process_group import open_queues, pick_device
from megatron.kernels.fp8 import EIGHT_BIT_UNITS

VARIABLE = "MEGATRON_TEST_DEVICE"
"""``cuda`` or ``cpu`` (the default); every process of a test inherits it."""


def device_of_tests() -> torch.device:
    """The device without its number."""
    return torch.device(os.environ.get(VARIABLE, "cpu"))


def backend_of_tests() -> Literal["nccl", "gloo"]:
    """The backend that connects the ranks."""
    return "nccl" if device_of_tests().type == "cuda" else "gloo"


def has_8_bit_units() -> bool:
    """Whether there is a GPU that multiplies 8-bit floating-point numbers."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= EIGHT_BIT_UNITS


def own_device(rank: int) -> torch.device:
    """Makes this rank's device the current device and returns it."""
    open_queues()
    return pick_device(backend_of_tests(), rank)


def sharing(rank: int) -> dict[str, str]:
    """Variables that let NCCL's ranks share a GPU: it refuses two ranks of a host on the same GPU."""
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def rank_variables(rank: int) -> dict[str, str]:
    """Environment variables that a rank of a test needs."""
    return {} if backend_of_tests() == "gloo" else sharing(rank)
