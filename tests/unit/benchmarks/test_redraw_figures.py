"""The pictures of the documents are drawn from the tables beside them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.network.report import traffic_of
from benchmarks.redraw_figures import (
    BENCHMARKS,
    COMPRESSION,
    MACHINE,
    PICTURES,
    main,
    network_rows,
    outcomes,
    table_after,
    times,
)
from megatron.base.errors import UserError

IMAGES = BENCHMARKS.parent / "images"


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == PICTURES.keys()
    for path in tmp_path.iterdir():
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert (IMAGES / path.name).is_file()


def test_the_tables_hold_what_is_drawn() -> None:
    text = BENCHMARKS.read_text()
    rows = network_rows(text)
    assert Counter(row["layout"] for row in rows) == {"pp4": 50, "pp8": 24, "dp4": 30, "dp8": 20}
    slowest = [row for row in rows if row["layout"] == "pp4" and row["rate"] == 5.95e6]
    # 8 micro-batches of one sequence of 256 in 21.55 s.
    assert slowest[0]["tokens_per_s"] == pytest.approx(2048 / 21.55)
    found = outcomes(COMPRESSION.read_text())
    assert [one.case for one in found[:2]] == ["dense", "CB, LEP"]
    assert found[1].worse == pytest.approx(0.80)
    assert found[1].sent == pytest.approx(
        {"pp-forward": 262.1, "pp-backward": 221.2, "dp-grad": 2649.1, "embedding": 1048.6}
    )
    assert len(times(text)) == 4
    where = MACHINE.search(text)
    assert where is not None
    assert " ".join(where[2].split()) == "2 cores of an Intel Xeon with AVX-512, torch 2.13 (CPU), 2 threads"
    with pytest.raises(UserError, match="no table after 'a heading'"):
        table_after(text, "a heading")


@pytest.mark.parametrize(
    ("case", "traffic"),
    [
        ("fp32", ("fp32 traffic", False)),
        ("bf16 traffic, eager 1F1B", ("bf16 traffic", True)),
        ("delta 4, fixpoint 8 (AQ-SGD)", ("delta 4, fixpoint 8", False)),
        ("delta 4, fixpoint 8, eager 1F1B", ("delta 4, fixpoint 8", True)),
        ("torch DDP, powerSGD_hook, rank 4", ("powersgd, rank 4", True)),
        ("torch DDP, fp16 hook", ("bf16 traffic", True)),
    ],
)
def test_equal_traffic_has_equal_colors(case: str, traffic: tuple[str, bool]) -> None:
    assert traffic_of(case) == traffic


def test_a_picture_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "sunset", "--out", str(tmp_path)]) == 1
    known = "kernels, network, convergence, convergence-formats, convergence-experts, time-to-loss"
    assert capsys.readouterr().err == f"error: --only sunset: choose from {known}\n"
