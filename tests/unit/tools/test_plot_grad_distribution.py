"""Malformed records of gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import plot_grad_distribution
from tools.plot_grad_distribution import main, read_events, read_places

_PARAMETERS = {
    "layers.0.mlp.weight": {"energy": 0.5, "kept": 0.25},
    "layers.1.mlp.weight": {"energy": 0.7, "kept": 0.75},
}


def _log(path: Path, *changed: dict[str, Any]) -> Path:
    """Write a record for each of the changes; fields that are "none" are left out."""
    lines = []
    for number, fields in enumerate(changed, 1):
        event = {"kind": "gradients", "iteration": number, "density": 0.01, "parameters": _PARAMETERS, **fields}
        lines.append(json.dumps({name: value for name, value in event.items() if value != "none"}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.mark.filterwarnings("error")
def test_values_that_are_not_finite_are_counted_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An overflow makes energies nan, and the log writes them as null."""
    overflow = {"layers.0.mlp.weight": {"energy": None, "kept": None}, "layers.1.mlp.weight": {"energy": 0.7}}
    alone = {"layers.0.mlp.weight": {"energy": None, "kept": 0.5}}
    log = _log(tmp_path / "a.jsonl", {}, {"parameters": overflow}, {"parameters": alone}, {})
    assert main([str(log), "-o", str(tmp_path / "a.png")]) == 0
    printed = capsys.readouterr().out
    assert "| mlp | 0.500 | 0.500 | 0.620 | 0.600 |" in printed
    assert "values that are not finite: 3, the first at iteration 2" in printed
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parameters": None}, "a.jsonl:2: parameters is missing"),
        ({"parameters": "none"}, "a.jsonl:2: parameters is missing"),
        ({"parameters": {"w": 3}}, "a.jsonl:2: parameters: w: expected names and values, not 3"),
        ({"parameters": {"w": {"kept": "x"}}}, "a.jsonl:2: parameters w: kept: 'x' is not a number"),
        ({"parameters": {"w": {"lost": 0.5}}}, "a.jsonl:2: parameters w: lost is not one of kept, energy"),
        ({"density": "none"}, "a.jsonl:2: density is missing"),
        ({"iteration": "2"}, "a.jsonl:2: iteration: '2' is not an integer"),
    ],
)
def test_a_malformed_record_is_named(
    changed: dict[str, Any], message: str, tmp_path: Path, error_line: Callable[[], str]
) -> None:
    log = _log(tmp_path / "a.jsonl", {}, changed)
    assert main([str(log), "-o", str(tmp_path / "a.png")]) == 2
    assert message in error_line()
    assert not (tmp_path / "a.png").exists()


def test_an_unknown_picture_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "a.zzz")]) == 2
    assert "a.zzz: not a picture format; use .png, .pdf, .svg" in capsys.readouterr().err


def _placed(*counts: Any, names: tuple[str, ...] = ("layers.0.mlp.weight",)) -> list[dict[str, Any]]:
    """Records of the largest entries' positions."""
    return [{"parameters": {name: {"energy": 0.5, "places": row} for name in names}} for row in counts]


def test_positions_are_drawn_as_multiples_of_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations from left to right, the matrix from bottom to top."""
    log = _log(tmp_path / "a.jsonl", *_placed([4, 0], [3, 1], [2, 2]))
    figures: dict[str, Any] = {}
    monkeypatch.setattr(plot_grad_distribution, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    assert main([str(log), "-o", str(tmp_path / "a.png"), "--places", str(tmp_path / "b.png")]) == 0
    panel = figures["b.png"].axes[0]
    assert panel.get_title() == "layers.0.mlp"
    (mesh,) = panel.collections
    assert mesh.get_array().tolist() == [[2.0, 1.5, 1.0], [0.0, 0.5, 1.0]]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert mesh.get_coordinates()[:, 0, 1].tolist() == [0.0, 0.5, 1.0]


def test_one_matrix_of_each_kind_is_drawn_unless_some_are_named(tmp_path: Path) -> None:
    names = ("embedding.weight", *(f"layers.{layer}.{kind}.weight" for layer in range(12) for kind in ("mlp", "qkv")))
    events = read_events(_log(tmp_path / "a.jsonl", *_placed([1, 2], names=names)))
    assert sorted(read_places(events, None)) == ["embedding.weight", "layers.6.mlp.weight", "layers.6.qkv.weight"]
    assert sorted(read_places(events, "layers.2.mlp,embed")) == ["embedding.weight", "layers.2.mlp.weight"]


@pytest.mark.parametrize(
    ("counts", "words", "message"),
    [
        ([[1, 2], [1, 2, 3]], ["--places", "b.png"], "a.jsonl:2: parameters layers.0.mlp.weight: places: 3 counts"),
        ([[1, 2], 3], ["--places", "b.png"], "a.jsonl:2: parameters layers.0.mlp.weight: places: expected a list"),
        ([[1, 2], [1, None]], ["--places", "b.png"], "a.jsonl:2: parameters layers.0.mlp.weight: places: 2 counts"),
        ([[]], ["--places", "b.png"], "a.jsonl:1: parameters layers.0.mlp.weight: places: 0 counts"),
        ([[1, 2]], ["--places", "b.zzz"], "b.zzz: not a picture format"),
        (
            [[1, 2]],
            ["--places", "b.png", "--only", "qkv,x"],
            "--only qkv,x: no matrix has such a name; the log has layers.0",
        ),
        ([[1, 2]], ["--only", "qkv"], "--only qkv selects matrices for --places; give --places FILE"),
        ([], ["--places", "b.png"], "--places: no places in the log; run with --log-gradients-bins 200"),
    ],
)
def test_undrawable_positions_are_one_line(
    counts: list[Any], words: list[str], message: str, tmp_path: Path, error_line: Callable[[], str]
) -> None:
    log = _log(tmp_path / "a.jsonl", *(_placed(*counts) if counts else [{}]))
    words = [str(tmp_path / word) if word.startswith("b.") else word for word in words]
    assert main([str(log), "-o", str(tmp_path / "a.png"), *words]) == 2
    assert message in error_line()
    assert not list(tmp_path.glob("*.png"))
