"""Any flags, YAML files and specs give a valid run or an error of a single line, in bounded time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.base.documents import parse_yaml, read_yaml
from megatron.base.errors import ErrorList, UserError
from megatron.base.option import FieldOption, field_options
from megatron.base.user_text import spell
from megatron.compression.builtin import BUILTIN
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import COMMON, read_spec
from megatron.config import flags
from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.collect import collect_yaml
from megatron.config.flags import build_run_parser, parse_args
from megatron.config.run import RunConfig, run_sections
from megatron.config.translate import build_translator
from megatron.optimizer.schedules import LRSchedule

MINIMAL = [
    *("--num-layers=4", "--hidden-size=64", "--num-attention-heads=4", "--seq-length=32"),
    *("--micro-batch-size=2", "--lr=0.001", "--vocab-size=100"),
]
PARSER = build_run_parser()
FIELDS = [
    field
    for field in PARSER.table.fields.values()
    if field.section in (*run_sections(), *build_translator().sections())
]
FLAGS = sorted({spell(flag) for flag, _ in PARSER.table.spellings()})
NUMBERS = [field for field in FIELDS if field.element in (int, float)]
SECONDS = 10.0
"""Limit for an example, which takes milliseconds on a quiet machine."""

ODD_NUMBERS = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.builds("{}e{}".format, st.integers(-99, 99), st.integers(-500, 500)),
    st.builds(lambda power, off: str(2**power + off), st.integers(0, 220), st.integers(-1, 1)),
    st.sampled_from(
        ["nan", "inf", "-inf", "", " 1 ", "1_0", "1__0", "0x10", "1e", ".", "-", "٣", "²", "\uff11\uff12", "1\n2"]
    ),
    st.sampled_from(["9" * 5000, "0" * 5000, "1e" + "9" * 400, "0." + "0" * 500 + "1", "1e-400", "1e308", "10**9"]),
)
TEXTS = st.one_of(ODD_NUMBERS, st.text(max_size=20), st.sampled_from(["true", "off", "None", "[1]", "\udcff", "\0"]))


@pytest.fixture(autouse=True, scope="module")
def _shared_parser() -> Iterator[None]:
    """Share a parser between examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "build_run_parser", lambda *_: PARSER)
        yield


def _within(action: Callable[[], object]) -> str | None:
    """Run an action and return the line of its ``UserError``, or None; fail on other errors and on long runs."""
    started = time.process_time()
    message = None
    try:
        action()
    except UserError as error:
        message = str(error)
        assert message
        assert len(message.splitlines()) == 1, message
        assert len(message) < 25_000
    assert time.process_time() - started < SECONDS
    return message


def _counted(config: RunConfig) -> None:
    """Compute batch sizes, learning rates and the YAML form, as a run does at its start."""
    training = config.training
    sizes = BatchSizeSchedule(
        training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        dp_size=config.parallel.data_parallel_size(1),
        rampup=training.rampup_batch_size,
    )
    iterations = training.train_iters or sizes.iterations_for(training.train_samples or 0)
    assert 0 <= iterations < 2**63
    schedule = LRSchedule.from_options(
        config.optimizer,
        global_batch_size=training.global_batch_size,
        seq_length=config.model.seq_length,
        train_iters=training.train_iters,
        train_samples=training.train_samples,
        train_tokens=training.train_tokens,
    )
    schedule.step(iterations * training.global_batch_size)
    assert schedule.lr < 1e5
    assert RunConfig.from_yaml(config.to_yaml()) == config
    config.describe().encode()


def _prepare(words: list[str]) -> None:
    _counted(parse_args(words).resolve(1))


def _word(field: FieldOption, text: str) -> list[str]:
    if field.is_list and field.option.count:
        return [f"--{field.flag}", *[text] * field.option.count]
    return [f"--{field.flag}={text}"]


@given(st.lists(st.tuples(st.sampled_from(NUMBERS), ODD_NUMBERS), min_size=1, max_size=3), st.booleans())
@settings(max_examples=150)
def test_any_numbers_in_flags(given_numbers: list[tuple[FieldOption, str]], samples: bool) -> None:
    length = "--train-samples=6400" if samples else "--train-iters=100"
    words = [word for field, text in given_numbers for word in _word(field, text)]
    _within(lambda: _prepare([*MINIMAL, length, *words]))


@given(st.sampled_from(FIELDS), TEXTS)
def test_any_text_in_a_flag(field: FieldOption, text: str) -> None:
    _within(lambda: _prepare([*MINIMAL, "--train-iters=100", *_word(field, text)]))


@given(st.lists(st.one_of(st.sampled_from([f"--{f}" for f in FLAGS]), TEXTS), max_size=6))
def test_any_words_on_the_command_line(words: list[str]) -> None:
    if any(word.startswith(("--help", "-h", "--list")) for word in words):
        return
    _within(lambda: _prepare([*MINIMAL, "--train-iters=100", *words]))


