"""--help is grouped and readable, and the pages of flags are what the generator writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.config import build_run_parser, parse_args
from megatron.config.others import flags_of_others_markdown
from megatron.config.reference import flags_markdown
from megatron.config.run import run_sections
from megatron.config.translate import TRANSLATOR
from megatron.config.translate.known import KNOWN_FLAGS
from megatron.config.translate.shortcuts import SHORTCUTS

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    return build_run_parser().format_help()


def test_help_is_grouped_by_section(text: str) -> None:
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["general", *run_sections(), *TRANSLATOR.sections(), "shorthand and old names"]


def test_help_fits_the_terminal(text: str) -> None:
    too_long = [line for line in text.splitlines() if len(line) > 100]
    assert too_long == []


def test_help_names_every_flag_once_at_the_start_of_a_line(text: str) -> None:
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    table = build_run_parser().table
    wanted = [f"--{field.flag}" for field in table.fields.values()] + [f"--{entry.name}" for entry in SHORTCUTS]
    assert shown == ["--help,", "--config", "--list-compressors,", *wanted]


def test_help_hides_what_has_no_effect(text: str) -> None:
    hidden = [flag.name for flag in KNOWN_FLAGS if f"--{flag.name} " in text.replace(",", " ")]
    assert hidden == []


def test_help_shows_defaults_units_choices_and_aliases(text: str) -> None:
    joined = " ".join(text.split())
    assert "--initial-loss-scale X First value of the dynamic loss scale. (default: 2**32)" in joined
    assert "(samples; required)" in joined
    assert "also --num-key-value-heads" in joined
    assert "--DDP-impl local|torch" in joined
    assert "--ddp-impl" not in joined
    assert "--swiglu Gated MLP" in joined
    assert "--rampup-batch-size START INCREMENT SAMPLES" in joined
    assert "one of GPT2BPETokenizer" in joined


def test_help_prints_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: pretrain_gpt.py [--config FILE.yaml] [flags]")


def test_parsing_does_not_import_torch() -> None:
    code = "import sys; from megatron.config import parse_args; parse_args([]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "make"), [("flags.md", flags_markdown), ("flags-of-others.md", flags_of_others_markdown)]
)
def test_the_committed_reference_is_up_to_date(name: str, make: Callable[[], str]) -> None:
    wanted = make()
    assert (REPOSITORY / "docs" / name).read_text(encoding="utf-8") == wanted, "run python tools/generate_flags_doc.py"


def test_the_reference_lists_every_flag() -> None:
    text = flags_markdown()
    table = build_run_parser().table
    for field in table.fields.values():
        for flag in field.flags:
            assert f"`--{flag}" in text
    for name in [entry.name for entry in SHORTCUTS] + [entry.name for entry in KNOWN_FLAGS]:
        assert f"`--{name}" in text


def test_every_row_of_the_reference_has_all_cells() -> None:
    for block in flags_markdown().split("\n\n"):
        rows = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_the_generator_checks(tmp_path: Path) -> None:
    script = REPOSITORY / "tools" / "generate_flags_doc.py"
    done = subprocess.run([sys.executable, str(script), "--check"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
