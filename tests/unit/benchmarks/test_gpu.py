"""The GPU benchmark without a GPU: failing sections, time limits, toy sizes, and legal cases of real sizes."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import REPO, comparison
from benchmarks.gpu import fp8, generate, kernels, machine, network, run, section, train
from benchmarks.gpu.run import section_report
from benchmarks.gpu.section import NAMES, load_section, rows_path, run_section
from benchmarks.gpu.setting import Setting
from benchmarks.lab.hosts import LabError
from benchmarks.models import HuggingFaceLoss, Shape
from benchmarks.network.cases import CUDA_BENCHES, PEER_PAIRS, plan_of
from benchmarks.network.run import Measurement, link_rate
from benchmarks.network.worker import config_of
from benchmarks.rows import RowFile, RowLog, open_rows
from benchmarks.steps import run_config
from tests.support import bench_section
from tests.support.bench_sides import InProcessSide
from tests.support.cleanup import have_ended

ENDS = "tests.support.bench_section"
DEPENDENCIES = {"device": "a GPU", "sources": "abc"}


class Bar(SimpleNamespace):
    """A progress bar."""

    def __init__(self) -> None:
        super().__init__(n=0)

    def update(self, count: int) -> None:
        self.n += count

    def set_postfix_str(self, text: str) -> None:
        pass


def _run(out: Path, keys: list[str], limit: float = 600.0, name: str = ENDS) -> tuple[RowFile, Bar]:
    bar = Bar()
    file = open_rows(rows_path(out, name), DEPENDENCIES, False)
    return run_section(name, Setting("cuda", out), keys, file, limit, bar), bar


@pytest.mark.slow
def test_failing_rows_do_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a signal, a hang that ignores SIGTERM, an exit in the middle of a line: each costs its own row."""
    monkeypatch.setattr(section, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(bench_section, "PATIENCE_SECONDS", 5.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file, bar = _run(tmp_path, bench_section.KEYS)
    assert file.rows["good"]["path"].split(os.pathsep) == [str(REPO), str(tmp_path)]
    assert sorted(file.rows) == ["cut short", "good", "last"]
    assert bar.n == 3
    assert file.failures == {
        "raises": "MemoryError: out of memory: 3 GiB are missing",
        "dies": f"it was ended by SIGKILL, perhaps for lack of memory; see {ENDS}.log",
        "hangs": "it hung: it was stopped after 5 s without a sign of life",
        "gives up": "nothing to measure it with",
    }
    assert have_ended([int((tmp_path / "hanging").read_text())])
    text = section_report(load_section(ENDS), file, bench_section.KEYS)
    assert "| good | 1.00 |" in text
    assert "Not measured (hangs): it hung: it was stopped after 5 s without a sign of life." in text


@pytest.mark.slow
def test_a_section_has_a_limit_and_continues_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_section, "PATIENCE_SECONDS", 1000.0)
    monkeypatch.setattr(section, "GRACE_SECONDS", 0.5)
    file, _ = _run(tmp_path, ["hangs", "last"], limit=2.0)
    reason = "the section reached its limit of 2 s; repeat the command to continue"
    assert (file.rows, file.failures) == ({}, {"hangs": reason, "last": reason})
    file, _ = _run(tmp_path, ["last"])
    assert (list(file.rows), file.failures) == (["last"], {})


@pytest.mark.slow
def test_a_section_that_cannot_start_gives_its_reason(tmp_path: Path) -> None:
    name = "tests.support.cleanup"  # no section
    module: Any = load_section(name)
    module.PATIENCE_SECONDS = 60.0
    file, _ = _run(tmp_path, ["a", "b"], name=name)
    assert set(file.failures) == {"a", "b"}
    assert len(set(file.failures.values())) == 1
    assert "has no attribute 'measure'" in file.failures["a"]


def _figures(device: str) -> dict[str, object]:
    rates = {"copy_bytes_per_s": 1e10, "product_flops": 1e11, "peak_flops": 1e11}
    return {"device": f"{device}, toy sizes", "memory_bytes": 0, "nccl": "none", **rates}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_the_peak_is_that_of_the_device_or_the_measured_rate(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(machine, "device_name", lambda device: name)
    figures = machine.measure("cpu")
    assert figures["peak_flops"] == (peak or figures["product_flops"])


@pytest.mark.slow
def test_the_command_measures_only_missing_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sections of this test end quickly; a second call with a row less measures that row alone."""
    monkeypatch.setattr(machine, "probe", _figures)
    monkeypatch.setattr(run, "NAMES", (ENDS, f"{ENDS}_again"))
    monkeypatch.setattr(bench_section, "KEYS", ["good", "gives up", "last"])
    monkeypatch.setattr(run, "load_section", lambda name: bench_section)
    monkeypatch.setattr(section, "load_section", lambda name: bench_section)
    words = ["--device", "cpu", "--only", ENDS, "--out", str(tmp_path)]
    assert run.main(words) == 1
    assert f"{ENDS}: 2 rows; 1 missing: nothing to measure it with" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert sorted(results["sections"][ENDS]["rows"]) == ["good", "last"]
    for word in ("torch", "commit", "sources", "date", "driver", "copy_bytes_per_s", "peak_flops"):
        assert results["header"][word], word
    path = rows_path(tmp_path, ENDS)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith('{"row": "good"')))
    rows_path(tmp_path, f"{ENDS}_again").write_text(path.read_text())
    last = next(line for line in lines if '"row": "last"' in line)
    path.write_text(path.read_text().replace(last, last.replace('"value": 1.0', '"value": 7.0')))
    run.main(words)
    rows = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert (rows[ENDS]["rows"]["good"]["value"], rows[ENDS]["rows"]["last"]["value"]) == (1.0, 7.0)
    assert list(rows[f"{ENDS}_again"]["rows"]) == ["last"]  # other sections stay in the report
    assert (tmp_path / "report.md").read_text().count(f"## {bench_section.TITLE}") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:-1])
def test_sections_measure_all_rows_at_toy_sizes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with sides that have none of their own."""
    monkeypatch.setattr(comparison, "Side", InProcessSide)
    setting, log = Setting("cpu", tmp_path, 1e10, 1e11), RowLog(tmp_path / "rows.jsonl")
    module = load_section(name)
    module.measure(setting, module.keys(setting), log)
    file = RowFile().read(log.path)
    assert file.failures == {}
    assert sorted(file.rows) == sorted(module.keys(setting))
    text = section_report(module, file, module.keys(setting))
    assert f"## {module.TITLE}" in text
    assert "Not measured" not in text
    for row in file.rows.values():
        if name == "generate":
            assert row["equal"] > 0.5
            assert row["of_limit"] == pytest.approx(row["tokens_per_s"] / row["limit"])


def test_the_network_section_records_the_missing_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside their limits; without hosts it ends with the reason."""
    setting, log = Setting("cuda", tmp_path), RowLog(tmp_path / "rows.jsonl")
    row_keys = network.keys(setting)[3:11]
    named = Measurement("", "", None, "", 2.0, 8.0, 1.0, 1.1, 0.2, 0.1, 0.5, 100.0, 5.0, None)

    def measure(name: str, bench: Any, setups: Any, *_: Any, unshaped: bool, is_wanted: Any, **__: Any) -> Any:
        links = {"unshaped": None} if unshaped else {}
        links |= {setup.name: setup.rate for setup in setups}
        for case in bench.cases:
            for link, rate in links.items():
                if is_wanted(link, case.name):
                    assert RowFile().read(log.path).current == network.key_of(name, link, case.name)
                    yield replace(named, layout=name, setup=link, rate=rate, case=case.name)

    for name, fake in (("check_permission", lambda: None), ("clean", lambda: None), ("measure_layout", measure)):
        monkeypatch.setattr(network, name, fake)
    network.measure(setting, row_keys, log)
    rows = RowFile().read(log.path).rows
    assert list(rows) == row_keys
    assert rows[row_keys[0]]["limit"] == pytest.approx(100 * 8e6 / 1e9)
    assert rows[row_keys[0]]["of_limit"] == pytest.approx(0.4)

    def refuse() -> None:
        raise LabError("network namespaces need root")

    monkeypatch.setattr(network, "check_permission", refuse)
    with pytest.raises(SystemExit, match="need root"):
        network.measure(setting, row_keys, log)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_row_has_its_own_key(device: str, tmp_path: Path) -> None:
    """Without a device, and without a tensor of the real sizes."""
    for name in NAMES:
        keys = load_section(name).keys(Setting(device, tmp_path))
        assert keys
        assert len(keys) == len(set(keys)), name


def test_the_most_important_rows_come_first(tmp_path: Path) -> None:
    """A time limit may cut the others."""
    setting = Setting("cuda", tmp_path)
    pairs = [case.name for case in CUDA_BENCHES["dp4"].cases[:PEER_PAIRS]]
    layouts = network.keys(setting)
    assert layouts[:PEER_PAIRS] == [network.key_of("dp4", "1 Gb/s", case) for case in pairs]
    assert [name.startswith("torch DDP") for name in pairs] == [False, True] * 4
    assert layouts[PEER_PAIRS].startswith("pp4, 100 Mb/s, ")
    assert len(layouts) == sum(4 * len(bench.cases) for bench in CUDA_BENCHES.values())
    first_rows = [
        comparison.row_key(shape, "bf16", side)
        for shape in (train.GPT_124M, train.GPT_1_3B)
        for side in ("ours", "nanogpt compiled")
    ]
    assert train.keys(setting)[:4] == first_rows
    cases = list(kernels.cases(setting))
    common = [number for number, case in enumerate(cases) if case.op in ("abs_topk", "orthonormalize", "finite_norm")]
    odd = [number for number, case in enumerate(cases) if re.search(r"\b[13567] bits", case.setting)]
    assert len(odd) == 40
    assert max(common) < min(odd)
    assert set(generate.keys(setting)) == {generate.SMALL, generate.LARGE}


def test_sections_share_the_time_of_a_call() -> None:
    share = train.WEIGHT / (train.WEIGHT + kernels.WEIGHT)
    assert run.section_limit(["train", "kernels"], {}, math.inf) == math.inf
    assert run.section_limit(["train", "kernels"], {}, 400.0) == pytest.approx(400 * share)
    assert run.section_limit(["train", "kernels", "network"], {"network": 90.0}, 490.0) == pytest.approx(400 * share)
    assert run.section_limit(["kernels"], {}, 400.0) == 400.0
    assert run.section_limit(["network", "train"], {"network": 500.0}, 60.0) == 500.0
    assert run.section_limit(["train", "kernels"], {}, -5.0) == run.SHORTEST_SECONDS


@pytest.mark.parametrize(
    ("seconds", "ratios", "turns"),
    [
        ([9.0, 2.0, 9.0, 1.0, 9.0, 4.0, 4.0, 1.0], [None, 3.0, 0.5], [2, 2, 1]),  # a turn, and an unfinished turn
        ([9.0, 2.0, 9.0, 1.0, 9.0], [None, 2.0], [1, 1]),  # while the last kind compiles
    ],
)
def test_speeds_in_8_bits_are_recorded_after_every_step(
    seconds: list[float],
    ratios: list[float | None],
    turns: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kind takes a step that compiles before its first turn."""
    times = iter(seconds)
    engines = SimpleNamespace(topology=SimpleNamespace(device=torch.device("cpu")), stages=[])
    monkeypatch.setattr(fp8, "build", lambda *_: engines)
    monkeypatch.setattr(fp8, "timed", lambda *_: next(times))
    setting, log = Setting("cpu", tmp_path), RowLog(tmp_path / "rows.jsonl")
    with pytest.raises(StopIteration):
        fp8.measure(setting, fp8.keys(setting), log)
    rows = RowFile().read(log.path).rows
    assert list(rows) == [fp8.speed_key(setting, products) for products in fp8.PRODUCTS][: len(ratios)]
    assert [cells["ratio"] for cells in rows.values()] == ratios
    assert [cells["turns"] for cells in rows.values()] == turns


@dataclass
class FakeModel:
    """A model of which only its memory is replaced."""

    workspaces: object = None


def test_generation_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After loading and after each turn; figures are recorded before the side without graphs begins."""
    setting, log = Setting("cpu", tmp_path, 1.0), RowLog(tmp_path / "rows.jsonl")
    line_counts: list[int] = []

    def rate(*_: object) -> float:
        line_counts.append(len(log.path.read_text().splitlines()))
        assert RowFile().read(log.path).rows["toy"]["tokens_per_s"] == 1.0
        return 2.0

    def compare(*arguments: Any) -> dict[str, float]:
        for _ in range(4):
            arguments[-1]()
        return {"tokens_per_s": 1.0}

    for name, fake in (("load_converted", lambda *_: FakeModel()), ("measure_model", compare), ("eager_rate", rate)):
        monkeypatch.setattr(generate, name, fake)
    monkeypatch.setattr(generate, "weights_of", lambda _: [torch.zeros(1)])
    generate.measure(setting, ["toy"], log)
    assert line_counts == [3 + 4 + 1]
    assert RowFile().read(log.path).rows["toy"]["eager_tokens_per_s"] == 2.0


@pytest.mark.parametrize("layout", CUDA_BENCHES)
def test_cases_on_cuda_resolve(layout: str) -> None:
    """Their flags are legal where CUDA is; links have the rates of their names."""
    bench = CUDA_BENCHES[layout]
    for case in bench.cases:
        plan = plan_of(bench)
        config = config_of(plan, case, bench.hosts * bench.ranks_per_host)
        assert config.parallel.distributed_backend == "nccl"
        assert config.parallel.overlap_grad_reduce == case.overlap
        assert config.precision.bf16
        assert config.training.compile == "off"
        assert config.training.micro_batch_size == bench.micro_batch
    assert [link_rate(bench, setup, {}) for setup in bench.setups] == [10e9, 1e9, 100e6]


SHAPES = [*dict.fromkeys(shape for shape, _ in (*train.REAL, *train.TOY)), train.GPT_2_7B, fp8.SMALL]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_real_trainings_resolve(shape: Shape) -> None:
    config = run_config(shape, "bf16", {"distributed_backend": "nccl"}, shape.batch, 1, 128)
    assert config.training.global_batch_size == shape.samples
    with torch.device("meta"):
        theirs = HuggingFaceLoss(shape)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    sizes = {train.GPT_124M: 124e6, train.GPT_1_3B: 1.3e9, train.GPT_2_7B: 2.65e9, train.LLAMA: 1.25e9}
    sizes[train.MIXTRAL] = 1.15e9
    assert count == pytest.approx(sizes.get(shape, count), rel=0.02)
    # 6 operations for each parameter in use and token, plus attention's; two experts of all are in use.
    idle = max(shape.experts - 2, 0) * shape.layers * 3 * shape.hidden * shape.ffn
    used = count - idle - shape.vocab * shape.hidden * shape.llama
    assert 5.5 < shape.flops() / (used * shape.samples * shape.seq) < 8.5


def test_invalid_words_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, message in (
        (["--only", "trains"], "--only trains: choose from train, fp8, kernels, generate, network"),
        (["--limit", "train=fast"], "--limit train=fast: write SECTION=SECONDS"),
        (["--limit", "all=5"], "--limit all=5: write SECTION=SECONDS"),
        (["--minutes", "0"], "--minutes 0: give 1 to 1440"),
        ([], "--device cuda: torch sees no CUDA device; --device cpu runs toy sizes"),
    ):
        with pytest.raises(SystemExit) as stop:
            run.parse(words)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert run.parse(["--device", "cpu", "--limit", "network=500"]).limits == {"network": 500.0}
