"""Option fields, and the parser of any program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from megatron.base.errors import UserError
from megatron.base.option import derived, option, required
from megatron.config.flags import build_parser


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of text.

    A second paragraph.
    """

    temperature: float = option(1.0, "Flattens the distribution.", above=0)
    top_k: int = option(0, "Keep the best k.", unit="tokens", minimum=0)
    prompts: list[str] = option([], "Texts to continue.", aliases=("prompt",))  # noqa: RUF009
    stop: list[str] = option([], "Stop at this text.", repeatable=True)  # noqa: RUF009
    greedy: bool = option(False, "Always the likeliest token.")
    cache: bool = option(True, "Do not keep keys and values.", flag="no-cache", off_switch=True)
    model_path: str = required("The model's folder.")
    device: Literal["cpu", "cuda"] | None = derived("the first one", "Device.")


def _parse(line: str) -> Sampling:
    sampling = build_parser({"sampling": Sampling}, "sample.py", "Draw text.").parse(line.split())
    result: Sampling = sampling.sections["sampling"]
    return result


def test_every_kind_of_field_parses() -> None:
    parsed = _parse(
        "--temperature 2 --top_k 1_000 --prompts a b --stop x --stop=y --greedy --no-cache --model-path m --device CPU"
    )
    assert parsed == Sampling(
        temperature=2.0,
        top_k=1000,
        prompts=["a", "b"],
        stop=["x", "y"],
        greedy=True,
        cache=False,
        model_path="m",
        device="cpu",
    )


def test_missing_flags_have_their_defaults() -> None:
    assert _parse("--model-path m") == Sampling(model_path="m")
    assert Sampling().prompts == []
    assert Sampling().prompts is not Sampling().prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--top-k 2", "--model-path is required"),
        ("--model-path m --temperature 0", "--temperature is 0.0; it must be above 0"),
        ("--model-path m --top-k -1", "--top-k is -1; it must be at least 0"),
        ("--model-path m --temperature nan", "'nan' is not a finite number"),
        ("--model-path m --device tpu", "--device: 'tpu' is not one of cpu, cuda"),
        ("--model-path", "--model-path: expected one argument"),
        ("--model-path m stray", "stray"),
        ("--model-pat m", "the nearest is --model-path"),
    ],
)
def test_bad_command_lines_are_refused_in_one_line(line: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        _parse(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_of_another_program() -> None:
    text = build_parser({"sampling": Sampling}, "sample.py", "Draw text.").format_help()
    assert "usage: sample.py" in text
    assert "sampling:\n  Sampling of text.\n" in text
    assert "second paragraph" not in text
    assert "shorthand" not in text


def test_a_field_without_description_is_a_programming_error() -> None:
    @dataclass
    class Plain:
        x: int = field(default=0)

    with pytest.raises(TypeError, match=r"Plain\.x has no option"):
        build_parser({"plain": Plain}, "p", "d")


def test_a_switch_that_is_on_by_default_needs_a_flag_to_turn_it_off() -> None:
    @dataclass
    class On:
        x: bool = option(True, "On.")

    with pytest.raises(TypeError, match="turns it off"):
        build_parser({"on": On}, "p", "d")


def test_a_flag_with_two_meanings_is_a_programming_error() -> None:
    @dataclass
    class Other:
        """Other."""

        other: int = option(0, "Clashes.", flag="top_K")

    with pytest.raises(ValueError, match="two meanings for --top_K"):
        build_parser({"sampling": Sampling, "other": Other}, "p", "d")


def test_a_field_name_in_two_sections_is_a_programming_error() -> None:
    @dataclass
    class Other:
        """Other."""

        top_k: int = option(0, "Clashes.", flag="best")

    with pytest.raises(ValueError, match="two sections have a field top_k"):
        build_parser({"sampling": Sampling, "other": Other}, "p", "d")
