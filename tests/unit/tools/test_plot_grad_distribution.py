"""Records of gradients that are not as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.plot_grad_distribution import main

_PARAMETERS = {
    "layers.0.mlp.weight": {"energy": 0.5, "kept": 0.25},
    "layers.1.mlp.weight": {"energy": 0.7, "kept": 0.75},
}


def _log(path: Path, *changed: dict[str, Any]) -> Path:
    """A record for each of the changes, which leave out the fields that are "none"."""
    lines = []
    for number, own in enumerate(changed, 1):
        event = {"kind": "gradients", "iteration": number, "density": 0.01, "parameters": _PARAMETERS, **own}
        lines.append(json.dumps({name: value for name, value in event.items() if value != "none"}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_is_a_gap_and_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An overflow makes energies nan, which the log writes as null."""
    overflow = {"layers.0.mlp.weight": {"energy": None, "kept": None}, "layers.1.mlp.weight": {"energy": 0.7}}
    alone = {"layers.0.mlp.weight": {"energy": None, "kept": 0.5}}
    log = _log(tmp_path / "a.jsonl", {}, {"parameters": overflow}, {"parameters": alone}, {})
    assert main([str(log), "-o", str(tmp_path / "a.png")]) == 0
    printed = capsys.readouterr().out
    assert "| mlp | 0.500 | 0.500 | 0.620 | 0.600 |" in printed
    assert "figures that are not finite: 3, the first at iteration 2" in printed
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parameters": None}, "a.jsonl:2: parameters None is not a group"),
        ({"parameters": "none"}, "a.jsonl:2: no parameters"),
        ({"parameters": {"w": 3}}, "a.jsonl:2: parameters w 3 is not a group"),
        ({"parameters": {"w": {"kept": "x"}}}, "a.jsonl:2: parameters w: kept 'x' is not a number"),
        ({"parameters": {"w": {"lost": 0.5}}}, "a.jsonl:2: parameters w: lost is none of kept, energy"),
        ({"density": "none"}, "a.jsonl:2: no density"),
        ({"iteration": "2"}, "a.jsonl:2: iteration '2' is not a whole number"),
    ],
)
def test_a_record_that_is_not_one_is_named(
    changed: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _log(tmp_path / "a.jsonl", {}, changed)
    assert main([str(log), "-o", str(tmp_path / "a.png")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "a.png").exists()


def test_an_ending_that_no_picture_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "a.zzz")]) == 1
    assert "a.zzz: no picture ends so; use .png, .pdf, .svg" in capsys.readouterr().err
