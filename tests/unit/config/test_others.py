"""Every flag of other systems is accepted or explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.base.option import FieldOption
from megatron.config.flags import build_run_parser
from megatron.config.translate.rules import VALUE, KnownFlag, Meaning, Shortcut
from tests.unit.config.original_scripts import AQSGD_LM, COMPLETE, Script
from tools.pages import flags_of_others as module
from tools.pages.flags_of_others import (
    SYSTEMS,
    TASK_FLAGS,
    Fate,
    TheirFlag,
    determine_fate,
    fates,
    flags_of_others_markdown,
    parser_of,
    read_list,
)

PARSER = build_run_parser()
COUNTS = {
    "megatron-deepspeed": 316,
    "deepspeed": 2,
    "jupiter": 54,
    "megatron-lm": 874,
    "optimus-cc": 186,
    "radius": 213,
    "edgc": 181,
    "megatron-core-experts": 30,
    "megatron-core-muon": 10,
    "aq-sgd": 56,
    "megatron-deepspeed-tasks": 18,
}
"""Flags of each system, two second spellings of Megatron-DeepSpeed included."""


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_flag_is_accepted_or_explained(system: str) -> None:
    flags, parser = read_list(system), parser_of(system)
    assert len({flag.name for flag in flags}) == len(flags) == COUNTS[system]
    for flag in flags:
        fate = determine_fate(flag, parser)
        assert fate.how or fate.status == "works", flag.name
        target = parser.table.by_flag(flag.name)
        if flag.switch:  # a word after it would be lost, or missing
            assert target is not None
            takes = target.arity == VALUE if isinstance(target, (KnownFlag, Shortcut)) else not _is_switch(target)
            assert not takes, flag.name


def _is_switch(target: object) -> bool:
    return isinstance(target, FieldOption) and target.is_switch


def test_every_list_is_in_the_page_and_every_system_has_a_list() -> None:
    assert {path.stem for path in module.LISTS.glob("*.txt")} == set(SYSTEMS)


@pytest.mark.parametrize(
    ("name", "fate"),
    [
        ("num-layers", Fate("works")),
        ("grad_comp", Fate("works under another name", "Same as --compress dp-grad=powersgd.")),
        (
            "checkpoint-activations",
            Fate("works under another name", "`--recompute-granularity full --recompute-method uniform`"),
        ),
        ("warmup-steps", Fate("works under another name", "`--lr-warmup-iters VALUE`")),
        ("override-lr-scheduler", Fate("works under another name", "`--override-opt-param-scheduler`")),
        ("stable_topk_num_buckets", Fate("no effect", "it had none in Radius either")),
        ("mmap-warmup", Fate("no effect", "files are memory-mapped and read on demand")),
        ("sample-rate", Fate("refused", "every sample is used; leave it out; `1` asks for nothing and is accepted")),
        ("fp16-lm-cross-entropy", Fate("refused", "the loss is always computed in fp32; leave it out")),
    ],
)
def test_flags_have_the_documented_fate(name: str, fate: Fate) -> None:
    systems = [system for system in SYSTEMS if system != TASK_FLAGS]
    flags = {flag for system in systems for flag in read_list(system) if flag.name == name}
    assert {determine_fate(flag, PARSER) for flag in flags} == {fate}


def test_flags_of_another_program_name_it() -> None:
    for name in ("get_val_ppls", "src_ckpt_path"):
        fate, systems = fates()[name.replace("_", "-")]
        assert (fate.status, systems) == ("works in another program", ["optimus-cc", "radius"])
        assert fate.how.startswith("val_check_gpt.py, and pretrain_gpt.py")


def test_flags_of_tasks_have_the_fate_of_their_program() -> None:
    fate_by_flag = fates()
    assert fate_by_flag["train-data"][0].status == "no effect"
    assert fate_by_flag["tasks/main.py --train-data"] == (Fate("works"), [TASK_FLAGS])
    assert fate_by_flag["tasks/main.py --keep-last"] == (Fate("works"), [TASK_FLAGS])
    assert fate_by_flag["tasks/main.py --qa-data-dev"][0].status == "refused"


def test_an_unexplained_flag_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for system in SYSTEMS:
        (tmp_path / f"{system}.txt").write_text("# Flags\n- num-layers value ∅\n")
    monkeypatch.setattr(module, "LISTS", tmp_path)
    assert "| `--num-layers` | DSJOREALCM | works |  |" in flags_of_others_markdown()
    (tmp_path / "edgc.txt").write_text("# Flags\n- nobody-knows-it switch\n")
    with pytest.raises(UserError, match=r"^--nobody-knows-it: neither accepted nor explained; add it to "):
        flags_of_others_markdown()


def test_a_table_that_contradicts_the_parser_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownFlag, "meaning", lambda self, words: Meaning())
    with pytest.raises(RuntimeError, match="the parser does not do what the tables of known flags say"):
        determine_fate(TheirFlag("mmap-warmup", True), PARSER)


ALL: dict[str, Script] = {"aq-sgd": AQSGD_LM, **COMPLETE}
SCRIPTS = {name: script for name, script in ALL.items() if not name.startswith("megatron-lm")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_lists_have_all_flags_of_the_original_scripts(name: str) -> None:
    system = next(system for system in SYSTEMS if name.startswith(system))
    lists = [system, "deepspeed"] if system == "megatron-deepspeed" else [system]
    listed = {flag.name.replace("_", "-").lower() for name_of_list in lists for flag in read_list(name_of_list)}
    script_flags = {word.partition("=")[0].replace("_", "-").lower() for word in SCRIPTS[name].flags.split()}
    assert {flag[2:] for flag in script_flags if flag.startswith("--")} - listed == set()
