"""Processes of the benchmarks: the GPU benchmark's command at toy sizes on a CPU, and sides that fail."""

from __future__ import annotations

import json
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest

from benchmarks.gpu import kernels, run
from benchmarks.gpu.setting import Setting
from benchmarks.models import Shape
from benchmarks.steps import process_step
from benchmarks.turns import Side, SideError
from tests.support.spawn import context_of_tests

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]


def test_the_command_measures_a_section_at_toy_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The device is probed and the section runs in processes of their own."""
    status = run.main(["--device", "cpu", "--only", "kernels", "--out", str(tmp_path)])
    assert status == 0, capsys.readouterr()
    rows = json.loads((tmp_path / "results.json").read_text())["sections"]["kernels"]["rows"]
    assert sorted(rows) == sorted(kernels.keys(Setting("cpu", tmp_path)))
    for row in rows.values():
        assert row["of_limit"] == pytest.approx(row["traffic"] / row["copy_gbps"] / 1e9 / row["seconds"])


def test_a_side_takes_steps_and_reports_its_memory() -> None:
    context_of_tests()  # the server of the tests' ranks serves sides too
    forkserver.ensure_running()
    side = Side("ours", partial(process_step, "ours", Shape(2, 64, 16, 2, vocab=100), "bf16", 1))
    try:
        assert side.step(2) > 0
        assert side.close() > 2**20
        assert side.process.exitcode == 0
    finally:
        side.kill()


def test_a_side_that_fails_is_named_with_its_reason() -> None:
    context_of_tests()  # the server of the tests' ranks serves sides too
    forkserver.ensure_running()
    failing, killed = (
        Side("ours", partial(process_step, "ours", Shape(2, 64, 16, 2, vocab=0), "bf16", 1)),
        Side("nanogpt", partial(process_step, "nanogpt", Shape(2, 64, 16, 2, vocab=100), "bf16", 1)),
    )
    try:
        with pytest.raises(SideError, match=r"^ours: \w+: .*vocab") as error:
            failing.step()
        assert error.value.name == "ours"
        assert killed.step() > 0
        killed.process.kill()
        with pytest.raises(SideError, match=r"^nanogpt: the process ended with status -9$"):
            killed.step()
    finally:
        failing.kill()
        killed.kill()
