"""The translator leaves only native flags."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.config.flags import build_run_parser
from megatron.config.run import run_sections
from megatron.config.translate import build_translator
from tests.unit.config.original_scripts import AQSGD_LM, COMPLETE

PACKAGE = Path(__file__).parents[3] / "megatron"
PARSER = build_run_parser()


@pytest.mark.parametrize(
    "flags",
    [
        COMPLETE["optimus-cc tbl2 2.5B CB-FE-SC"].flags,
        AQSGD_LM.flags,
        "--load c --load-tag global_step3 --zero-stage 1",
    ],
    ids=["optimus-cc", "aq-sgd", "deepspeed"],
)
def test_translated_settings_have_native_sections_only(flags: str) -> None:
    assert any(PARSER.table.fields[path].section in build_translator().sections() for path in _paths_of_flags(flags))
    parsed = PARSER.parse(flags.split(), check=False)
    assert list(parsed.sections) == list(run_sections())
    assert {path.partition(".")[0] for path in parsed.explicit} <= set(run_sections())


def _paths_of_flags(flags: str) -> list[str]:
    names = [word.partition("=")[0] for word in flags.split() if word.startswith("--")]
    targets = [PARSER.table.by_flag(name) for name in names]
    return [path for path, field in PARSER.table.fields.items() if field in targets]


def test_a_file_that_gives_a_known_flag_and_its_opposite_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("delay_grad_reduce: true\nno_delay_grad_reduce: true\n")
    with pytest.raises(UserError, match=r"^--delay-grad-reduce and --no-delay-grad-reduce contradict each other"):
        PARSER.parse(["--config", str(file)], check=False)


@pytest.mark.parametrize("word", ["false", "no", "OFF", "0"])
def test_a_shorthand_switch_is_off_by_the_words_of_other_switches(word: str) -> None:
    parsed = PARSER.parse(["--recompute-activations", word, "--retro-add-retriever", word], check=False)
    assert parsed.explicit == set()


def test_a_shorthand_switch_is_refused_with_another_word() -> None:
    with pytest.raises(UserError, match=r"^--recompute-activations: 'maybe' is neither true nor false$"):
        PARSER.parse(["--recompute-activations", "maybe"], check=False)


@pytest.mark.parametrize("line", ["warmup: [0.1, 0.2]", "recompute_activations: [true, false]"])
def test_a_list_in_a_file_is_refused_for_a_flag_of_one_value(line: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(line)
    with pytest.raises(UserError, match=r"expected one value, not a list of 2$"):
        PARSER.parse(["--config", str(file)], check=False)


def test_only_the_translator_imports_dialects() -> None:
    modules = {dialect.config.__module__ for dialect in build_translator().dialects}
    assert len(modules) == 4
    importers = set()
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(isinstance(node, ast.ImportFrom) and node.module in modules for node in nodes):
            importers.add(path.relative_to(PACKAGE).as_posix())
    assert importers == {"config/translate/__init__.py"}


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("--fp8 tensorwise", "tensorwise"),
        ("--fp8-format hybrid", "tensorwise"),
        ("--fp8-format E4M3", "rowwise"),
        ("--fp8-hybrid", "tensorwise"),
        ("--fp8-e4m3", "rowwise"),
        ("--fp8-e4m3 false", None),
    ],
)
def test_names_of_8_bit_formats_are_recipes(words: str, recipe: str | None) -> None:
    assert PARSER.parse(words.split(), check=False).sections["precision"].fp8 == recipe


def test_another_format_is_refused() -> None:
    with pytest.raises(UserError, match=r"^--fp8-format int8: choose from hybrid, e4m3$"):
        PARSER.parse(["--fp8-format", "int8"], check=False)
