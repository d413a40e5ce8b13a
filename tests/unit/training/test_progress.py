"""The progress bar."""

from __future__ import annotations

import builtins
import io
import re
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.training.progress import ProgressBar


class Terminal(io.StringIO):
    """A stream that pretends to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_there_is_no_bar_without_a_terminal() -> None:
    stream, output = io.StringIO(), io.StringIO()
    bar = ProgressBar(10, stream=stream, output=output)
    bar.update(loss=1.0)
    bar.write("a line")
    bar.close()
    assert not bar.is_shown
    assert stream.getvalue() == ""
    assert output.getvalue() == "a line\n"


def test_the_bar_can_be_turned_off() -> None:
    assert not ProgressBar(10, mode="off", stream=Terminal()).is_shown


def test_a_terminal_shows_progress_loss_and_speed() -> None:
    stream = Terminal()
    bar = ProgressBar(10, done=4, stream=stream, output=io.StringIO())
    bar.update(loss=2.34567, tokens_per_second=12345.6)
    bar.close()
    last = re.split(r"[\r\n]+", stream.getvalue().strip())[-1]
    assert "5/10" in last
    assert "loss=2.3457" in last
    assert "tokens/s=12,346" in last


def test_each_line_starts_in_the_first_column_of_a_cleared_row() -> None:
    terminal = Terminal()
    bar = ProgressBar(10, stream=terminal, output=terminal)
    for i in range(3):
        bar.update(loss=1.0)
        bar.write(f" iteration {i}/ 10 | lm loss: 1.0 |")
    bar.close()
    for i in range(3):
        (before,) = re.findall(rf"([^\n]*) iteration {i}/ 10 \| lm loss: 1\.0 \|\n", terminal.getvalue())
        assert before.endswith("\r")
        assert set(before.split("\r")[-2]) <= {" "}


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_tqdm(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tqdm"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tqdm)
    assert not ProgressBar(10, stream=Terminal()).is_shown
    with pytest.raises(UserError, match="pip install tqdm"):
        ProgressBar(10, mode="on", stream=io.StringIO())