@pytest.mark.parametrize(
    "field", [f for f in NUMBERS if f.element is int and f.section in run_sections()], ids=lambda f: f.flag
)
def test_sizes_of_any_magnitude_are_counted_or_refused(field: FieldOption) -> None:
    sizes = (10**9, 10**12, 10**18, 2**63 - 1, 2**63, 10**30, -1, -(10**18))
    for size, length in product(sizes, ("--train-iters=100", "--train-samples=6400")):
        words = [*MINIMAL, length, *_word(field, str(size))]
        message = _within(lambda words=words: _prepare(words))  # type: ignore[misc]
        assert message is not None or -(2**63) < size < 2**63, size


PLAIN: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.floats(), st.text(max_size=8), st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.sampled_from([field.name for field in FIELDS] + FLAGS + list(run_sections()))


def _read(text: str) -> None:
    errors = ErrorList()
    collect_yaml(PARSER.table, parse_yaml(text, "run.yaml"), "run.yaml", errors)
    errors.raise_all()


@given(st.dictionaries(KEYS, PLAIN, min_size=1, max_size=2), st.sampled_from([None, *run_sections()]))
@settings(max_examples=150)
@example({"batch-size": []}, None)
@example({"disable-bias-linear": []}, None)
def test_any_yaml_mapping(content: dict[str, Any], section: str | None) -> None:
    text = yaml.safe_dump({section: content} if section else content, allow_unicode=True)
    _within(lambda: _read(text))


TOKENS = st.sampled_from(
    [
        *("model", "lr", "seed", ": ", "\n", "  ", "- ", "[", "]", "{", "}", ", ", "&a ", "*a", "? ", "| ", "> ", "'"),
        *("!!int ", "!!float ", "!!bool ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!map ", "!x ", "<<"),
        *("2001-99-99", "1:99:99", "0x" + "f" * 5000, "9" * 5000, "0b12", ".inf", "~", "%YAML 9", "---", "\t", "é"),
    ]
)


@given(st.lists(TOKENS, max_size=14).map("".join))
@settings(max_examples=300)
@example("!!bool x")
@example("seed: !!timestamp x")
@example("lr: 0x" + "f" * 5000)
@example("model: " + "[" * 5000)
@example("a: &a [" + "b," * 9 + "]\nseed: [" + "*a," * 9 + "]")
def test_any_yaml_text(text: str) -> None:
    _within(lambda: _read(text))


def test_nested_yaml_aliases_are_refused_quickly() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]" for k in range(1, 40)), "batch-size: *a39"]
    names = iter(sorted({field.name for field in FIELDS if field.is_list or field.element is str}))
    text = "\n".join(lines)
    for k in range(40):
        text = text.replace(f"a{k}: &", f"{next(names)}: &")
    assert _within(lambda: _read(text)) is not None


def test_a_config_that_is_not_a_plain_file_of_limited_size_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text("# " + "x" * (2 << 20))
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "large", "folder", "/dev/zero", "/dev/tty", "nothing"):
        message = _within(lambda name=name: read_yaml(tmp_path / name))  # type: ignore[misc]
        assert message is not None
        assert message.startswith(str(tmp_path / name))


POINTS = [point.value for point in Point]
OPTIONS = sorted({field.flag for entry in BUILTIN.values() for field in field_options("", entry.config)} | set(COMMON))
SCHEDULES = st.one_of(
    st.lists(st.builds("{}@{}".format, ODD_NUMBERS, ODD_NUMBERS), min_size=1, max_size=3).map("/".join),
    st.builds("{}~{}@{}".format, ODD_NUMBERS, ODD_NUMBERS, ODD_NUMBERS),
    st.builds("{}@{}epochs".format, ODD_NUMBERS, ODD_NUMBERS),
    st.builds("{}:{}".format, st.sampled_from(["first", "last", "all"]), ODD_NUMBERS),
    st.builds("{}epochs".format, ODD_NUMBERS),
)
VALUES = st.one_of(TEXTS, SCHEDULES, st.sampled_from(["on", "off", "lazy", "epilogue", "8@0/4@0", "4@0/2@5"]))


