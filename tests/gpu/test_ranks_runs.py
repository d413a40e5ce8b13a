"""Whole runs over NCCL, all ranks on one GPU: checkpoints on other layouts, lost ranks, generation on stages."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.multiprocess import test_compressor_state as compressor_state
from tests.multiprocess import test_faults as faults
from tests.multiprocess import test_generation as generation
from tests.multiprocess import test_resume_settings as resume

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


NAMES = (
    "one process to tp2 pp2",
    "virtual pp2 to sharded dp2",
    "lamb, sharded dp2 tp2 to pp2",
    "muon, sharded dp2 tp2 to pp2",
)
"""Each optimizer, and each kind of layout on either side."""


@pytest.mark.parametrize("name", NAMES)
def test_resume_at_another_layout_agrees(prefix: Path, tmp_path: Path, name: str) -> None:
    resume.test_resume_at_another_layout_agrees(prefix, tmp_path, name)


def test_residuals_go_to_other_layouts(tmp_path: Path) -> None:
    compressor_state.test_residuals_move_to_other_replicas_and_stages("fixpoint4", tmp_path)


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_others_end_and_name_the_lost_rank(
    prefix: Path, tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    faults.test_the_others_end_and_name_the_lost_rank(prefix, tmp_path, victim, number)


def test_tokens_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    generation.test_tokens_do_not_depend_on_the_layout("gpt2", 2, 2, tmp_path)


def test_the_command_writes_the_same_on_four_ranks_and_one(tmp_path: Path) -> None:
    generation.test_the_command_writes_the_same_on_four_ranks_and_one(tmp_path)
