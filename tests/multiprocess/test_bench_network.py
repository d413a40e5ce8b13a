"""The network benchmark at toy size: its measurements add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import network
from benchmarks.gpu.setting import Setting
from benchmarks.network.cases import BENCHES, FP32, Bench, NetworkCase
from benchmarks.network.run import PAYLOAD, link_rate, measure, tables
from benchmarks.network.setups import Setup, aqsgd_data, aqsgd_pipeline, optimus_pipeline, radius_data
from benchmarks.rows import RowFile, RowLog
from tests.support.machines import require_laboratory

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]


def test_published_ratios() -> None:
    """By hand: 6.55 MB at 100 Mb/s is 524 ms; 6 layers of GPT-2 XL, recomputed, are 1.67 TFLOP at 7.85 TFLOP/s."""
    setups = {setup.name: setup for setup in aqsgd_pipeline()}
    assert setups["AQ-SGD 100 Mb/s"].ratio == pytest.approx(0.5243 / (1.671e12 / 7.85e12), rel=1e-3)
    assert setups["AQ-SGD 100 Mb/s"].ratio == pytest.approx(100 * setups["AQ-SGD 10 Gb/s"].ratio)
    assert aqsgd_data(4)[0].ratio == pytest.approx(1.5 * 6 * 12 * 1600**2 * 32 / 1e9 / 6.81, rel=1e-3)
    assert aqsgd_data(4, 2)[0].ratio == pytest.approx(16 * aqsgd_data(4)[0].ratio)
    assert radius_data().ratio == pytest.approx(0.636 / 0.707, rel=1e-2)
    assert optimus_pipeline().ratio < 0.05


def test_a_link_has_the_rate_of_its_ratio() -> None:
    computed = {"slowest_compute_s": 0.8}
    message = Bench(4, 1, 1, 4, (8, 512, 256), 8, (), ())
    assert link_rate(message, Setup("", 2.0, ""), computed) == pytest.approx(512 * 256 * 32 / (2.0 * 0.1))
    gradients = Bench(4, 1, 1, 1, (4, 256, 256), 4, (), (), "gradients")
    parameters = 12 * 4 * 256**2 + (2 * 2048 + 256) * 256
    assert link_rate(gradients, Setup("", 2.0, ""), computed) == pytest.approx(1.5 * parameters * 32 / (2.0 * 0.8))


@pytest.mark.parametrize("name", BENCHES)
def test_layouts_fill_their_hosts(name: str) -> None:
    bench = BENCHES[name]
    assert bench.dp * bench.tp * bench.pp == bench.hosts * bench.ranks_per_host
    assert bench.cases[0] == FP32


def test_toy_runs_on_shaped_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the section of the GPU benchmark, at its toy size."""
    require_laboratory()
    cases = (
        FP32,
        NetworkCase("bf16 traffic", ("dp-grad=cast",)),
        NetworkCase("torch DDP, powerSGD_hook, rank 4", peer="ddp-powersgd", rank=4),
        NetworkCase("powersgd, 8-bit factors", ("dp-grad=powersgd,rank=4,factors=fixpoint8",)),
    )
    bench = replace(network.TOY_BENCHES["dp2"], cases=cases, setups=(Setup("slow", 30.0, "for the test"),))
    monkeypatch.setattr(network, "TOY_BENCHES", {"toy": bench})
    monkeypatch.setattr(network, "TOY_PASSES", (("toy", (network.UNSHAPED, "slow"), network.ALL),))
    monkeypatch.setattr(network, "STEPS", 1)
    setting, log = Setting("cpu", tmp_path), RowLog(tmp_path / "rows.jsonl")
    network.measure(setting, network.keys(setting), log)
    rows = [dict(row) for row in RowFile().read(log.path).rows.values()]
    assert [(row["setup"], row["case"]) for row in rows] == [
        (setup, case.name) for case in cases for setup in ("unshaped", "slow")
    ]
    slow = {row["case"]: row for row in rows if row["setup"] == "slow"}
    fp32 = slow["fp32 traffic"]
    parameters = 12 * 2 * 64**2 + (2 * 2048 + 32) * 64
    # A ring of two sends everything once, with frames and control messages on top.
    assert 1.0 < fp32["host_mb"] / (parameters * 4 / 1e6) < 1.3
    assert 0.4 < slow["bf16 traffic"]["host_mb"] / fp32["host_mb"] < 0.7
    assert slow["powersgd, 8-bit factors"]["host_mb"] < 0.6 * slow["torch DDP, powerSGD_hook, rank 4"]["host_mb"]
    assert fp32["waited_s"] > fp32["compute_s"]
    assert fp32["loss"] < 7.7
    assert 0.0 < fp32["of_limit"] < 1.1
    text = tables(rows)
    assert "### toy, slow (" in text
    assert "| fp32 traffic | " in text


def test_bytes_of_two_level_sums_between_hosts(tmp_path: Path) -> None:
    """By the interfaces' counters, to 5%: (M-1)/M n numbers, twice, in 4 bits and with a scale of 32 bits for 64. A sum
    in a single level of 4 bits sends twice as much between hosts of two ranks."""
    require_laboratory()
    bench = replace(BENCHES["dp2x2"], model=(2, 256, 32))
    bench = replace(bench, cases=tuple(case for case in bench.cases if case.name.startswith("fixpoint")))
    link = [setup for setup in bench.setups if setup.name == "100 Mb/s"]
    flat, two_levels = measure("toy", bench, link, 1, tmp_path, unshaped=False)
    formula_mb = bench.parameters * (4 / 8 + 4 / 64) / PAYLOAD / 1e6
    assert two_levels.host_mb == pytest.approx(formula_mb, rel=0.05)
    assert flat.host_mb == pytest.approx(2 * formula_mb, rel=0.05)


def test_a_schedule_with_two_chunks_on_a_stage_has_its_own_mesh(tmp_path: Path) -> None:
    """Both have the same losses; chunks in V form send twice as many messages."""
    require_laboratory()
    cases = FP32, NetworkCase("zero bubble, V form", schedule="zb-v")
    plain, v_form = measure("toy", Bench(2, 1, 1, 2, (4, 64, 32), 2, (), cases), [], 1, tmp_path)
    assert v_form.loss == pytest.approx(plain.loss, rel=1e-4)
    assert 1.5 < v_form.host_mb / plain.host_mb < 3.0