@pytest.mark.slow
@given(
    st.sampled_from(POINTS),
    st.sampled_from(sorted(BUILTIN)),
    st.lists(st.builds("{}={}".format, st.sampled_from(OPTIONS), VALUES), max_size=3),
)
@settings(max_examples=300)
@example("dp-grad", "fixpoint", ["group=99999999999999999992"])
@example("dp-grad", "fixpoint", ["bits=8@0/4@0"])
@example("dp-grad", "powersgd", ["warmup=²"])
@example("dp-grad", "powersgd", ["stages=first:²"])
@example("dp-grad", "powersgd", [f"warmup={'9' * 400}epochs"])
@example("dp-grad", "topk", ["density=1~1e-300@5"])
def test_any_compress_spec(point: str, name: str, words: list[str]) -> None:
    text = ",".join([f"{point}={name}", *words])
    _within(lambda: _prepare([*MINIMAL, "--train-iters=100", f"--compress={text}"]))

    def at_iterations() -> None:
        spec = read_spec(text, Registry(BUILTIN), RunLength(100, lambda epochs: round(100 * epochs)))
        for iteration in (0, 1, 99, 10**9):
            spec.options_at(iteration)
        spec.extreme_options()

    _within(at_iterations)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dp-grad=fixpoint,group=99999999999999999992", ["group=99999999999999999992", "too large"]),
        ("dp-grad=fixpoint,group=2097152", ["group=2097152", "at least 8 and at most"]),
        ("pp-forward=fixpoint,bits=8@0/4@0", ["8@0/4@0", "one after the other"]),
        ("pp-forward=fixpoint,bits=8@0/6@1epochs/4@0", ["8@0/6@1epochs/4@0", "one after the other"]),
        ("dp-grad=powersgd,stages=first:0", ["stages=first:0", "at least one"]),
        ("dp-grad=powersgd,stages=first:99", ["stages=first:99", "--pipeline-model-parallel-size is 2"]),
        ("pp-backward=lowrank,stages=last:3", ["stages=last:3", "at most 2"]),
        ("dp-grad=powersgd,rank=65", ["rank=65", "--hidden-size 64", "rank=16 or less"]),
        ("dp-grad=powersgd,rank=4@0/65@50", ["rank=65", "--hidden-size 64"]),
        ("dp-grad=topk,density=0", ["density=0", "it must be above 0"]),
        ("dp-grad=stable-topk,density=0", ["density=0", "above 0 and at most 1"]),
        ("dp-grad=powersgd,seed=-1", ["seed=-1", "at least 0 and at most"]),
        (f"dp-grad=powersgd,seed={2**200}", ["seed=", "too large"]),
        ("dp-grad=powersgd,rank=٣", ["rank=٣", "is not an integer"]),
    ],
)
def test_invalid_specs_are_refused(spec: str, words: list[str]) -> None:
    parsed = parse_args([*MINIMAL, "--train-iters=100", "--pipeline-model-parallel-size=2", "--compress", spec])
    with pytest.raises(UserError) as caught:
        parsed.resolve(4)
    for word in words:
        assert word in str(caught.value)


def test_stages_without_a_pipeline_are_noted() -> None:
    parsed = parse_args([*MINIMAL, "--train-iters=100", "--compress", "dp-grad=powersgd,stages=first:2"])
    parsed.resolve(2)
    assert any("stages=first:2 has no effect" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("---lr 0.1", ["unknown flag ---lr", "the nearest is --lr"]),
        ("--train-iters \u0661\u0660\u0660", ["--train-iters", "is not an integer"]),
        ("--lr \uff11", ["--lr", "is not a number"]),
        ("--lr 1e308", ["--lr", "at most 10000"]),
        ("--lr 1e-400", ["--lr", "'1e-400' is so small that it would be 0"]),
        ("--lr 1e-60", ["--lr is 1e-60", "single precision"]),
        (f"--seed {2**200}", ["--seed", "too large"]),
        ("--seed=-1", ["--seed is -1", "at least 0"]),
        ("--seed 4294967296", ["--seed", "at most 4_294_967_295"]),
        ("--local-rank 1_000_000_000", ["--local-rank"]),
        ("--distributed-timeout-minutes 1e30", ["--distributed-timeout-minutes", "at most"]),
        ("--num-layers 1_000_000_000", ["--num-layers", "at most 2_048"]),
        ("--global-batch-size 1_000_000_000", ["--global-batch-size", "at most 1_048_576"]),
        ("--global-batch-size 1_000_000 --micro-batch-size 1", ["--global-batch-size", "micro-batches", "--micro-bat"]),
        ("--eval-iters 1_000_000_000", ["--eval-iters", "at most 1_000_000"]),
        ("--train-iters 1_000_000_000_000_000_000", ["--train-iters", "at most 1_000_000_000"]),
        ("--swiglu --no-swiglu", ["unknown flag --no-swiglu"]),
    ],
)
def test_invalid_flags_are_refused(line: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_args([*MINIMAL, "--train-iters=100", *line.split()]).resolve(1)
    for word in words:
        assert word in str(caught.value)


OPPOSITES = [flag for flag in FLAGS if f"no-{flag}" in FLAGS]


@pytest.mark.parametrize("flag", OPPOSITES)
def test_a_switch_and_its_opposite_contradict(flag: str) -> None:
    for first, second in ((flag, f"no-{flag}"), (f"no-{flag}", flag)):
        message = _within(lambda words=[f"--{first}", f"--{second}"]: PARSER.parse(words, check=False))  # type: ignore[misc]
        assert message is not None


def test_the_last_of_a_repeated_flag_counts_with_a_note() -> None:
    parsed = parse_args(["--lr", "0.1", "--seed", "3", "--lr", "0.2", "--seed", "3", "--lr=0.3"])
    assert parsed.config.optimizer.lr == 0.3
    assert parsed.notes == ["--lr is given more than once; the last one counts"]
    assert parse_args(["--compress", "a=b", "--compress", "c=d"]).notes == []
    assert (
        "--batch-size is given more than once; the last one counts"
        in PARSER.parse(["--batch-size", "1", "--batch-size", "2"], check=False).notes
    )
