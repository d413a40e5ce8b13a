"""The GPU benchmark end to end at toy sizes on a CPU, and sides of the training benchmark that fail."""

from __future__ import annotations

import json
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest

from benchmarks.gpu import fp8, generate, kernels, network, train
from benchmarks.gpu.setting import Setting
from benchmarks.lab.hosts import LabError, check_permission
from benchmarks.train_sides import Shape
from benchmarks.train_steps import process_step
from benchmarks.turns import Side, SideError
from tests.support.cli import run_cli
from tests.support.spawn import context_of_tests

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]


def _bench(out: Path, *words: str) -> tuple[int, str]:
    done = run_cli(1, ["-m", "benchmarks.gpu.run", "--device", "cpu", "--out", str(out), *words], timeout=1200.0)
    return done.returncode, done.text()


def _no_hosts() -> str | None:
    """Why there are no network namespaces here."""
    try:
        check_permission()
    except LabError as problem:
        return str(problem)
    return None


@pytest.mark.timeout(1500)
def test_all_sections_at_toy_sizes(tmp_path: Path) -> None:
    """Every row of every section is measured, and a second call measures only what is missing."""
    setting = Setting("cpu", tmp_path)
    status, text = _bench(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    report = (tmp_path / "report.md").read_text()
    keys = {name: section.keys(setting) for name, section in SECTIONS.items()}
    why = _no_hosts()
    if why is None:
        assert status == 0, text
    else:
        assert set(results["sections"]["network"]["failures"].values()) == {why}
        assert f"): {why}." in report
        assert status == 1
        del keys["network"]
    for name, wanted in keys.items():
        assert sorted(results["sections"][name]["rows"]) == sorted(wanted), text
        assert f"## {SECTIONS[name].TITLE}" in report
    for word in ("torch", "commit", "sources", "date", "driver", "copy_bytes_per_s", "peak_flops"):
        assert results["header"][word], word
    for cells in results["sections"]["kernels"]["rows"].values():
        assert cells["of_limit"] == pytest.approx(cells["limit"] / cells["us"])
    (row,) = results["sections"]["generate"]["rows"].values()
    assert row["equal"] > 0.5
    assert row["of_limit"] == pytest.approx(row["tokens_per_s"] / row["limit"])
    _goes_on(tmp_path, results)


def _goes_on(out: Path, before: dict) -> None:
    """With one row gone from a file, that row alone is measured."""
    rows = before["sections"]["kernels"]["rows"]
    path = out / "kernels.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    gone = next(line for line in lines if line.startswith('{"row"'))
    path.write_text("".join(line for line in lines if line != gone))
    status, text = _bench(out, "--only", "kernels")
    assert status == 0, text
    after = json.loads((out / "results.json").read_text())["sections"]["kernels"]["rows"]
    assert set(after) == set(rows)
    assert [key for key in rows if rows[key] != after[key]] == [json.loads(gone)["row"]]
    # What other calls measured stays in the report.
    assert f"## {generate.TITLE}" in (out / "report.md").read_text()


SECTIONS = {"train": train, "fp8": fp8, "kernels": kernels, "generate": generate, "network": network}


def test_a_side_that_fails_is_named_with_its_reason() -> None:
    context_of_tests()  # whose server, once it runs, is the sides' too
    forkserver.ensure_running()
    bad, gone = (
        Side("ours", partial(process_step, "ours", Shape(2, 64, 16, 2, vocab=0), "bf16", 1)),
        Side("nanogpt", partial(process_step, "nanogpt", Shape(2, 64, 16, 2, vocab=100), "bf16", 1)),
    )
    try:
        with pytest.raises(SideError, match=r"^ours: \w+: .*vocab") as error:
            bad.step()
        assert error.value.kind == "ours"
        assert gone.step() > 0
        gone.process.kill()
        with pytest.raises(SideError, match=r"^nanogpt: the process ended with status -9$"):
            gone.step()
    finally:
        bad.kill()
        gone.kill()
