"""Descriptions of unexpected errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.base.errors import UserError, describe_failure
from megatron.compression.plugins import build_registry


def _failure(code: str, path: Path) -> Exception:
    path.write_text(code)
    try:
        exec(compile(code, str(path), "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("it does not fail")


@pytest.mark.parametrize(
    ("code", "description"),
    [
        ("def f():\n    raise ValueError('bad\\nmore')\nf()\n", "ValueError: bad (mine.py, line 2)"),
        ("\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' (mine.py, line 2)"),
        ("import importlib\nimportlib.import_module('no_such')\n", "No module named 'no_such' (mine.py, line 2)"),
        ("raise KeyError()\n", "KeyError (mine.py, line 1)"),
        ("def (\n", "SyntaxError: invalid syntax (mine.py, line 1)"),
    ],
)
def test_a_failure_is_described_with_its_place(code: str, description: str, tmp_path: Path) -> None:
    assert describe_failure(_failure(code, tmp_path / "mine.py")).endswith(description)


def test_an_error_that_was_not_raised_has_no_place() -> None:
    assert describe_failure(ValueError("bad")) == "ValueError: bad"


@pytest.mark.parametrize(
    "code",
    [
        "import no_such_module\n",
        "def register(registry): registry['no_such_module']\n",
        "def register(registry): raise SystemExit('no_such_module')\n",
    ],
)
def test_a_module_that_fails_is_refused_with_the_line(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(UserError, match=r"mine\.py cannot be used: .*no_such_module.* \(mine\.py, line 1\)$"):
        build_registry(["mine.py"])
