"""The GPU benchmark without a GPU: sections that end badly, what is kept and wanted, and that its cases are legal."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from benchmarks import REPO
from benchmarks.gpu import fp8, generate, kernels, network, run, train
from benchmarks.gpu import run_section as run_section_module
from benchmarks.gpu.report import merged, table, wanted
from benchmarks.gpu.run_section import run_section
from benchmarks.gpu.section import NAMES, path_of, section_of
from benchmarks.gpu.setting import Claim, Setting
from benchmarks.network.cases import plan_of
from benchmarks.network.cuda_cases import CUDA_BENCHES, DATA
from benchmarks.network.run import link_rate
from benchmarks.network.worker import config_of
from benchmarks.rows import Book, RowLog, kept, opened
from benchmarks.train_sides import PlainGPT, Shape, _HuggingFace, cast_experts, peer_training
from benchmarks.train_steps import run_config
from benchmarks.turns import SideError
from tests.support import bench_section
from tests.support.cleanup import have_ended

pytestmark = pytest.mark.slow

ENDS = "tests.support.bench_section"
MADE_BY = {"device": "a GPU", "sources": "abc"}


class Bar(SimpleNamespace):
    """Of progress."""

    def __init__(self) -> None:
        super().__init__(n=0)

    def update(self, count: int) -> None:
        self.n += count

    def set_postfix_str(self, text: str) -> None:
        pass


def _run(out: Path, **changes: Any) -> tuple[Book, Bar]:
    setting, bar = Setting("cuda", out), Bar()
    book = opened(path_of(out, ENDS), MADE_BY, False)
    return run_section(ENDS, setting, bench_section.keys(setting), book, changes.get("limit", 600.0), bar), bar


def test_rows_that_end_badly_do_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a signal, a hang that ignores SIGTERM, an exit in the middle of a line: each costs its own row."""
    monkeypatch.setattr(run_section_module, "GRACE_SECONDS", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # in which a torch could be
    book, bar = _run(tmp_path)
    assert book.rows["good"]["path"].split(os.pathsep) == [str(REPO), str(tmp_path)]
    assert sorted(book.rows) == ["cut short", "good", "last"]
    assert bar.n == 3
    assert book.failures == {
        "raises": "MemoryError: out of memory: 3 GiB are missing",
        "dies": f"it was ended by SIGKILL, perhaps for lack of memory; see {ENDS}.log",
        "hangs": "it hung: no sign of life for 20 s, and was ended",
        "gives up": "nothing to measure it with",
    }
    assert have_ended([int((tmp_path / "hanging").read_text())])
    text = table(section_of(ENDS), book, bench_section.keys(Setting("cuda", tmp_path)))
    assert "| good | 1.00 |" in text
    assert "Not measured (hangs): it hung: no sign of life for 20 s, and was ended." in text


def test_a_section_has_a_limit_and_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("cuda", tmp_path)
    monkeypatch.setattr(bench_section, "PATIENCE_SECONDS", 1000.0)
    monkeypatch.setattr(run_section_module, "GRACE_SECONDS", 1.0)
    book, bar = Book(), Bar()
    path = path_of(tmp_path, ENDS)
    book = run_section(ENDS, setting, ["hangs", "last"], opened(path, MADE_BY, False), 3.0, bar)
    late = "the section's limit of 3 s was over; the same command goes on from here"
    assert (book.rows, book.failures) == ({}, {"hangs": late, "last": late})
    book = run_section(ENDS, setting, ["last"], opened(path, MADE_BY, False), 600.0, bar)
    assert (list(book.rows), book.failures) == (["last"], {})


def test_a_section_that_cannot_begin_says_why_once(tmp_path: Path) -> None:
    setting = Setting("cuda", tmp_path)
    name = "tests.support.cleanup"  # no section
    section: Any = section_of(name)
    section.PATIENCE_SECONDS, section.tidy = 60.0, lambda: None
    book = run_section(name, setting, ["a", "b"], opened(path_of(tmp_path, name), MADE_BY, False), 600.0, Bar())
    assert set(book.failures) == {"a", "b"}
    assert len(set(book.failures.values())) == 1
    assert "has no attribute 'measure'" in book.failures["a"]


def test_finished_rows_are_kept_while_they_would_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    opened(path, MADE_BY, False)
    report = RowLog(path)
    report.begin("a")
    report.row("a", value=1.0)
    report.failed("b", "no reason")
    assert opened(path, MADE_BY, False) == Book(rows={"a": {"value": 1.0}}, lines=2)
    assert opened(path, MADE_BY, False).rows == {"a": {"value": 1.0}}  # written anew, and read again
    other = {**MADE_BY, "sources": "abd"}
    assert (kept(path, MADE_BY).rows, kept(path, other).rows) == ({"a": {"value": 1.0}}, {})
    assert opened(path, other, False).rows == {}
    assert '"row": "a"' in (tmp_path / "rows.jsonl.old").read_text()  # put aside, not lost
    assert opened(path, MADE_BY, False).rows == {}
    report.row("a", value=1.0)
    assert opened(path, MADE_BY, True).rows == {}


def test_a_line_that_a_kill_cut_short_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"row": "a", "cells": {"na')
    RowLog(path).row("b", value=1.0)
    assert Book().read(path).rows == {"b": {"value": 1.0}}


def test_what_is_wanted_is_told_for_all_rows_together() -> None:
    claims = merged([Claim("a", 0.85, (0.9,)), Claim("b", 5.0, (4.0,)), Claim("a", 0.85, (0.8, 1.0))])
    assert wanted(claims).splitlines()[-2:] == [
        "| a | >= 0.85 | 0.80 to 1.00 | 2 of 3 |",
        "| b | >= 5 | 4.00 | 0 of 1 |",
    ]


def test_claims_of_training_compare_the_right_sides() -> None:
    cells = {"shape": train.GPT_1_3B.name, "of_limit": 0.4, "gib": 30.0}
    rows = {
        "a": {**cells, "beside": ""},
        "b": {**cells, "beside": "nanogpt", "ratio": 1.1, "their_gib": 33.0},
        "c": {**cells, "beside": "hugging-face", "ratio": 1.3, "their_gib": 33.0},
    }
    found = {claim.what.split(": ")[1]: (claim.least, *claim.values) for claim in train.claims(rows)}
    assert found == {
        "of the peak": (0.5, 0.4),
        "tokens/s over nanogpt, compiled": (1.15, 1.1),
        "nanogpt's memory over ours": (1.0, pytest.approx(1.1)),
        "tokens/s over hugging-face, compiled": (1.2, 1.3),
        "hugging-face's memory over ours": (1.0, pytest.approx(1.1)),
    }
    mixture = {**cells, "shape": train.MIXTRAL.name, "beside": "hugging-face", "ratio": 1.3, "their_gib": 33.0}
    assert train.claims({"d": mixture})[0].least == 1.5


def test_claims_of_8_bit_products_compare_with_bf16() -> None:
    fast, small = {"model": train.GPT_2_7B.name}, {"model": fp8.SMALL.name}
    rows = {
        "a": {**fast, "products": "bf16", "of_limit": 0.4},
        "b": {**fast, "products": "tensorwise", "of_limit": 0.5, "ratio": 1.2},
        "c": {**fast, "products": "rowwise", "of_limit": 0.5, "ratio": 1.1},
        "d": {**small, "products": "bf16", "loss": 1.0},
        "e": {**small, "products": "rowwise", "loss": 1.002, "loss_ratio": 1.002},
    }
    found = {claim.what.split(": ")[1]: (claim.met, *claim.values) for claim in fp8.claims(rows)}
    assert found == {
        "of the peak": (0, 0.4),
        "tokens/s over bf16": (1, 1.2),
        "bf16's loss over its": (0, pytest.approx(0.998, abs=1e-4)),
    }


def test_claims_of_networks_are_times_as_fast() -> None:
    seconds = {"bf16 traffic": 9.6, "fixpoint 4/8 bits": 4.0, "fixpoint 4/8 bits, eager 1F1B": 3.2}
    rows = {network.key_of("pp4", "100 Mb/s", case): {"seconds": value} for case, value in seconds.items()}
    found = network.claims(rows)
    assert [claim.least for claim in found] == [2.4, 2.6]
    assert [claim.values[0] for claim in found] == pytest.approx([2.4, 3.0])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_row_has_a_name_of_its_own_before_anything_is_measured(device: str, tmp_path: Path) -> None:
    """Without a device, and without a tensor of the real sizes."""
    for name in NAMES:
        keys = section_of(name).keys(Setting(device, tmp_path))
        assert keys
        assert len(keys) == len(set(keys)), name


def test_all_that_is_wanted_of_real_rows_has_rows(tmp_path: Path) -> None:
    setting = Setting("cuda", tmp_path)
    layouts = network.keys(setting)
    for layout, link, *cases, _ in network._RATIOS:
        for case in cases:
            assert network.key_of(layout, link, str(case)) in layouts
    assert {key.split(", ")[0] for key in layouts} == set(CUDA_BENCHES)
    for name, bench in CUDA_BENCHES.items():
        for link in ("unshaped", "100 Mb/s", "1 Gb/s", "10 Gb/s"):
            assert network.key_of(name, link, bench.cases[0].name) in layouts
    operations = {case.op for case in kernels.cases(setting)}
    assert operations >= {*kernels.WANTED, "abs_topk", "orthonormalize", "M - P Q^T"}
    assert set(generate.keys(setting)) == {generate.SMALL, generate.LARGE}


def test_what_is_worth_most_comes_first(tmp_path: Path) -> None:
    """A limit of time may cut the rest."""
    setting = Setting("cuda", tmp_path)
    beside_ddp = {name for _, link, *names, _ in network._RATIOS[:4] for name in names}
    assert network.keys(setting)[:8] == [network.key_of("dp4", "1 Gb/s", case.name) for case in DATA[:8]]
    assert beside_ddp == {case.name for case in DATA[:8]}
    assert network.keys(setting)[8].startswith("pp4, 100 Mb/s, ")
    pairs = [(shape, side) for shape in (train.GPT_124M, train.GPT_1_3B) for side in ("ours", "nanogpt")]
    assert train.keys(setting)[:4] == [train.key_of(*pair) for pair in pairs]
    cases = list(kernels.cases(setting))
    needed = [number for number, case in enumerate(cases) if case.op in ("abs_topk", "orthonormalize", "finite_norm")]
    odd = [number for number, case in enumerate(cases) if re.search(r"\b[13567] bits", case.setting)]
    assert len(odd) == 40
    assert max(needed) < min(odd)


def test_sections_share_the_time_of_a_call() -> None:
    share = train.WEIGHT / (train.WEIGHT + kernels.WEIGHT)
    assert run.limit_of(["train", "kernels"], {}, math.inf) == math.inf
    assert run.limit_of(["train", "kernels"], {}, 400.0) == pytest.approx(400 * share)
    assert run.limit_of(["train", "kernels", "network"], {"network": 90.0}, 490.0) == pytest.approx(400 * share)
    assert run.limit_of(["kernels"], {}, 400.0) == 400.0
    assert run.limit_of(["network", "train"], {"network": 500.0}, 60.0) == 500.0
    assert run.limit_of(["train", "kernels"], {}, -5.0) == run.SHORTEST_SECONDS


class FakeSide:
    """A side of the training benchmark; what happens to all of them is in ``told``."""

    told: ClassVar[list[str]] = []

    def __init__(self, kind: str, build: object, device: str) -> None:
        self.kind = kind
        self.told.append(f"{kind} starts")

    def step(self, count: int = 1) -> float:
        if self.kind == "nanogpt":
            raise SideError(self.kind, "out of memory")
        return 0.1

    def peak_bytes(self) -> int:
        return 1 << 30

    def close(self) -> int:
        self.told.append(f"{self.kind} ends")
        return 1 << 30

    def kill(self) -> None:
        pass


class Telling(RowLog):
    """Tells of rows, too."""

    def row(self, key: str, **cells: Any) -> None:
        super().row(key, **cells)
        FakeSide.told.append(f"row {key.split(', ')[-1]}")


def test_our_row_is_recorded_before_a_peer_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again from the turns beside it; a peer that fails takes no other row with it."""
    monkeypatch.setattr(train, "Side", FakeSide)
    monkeypatch.setattr(FakeSide, "told", [])
    setting, report = Setting("cpu", tmp_path, 1.0, 1.0), Telling(tmp_path / "rows.jsonl")
    keys = train.keys(setting)
    train.measure(setting, keys, report)
    theirs = ["hugging-face starts", "hugging-face ends"]
    first = ["ours starts", "row ours", "nanogpt starts", "ours starts", *theirs, "row hugging-face"]
    other = ["ours starts", "row ours", *theirs, "row ours", "row hugging-face"]
    assert FakeSide.told == first + 2 * other
    book = Book().read(report.path)
    assert set(book.failures) == {keys[1]}
    assert {*book.rows, keys[1]} == {*keys}


@pytest.mark.parametrize(
    ("seconds", "ratios"),
    [
        ([9.0, 2.0, 9.0, 1.0, 9.0, 4.0, 4.0, 1.0], [1.0, 2.0, 0.5]),  # a turn, and one that is not finished
        ([9.0, 2.0, 9.0, 1.0, 9.0], [1.0, 2.0]),  # while the last kind compiles
    ],
)
def test_speeds_in_8_bits_are_recorded_after_every_turn(
    seconds: list[float], ratios: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind takes a step that compiles before its first turn."""
    times = iter(seconds)
    engines = SimpleNamespace(topology=SimpleNamespace(device=torch.device("cpu")), stages=[])
    monkeypatch.setattr(fp8, "_engines", lambda *_: engines)
    monkeypatch.setattr(fp8, "timed", lambda *_: next(times))
    setting, report = Setting("cpu", tmp_path), RowLog(tmp_path / "rows.jsonl")
    with pytest.raises(StopIteration):
        fp8.measure(setting, fp8.keys(setting), report)
    rows = Book().read(report.path).rows
    assert list(rows) == [fp8.speed_key(setting, products) for products in fp8.PRODUCTS][: len(ratios)]
    assert [cells.get("ratio", 1.0) for cells in rows.values()] == ratios
    assert {cells["turns"] for cells in rows.values()} == {1}


def test_generation_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After loading and after each turn; and what is measured is recorded before the side without graphs begins."""
    setting, report = Setting("cpu", tmp_path, 1.0), RowLog(tmp_path / "rows.jsonl")
    lines: list[int] = []

    def rate(*_: object) -> float:
        lines.append(len(report.path.read_text().splitlines()))
        assert Book().read(report.path).rows["toy"]["tokens_per_s"] == 1.0
        return 2.0

    def compared(*given: Any) -> dict[str, float]:
        for _ in range(4):
            given[-1]()
        return {"tokens_per_s": 1.0}

    for name, fake in (("loaded", lambda *_: FAKE_MODEL), ("measure_model", compared), ("_rate", rate)):
        monkeypatch.setattr(generate, name, fake)
    monkeypatch.setattr(generate, "weights_of", lambda _: [torch.zeros(1)])
    generate.measure(setting, ["toy"], report)
    assert lines == [3 + 4 + 1]
    assert Book().read(report.path).rows["toy"]["eager_tokens_per_s"] == 2.0


@dataclass
class FakeModel:
    """A model of which only its memory is replaced."""

    workspaces: object = None


FAKE_MODEL = FakeModel()


@pytest.mark.parametrize("layout", CUDA_BENCHES)
def test_cases_on_cuda_resolve(layout: str) -> None:
    """Their flags are legal where CUDA is; links have their own rates."""
    bench = CUDA_BENCHES[layout]
    for case in bench.cases:
        plan = plan_of(bench)
        config = config_of(plan, list(case.specs), bench.hosts * bench.ranks_per_host, case.schedule, case.overlap)
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
        theirs = _HuggingFace(shape)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    sizes = {train.GPT_124M: 124e6, train.GPT_1_3B: 1.3e9, train.GPT_2_7B: 2.65e9, train.LLAMA: 1.25e9}
    sizes[train.MIXTRAL] = 1.15e9
    assert count == pytest.approx(sizes.get(shape, count), rel=0.02)
    # 6 operations a parameter and token, but for positions, for attention's own, and with two experts of all.
    idle = max(shape.experts - 2, 0) * shape.layers * 3 * shape.hidden * shape.ffn
    used = count - idle - shape.vocab * shape.hidden * shape.llama
    assert 5.5 < shape.flops() / (used * shape.samples * shape.seq) < 8.5


def test_experts_of_a_peer_have_weights_of_bf16_on_a_gpu() -> None:
    """And only there; a step with them works."""
    shape = Shape(2, 64, 16, 2, vocab=100, llama=True, ffn=128, groups=1, experts=4)
    made: list[torch.nn.Module] = []
    for precision, device in (("bf16", "cpu"), ("fp32", "cuda"), ("bf16", "cuda")):
        model = _HuggingFace(shape)
        cast_experts(model, precision, device)
        halves = {name.split(".")[-1] for name, x in model.named_parameters() if x.dtype == torch.bfloat16}
        assert halves == ({"gate_up_proj", "down_proj"} if (precision, device) == ("bf16", "cuda") else set())
        made.append(model)
    with mock.patch("benchmarks.train_sides._HuggingFace", return_value=made[-1]):
        train_once = peer_training("hugging-face", shape, "bf16", "cpu", compiled=False)
    tokens, labels = (torch.randint(0, 100, (2, 16)) for _ in range(2))
    losses = [float(train_once(tokens, labels)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_the_plain_model_is_a_gpt2() -> None:
    """As many parameters as Hugging Face's of the same vocabulary, and a loss that no later token changes."""
    shape = Shape(2, 64, 16, 2, vocab=100)
    torch.manual_seed(0)
    model, theirs = PlainGPT(shape, 100), _HuggingFace(shape)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    tokens, labels = (torch.randint(0, 100, (2, 16)) for _ in range(2))
    loss = model(tokens, labels)
    assert float(loss.detach()) == pytest.approx(4.6, abs=0.1)
    ignored = labels.clone()
    ignored[:, 8:] = -100
    later = tokens.clone()
    later[:, 8:] = 1
    torch.testing.assert_close(model(tokens, ignored), model(later, ignored))
    assert not torch.equal(model(tokens, labels), model(later, labels))


def test_bad_words_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
