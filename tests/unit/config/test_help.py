"""--help, and the generated pages of flags."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.base.option import field_options, option
from megatron.compression.builtin import BUILTIN
from megatron.compression.outer import OuterOptions
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import COMMON, can_serve, read_specs
from megatron.config.flags import build_parser, build_run_parser, parse_args
from megatron.config.help import COMMON_GROUPS
from megatron.config.run import run_sections
from megatron.config.tasks import task_parser
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.translate import build_translator
from megatron.config.translate.known import read_known_flags
from megatron.config.translate.shortcuts import SHORTCUTS
from megatron.training.pretrain import main as pretrain
from tools.generate_flags_doc import documents
from tools.pages.flags import flags_markdown

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    return build_run_parser().format_help("all")


COMMON_FLAGS = {
    "data": "data-path split tokenizer-type vocab-file merge-file tokenizer-model",
    "model size": "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups seq-length "
    "max-position-embeddings",
    "model form": "normalization swiglu position-embedding-type untie-embeddings-and-output-weights",
    "batch and length": "micro-batch-size global-batch-size rampup-batch-size train-iters train-samples train-tokens "
    "seed",
    "learning rate": "optimizer lr min-lr lr-decay-style lr-warmup-fraction lr-warmup-iters weight-decay clip-grad "
    "adam-beta2",
    "layout": "tensor-model-parallel-size pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage "
    "pipeline-schedule sequence-parallel overlap-grad-reduce use-distributed-optimizer recompute-granularity",
    "experts": "num-experts moe-router-topk expert-model-parallel-size",
    "precision": "fp16 bf16 fp8",
    "save and resume": "save save-interval load finetune use-checkpoint-args",
    "evaluate and log": "log-interval tensorboard-dir log-json-file log-comm eval-iters eval-interval",
    "compress": "compress islands",
}
"""Flags of the short --help, by group, in order."""


def test_the_short_help_shows_sixty_flags_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = build_run_parser().format_help().splitlines()
    groups: dict[str, list[str]] = {}
    for line in lines:
        if line.endswith(":") and not line.startswith(" "):
            flags = groups.setdefault(line[:-1], [])
        elif line.startswith("  --") and "general" in groups:
            flags.append(line.split()[0].removeprefix("--"))
    assert groups.pop("general") == ["help", "config", "list-compressors"]
    assert groups == {group: flags.split() for group, flags in COMMON_FLAGS.items()}
    assert sum(map(len, groups.values())) == 60


def test_the_short_help_names_the_longer_helps() -> None:
    joined = " ".join(build_run_parser().format_help().split())
    names = re.findall(r"[a-z_]+", joined.partition("those of a group: ")[2])
    assert "--help all shows every flag" in joined
    assert names == [*run_sections(), *build_translator().sections(), "shorthand"]
    assert set(re.findall(r"more: ((?:--help [a-z]+(?:, )?)+)", joined)) <= {
        ", ".join(f"--help {name}" for name in group)
        for group in (
            *([name] for name in names),
            *(["data", "tokenizer"], ["parallel", "recompute"], ["model", "parallel"]),
            *(["logging", "validation"], ["compression", "islands"]),
        )
    }


@pytest.mark.parametrize("name", [*run_sections(), *build_translator().sections(), "shorthand"])
def test_help_of_a_group_shows_only_its_flags(name: str) -> None:
    parser = build_run_parser()
    listed = [line.split()[0] for line in parser.format_help(name).splitlines() if line.startswith("  --")]
    fields = [f"--{field.flag}" for field in parser.table.fields.values() if field.section == name]
    assert listed[3:] == (fields or [f"--{entry.name}" for entry in SHORTCUTS])
    assert len(listed) > 3


def test_every_option_names_an_existing_group() -> None:
    table = task_parser().table
    titles = {field.option.common for field in table.fields.values()}
    assert titles == {"", *COMMON_GROUPS}


def test_a_group_of_the_short_help_can_be_shown_by_itself() -> None:
    assert "--pipeline-schedule" in build_run_parser().format_help("layout")
    assert "--hidden-size" not in build_run_parser().format_help("layout")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--help", "optimiser"],
            "--help optimiser: no such group; the nearest is optimizer; the groups are all, model, ",
        ),
        (["-h", "all-flags"], "--help all-flags: no such group; the groups are all, model, "),
        (["--list-compressors", "powersdg"], "no such compressor or point; the nearest is powersgd; "),
        (["--list-compressors", "dp-gard"], "no such compressor or point; the nearest is dp-grad; "),
    ],
)
def test_an_unknown_group_or_compressor_is_one_line_with_the_nearest_name(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_args(argv)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_an_unknown_group_ends_the_program_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["--help", "optimiser"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "the nearest is optimizer" in output.err
    assert "Traceback" not in output.err


def test_programs_without_common_flags_show_all_flags() -> None:
    @dataclass(frozen=True)
    class Sampling:
        """Sampling."""

        top_k: int = option(0, "Candidates.")

    parser = build_parser({"sampling": Sampling}, "sample.py", "Draw text.")
    assert "--top-k" in parser.format_help()
    assert parser.format_help("all") == parser.format_help()


def test_a_program_with_a_section_of_training_runs_shows_all_flags() -> None:
    parser = build_parser({"tokenizer": TokenizerConfig}, "sample.py", "Draw text.")
    listed = [line.split()[0] for line in parser.format_help().splitlines() if line.startswith("  --")]
    assert listed[2:] == [f"--{field.flag}" for field in parser.table.fields.values()]
    assert parser.format_help() == parser.format_help("all")


def test_help_is_grouped_by_section(text: str) -> None:
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["general", *run_sections(), *build_translator().sections(), "shorthand and old names"]


def test_help_fits_the_terminal(text: str) -> None:
    too_long = [line for line in text.splitlines() if len(line) > 100]
    assert too_long == []


def test_help_names_every_flag_once(text: str) -> None:
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    table = build_run_parser().table
    expected = [f"--{field.flag}" for field in table.fields.values()] + [f"--{entry.name}" for entry in SHORTCUTS]
    assert listed == ["--help", "--config", "--list-compressors", *expected]


def test_help_hides_flags_without_effect(text: str) -> None:
    hidden = [flag.name for flag in read_known_flags() if f"--{flag.name} " in text.replace(",", " ")]
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
    assert capsys.readouterr().out == build_run_parser().format_help()
    with pytest.raises(SystemExit):
        parse_args(["--help=all"])
    assert capsys.readouterr().out == build_run_parser().format_help("all")


def test_each_compressor_is_listed_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--list-compressors"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*BUILTIN, *(point.value for point in Point if point.compressible)):
        assert len([line for line in lines if line.startswith(f"  {name} ")]) == 1


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_the_options_of_a_compressor_are_listed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--list-compressors", name.replace("-", "_").upper()])
    text = capsys.readouterr().out
    registration = BUILTIN[name]
    blocks = {block.splitlines()[0]: block.splitlines()[1:] for block in text.split("\n\n")}
    flags = [option.flag for option in field_options(name, registration.config)] or ["none"]
    assert [line.split()[0] for line in blocks["options:"]] == flags
    assert [line.split()[0] for line in blocks["points:"]] == [
        point.value for point in Point if point.compressible and can_serve(registration, point, name)
    ]
    assert [line.split()[0] for line in blocks["options of every compressor:"]] == list(COMMON)
    assert registration.needs in text
    assert registration.source in text
    example = text.partition("\nexample: ")[2].splitlines()[0]
    (spec,) = read_specs([example], Registry(BUILTIN), RunLength(1000)).values()
    assert spec.name == name


def test_the_options_of_a_point_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--list-compressors", "outer"])
    text = capsys.readouterr().out
    for option_of_point in field_options("outer", OuterOptions):
        assert f"\n  {option_of_point.flag} " in text


def test_parsing_does_not_import_torch() -> None:
    code = "import sys; from megatron.config.flags import parse_args; parse_args([]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_committed_reference_is_up_to_date() -> None:
    pages = documents()
    assert len(pages) >= 13
    stale = [path.name for path, content in pages.items() if path.read_text(encoding="utf-8") != content]
    assert stale == [], "run python tools/generate_flags_doc.py"


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_compressor_has_a_page_with_every_option(name: str) -> None:
    page = {"none": "index", "identity": "index", "delta-lowbits": "delta"}.get(name, name)
    text = (REPOSITORY / "docs/reference/compressors" / f"{page}.md").read_text(encoding="utf-8")
    assert f"`{name}`" in text
    for described in field_options(name, BUILTIN[name].config):
        assert f"| `{described.flag}` |" in text


def test_the_reference_lists_every_flag() -> None:
    text = flags_markdown()
    table = build_run_parser().table
    for field in table.fields.values():
        for flag in field.flags:
            assert f"`--{flag}" in text
    for name in [entry.name for entry in SHORTCUTS] + [entry.name for entry in read_known_flags()]:
        assert f"`--{name}" in text


def test_every_row_of_the_reference_has_all_cells() -> None:
    for block in flags_markdown().split("\n\n"):
        rows = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1
