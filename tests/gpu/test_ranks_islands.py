"""Islands with ranks that share a GPU: NCCL connects the ranks of an island, gloo the islands.

The bodies are those of tests/multiprocess, with all that they assert. Here each run must have been on the device, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.multiprocess import test_island_ends as island_ends
from tests.multiprocess import test_islands as islands
from tests.support.device import backend_of_tests
from tests.support.islands import events

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def _backends(folder: Path) -> set[str]:
    """Backends of all runs that have left logs or checkpoints in a folder."""
    configs = [event["config"] for log in folder.rglob("*.jsonl") for event in events(log, "config")]
    configs += [yaml.safe_load(path.read_text()) for path in folder.rglob("config.yaml")]
    return {config["parallel"]["distributed_backend"] for config in configs}


@pytest.mark.parametrize(("layout", "by"), [("stages", "exact"), ("replicas", "compressed")])
def test_islands_in_step_are_data_parallelism(prefix: Path, tmp_path: Path, layout: str, by: str) -> None:
    islands.test_islands_in_step_are_data_parallelism(prefix, tmp_path, layout, by)
    assert _backends(tmp_path) == {backend_of_tests()}


def test_two_islands_of_two_stages_are_two_islands_of_one_process(prefix: Path, tmp_path: Path) -> None:
    layout = {"pipeline_model_parallel_size": 2}
    islands.test_two_islands_of_two_ranks_are_two_islands_of_one_process(prefix, tmp_path, islands.ROUNDS, layout)
    assert _backends(tmp_path) == {backend_of_tests()}


def test_an_island_lost_in_step_ends_the_others_in_one_line(prefix: Path, tmp_path: Path) -> None:
    island_ends.test_a_lost_island_ends_the_others_in_one_line_where_they_need_it(prefix, tmp_path, "in step")
    assert _backends(tmp_path) == {backend_of_tests()}


def test_the_launcher_starts_islands_and_restarts_a_killed_island(prefix: Path, tmp_path: Path) -> None:
    islands.test_the_launcher_starts_islands_and_restarts_a_killed_island(prefix, tmp_path)
    assert _backends(tmp_path) == {backend_of_tests()}
