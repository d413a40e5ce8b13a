"""Notes on the settings of all nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.config.flags import parse_args
from megatron.distributed.process_group import LaunchEnvironment
from megatron.training import machine_check
from tests.support.corpus import tiny_flags
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.multiprocess


def _read_notes(folder: str, settings: tuple[str, str]) -> list[str]:
    rank = dist.get_rank()
    path = Path(folder) / f"rank{rank}"
    path.write_text(settings[rank])
    machine_check.SLOW_START = path
    config = parse_args(tiny_flags(Path("data"), pipeline_model_parallel_size=2)).resolve(2)
    return machine_check.machine_notes(config, LaunchEnvironment(rank, 2, 0, 1), dist.group.WORLD)


@pytest.mark.parametrize("settings", [("1", "0"), ("0", "1"), ("0", "0")])
def test_all_ranks_note_a_setting_of_any_node(settings: tuple[str, str], tmp_path: Path) -> None:
    notes, same_notes = run_ranks(2, _read_notes, str(tmp_path), settings)
    assert notes == same_notes
    assert len(notes) == ("1" in settings)
