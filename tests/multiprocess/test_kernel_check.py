"""Ranks with and without compiled kernels do not train together."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from megatron.base.errors import UserError
from megatron.distributed.layout import Layout
from megatron.distributed.topology import build_topology
from megatron.kernels import native
from megatron.training.kernel_check import check_kernels
from tests.support.kernels import need_kernels
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.multiprocess


def _check(choices: list[str]) -> str | None:
    os.environ[native.CHOICE] = choices[dist.get_rank()]
    topology = build_topology(Layout(dp=2), torch.device("cpu"))
    try:
        return check_kernels(topology)
    except UserError as error:
        return f"refused: {error}"


@need_kernels
def test_kernels_are_used_on_all_ranks_or_none() -> None:
    for notes in run_ranks(2, _check, ["", "reference"]):
        assert notes.startswith("refused: rank 1 has no compiled kernels while others do")
    assert run_ranks(2, _check, ["native", ""]) == [None, None]


def test_a_run_without_kernels_says_so() -> None:
    for notes in run_ranks(2, _check, ["reference", "reference"]):
        assert "not in use" in notes
    for notes in run_ranks(2, _check, ["reference", "fast"]):
        assert notes.startswith("refused:")
        assert "the choices are native and reference" in notes
