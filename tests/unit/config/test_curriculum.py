"""Growing sequence lengths: formulas, sizes of coming steps, and refusals."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.config.batch_size import BatchSizeSchedule
from megatron.config.curriculum import CurriculumConfig, lengths_of
from megatron.config.flags import parse_args
from megatron.config.lengths import LengthSchedule
from megatron.config.run import RunConfig
from megatron.config.steps import StepSizes

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --lr 0.001 "
    "--vocab-size 100"
)
LINEAR = "--curriculum-learning --curriculum-seqlen-min 16 --curriculum-seqlen-step 8 --curriculum-seqlen-steps 100"


def curriculum(kind: str, **fields: Any) -> CurriculumConfig:
    named = {f"curriculum_{name}": value for name, value in fields.items()}
    return CurriculumConfig(curriculum_learning=True, curriculum_type=kind, **named)  # type: ignore[arg-type]


def resolved(flags: str, world_size: int = 1) -> RunConfig:
    return parse_args(f"{BASE} {flags}".split()).resolve(world_size)


DEEPSPEED = {
    "fixed_linear": {1: 64, 4: 64, 5: 72, 8: 72, 9: 80, 100: 256, 333: 720, 501: 1056, 997: 2040, 999: 2040,
                     1000: 2048},
    "fixed_root": {1: 120, 4: 184, 5: 200, 8: 240, 9: 248, 100: 688, 333: 1208, 501: 1464, 997: 2040, 1000: 2048},
}  # fmt: skip
"""Lengths of some steps by DeepSpeed 0.16.2's scheduler: from 64 to 2048 in 1000 steps, multiples of 8."""


@pytest.mark.parametrize("kind", DEEPSPEED)
def test_lengths_are_those_of_deepspeed(kind: str) -> None:
    expected = DEEPSPEED[kind]
    lengths = lengths_of(curriculum(kind, seqlen_min=64, seqlen_step=8, seqlen_steps=1000), 2048)
    assert {step: lengths.at(step - 1) for step in expected} == expected


@pytest.mark.parametrize("kind", ["fixed_linear", "fixed_root", "fixed_discrete"])
def test_all_lengths_are_those_of_an_installed_deepspeed(kind: str) -> None:
    module = pytest.importorskip("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    config: dict[str, Any] = {"total_curriculum_step": 777, "difficulty_step": 8, "root_degree": 3}
    if kind == "fixed_discrete":
        config = {"difficulty": [64, 128, 512], "max_step": [5, 300]}
    theirs = module.CurriculumScheduler(
        {"min_difficulty": 64, "max_difficulty": 512, "schedule_type": kind, "schedule_config": config}
    )
    fields: dict[str, Any] = {"seqlen_min": 64, "seqlen_step": 8, "seqlen_steps": 777, "root_degree": 3.0}
    if kind == "fixed_discrete":
        fields = {"discrete_seqlens": [64, 128, 512], "discrete_steps": [5, 300]}
    ours = lengths_of(curriculum(kind, **fields), 512)
    assert [ours.at(step - 1) for step in range(1, 1000)] == [theirs.update_difficulty(step) for step in range(1, 1000)]


@given(st.integers(1, 6), st.integers(0, 30), st.integers(1, 400))
def test_linear_lengths_match_exact_arithmetic(least: int, increments: int, steps: int) -> None:
    multiple = 8
    low, full = least * multiple, (least + increments) * multiple
    fields = {"seqlen_min": low, "seqlen_step": multiple, "seqlen_steps": steps}
    lengths = lengths_of(curriculum("fixed_linear", **fields), full)
    for step in (*range(1, min(steps, 40) + 1), steps, steps + 1, 10 * steps):
        share = min(Fraction(step, steps), Fraction(1))
        exact = low + (full - low) * share
        length = lengths.at(step - 1)
        # Where the exact length is an integer, rounding of the quotient may delay it by a step.
        allowed = {
            math.floor(exact) // multiple * multiple,
            math.floor(exact - Fraction(1, 10**6)) // multiple * multiple,
        }
        assert length in allowed | {low}
        assert low <= length <= full
    assert lengths.at(steps) == full


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_a_growing_schedule_is_the_table_of_its_function(growths: list[int]) -> None:
    values = [sum(growths[: k + 1]) // 3 + 1 for k in range(len(growths))]
    lengths = LengthSchedule.growing(lambda step: values[step - 1], len(values), values[-1] + 1)
    assert [lengths.at(k) for k in range(len(values))] == values
    assert lengths.at(len(values)) == lengths.full == values[-1] + 1
    for k in range(len(values)):
        until = lengths.until(k)
        assert until is not None
        assert lengths.at(until) > lengths.at(until - 1) == lengths.at(k)
    assert lengths.until(len(values)) is None


ramps = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 5), st.integers(0, 60))
schedules = st.lists(st.integers(1, 8), min_size=1, max_size=5, unique=True).map(sorted)


@given(ramps, schedules, st.integers(1, 12), st.integers(0, 2000), st.integers(0, 25))
def test_coming_steps_match_a_reference_loop(
    ramp: tuple[int, int, int, int], growing: list[int], every: int, tokens: int, start_step: int
) -> None:
    start, increment, increments, samples = ramp
    batches = BatchSizeSchedule(
        start + increments * increment, micro_batch_size=1, dp_size=1, rampup=(start, increment, samples)
    )
    sizes = StepSizes(batches, LengthSchedule(tuple(growing), tuple(every * k for k in range(len(growing)))))
    consumed = 0
    for _ in range(start_step):
        consumed += batches.at(consumed)
    step, samples_so_far, remaining_tokens, trained = start_step, consumed, tokens, 0
    while batches.at(samples_so_far) * sizes.lengths.at(step) <= remaining_tokens:
        remaining_tokens -= batches.at(samples_so_far) * sizes.lengths.at(step)
        trained += batches.at(samples_so_far) * sizes.lengths.at(step)
        step, samples_so_far = step + 1, samples_so_far + batches.at(samples_so_far)
    assert sizes.steps_within(tokens, start_step, consumed) == (step - start_step, samples_so_far - consumed)
    assert sizes.tokens_ahead(start_step, consumed, step - start_step) == trained
    stretches = list(sizes.ahead(start_step, consumed, step - start_step))
    assert sum(stretch.iterations for stretch in stretches) == step - start_step
    assert sum(stretch.samples for stretch in stretches) == samples_so_far - consumed


def test_a_run_of_growing_sequences_ends_by_its_actual_tokens() -> None:
    config = resolved(f"{LINEAR} --global-batch-size 4 --train-tokens 30000")
    lengths = lengths_of(config.curriculum, 64)
    steps, spent = 0, 0
    while spent + 4 * lengths.at(steps) <= 30000:
        spent += 4 * lengths.at(steps)
        steps += 1
    assert config.training.train_samples == 4 * steps
    assert steps > 30000 // 64 // 4
    again = config.resolve(1)
    assert again == config
    assert resolved("--global-batch-size 4 --train-tokens 30000").training.train_samples == 30000 // 64


def discrete(lengths: str, steps: str) -> str:
    flags = f"--curriculum-discrete-seqlens {lengths} --curriculum-discrete-steps {steps}"
    return f"--curriculum-learning --curriculum-type fixed_discrete {flags}"


def test_a_discrete_curriculum() -> None:
    lengths = lengths_of(resolved(f"{discrete('16 32 64', '3 5')} --train-iters 9").curriculum, 64)
    assert [lengths.at(k) for k in range(7)] == [16, 16, 16, 32, 32, 64, 64]


def custom(folder: Path, body: str, steps: int = 4) -> str:
    path = folder / "lengths.py"
    path.write_text(body)
    kind = f"--curriculum-learning --curriculum-type custom --curriculum-seqlen-steps {steps}"
    return f"{kind} --curriculum-function {path} --train-iters 9"


def test_a_custom_curriculum(tmp_path: Path) -> None:
    flags = custom(tmp_path, "def seqlen(step):\n    return 5 if step < 3 else 20\n")
    lengths = lengths_of(resolved(flags).curriculum, 64)
    assert [lengths.at(k) for k in range(6)] == [5, 5, 20, 20, 64, 64]


def test_a_custom_curriculum_may_define_dataclasses(tmp_path: Path) -> None:
    """Their annotations are looked up in the module."""
    head = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Step:\n    n: int\n"
    )
    flags = custom(tmp_path, head + "def seqlen(step):\n    return Step(7).n\n")
    assert lengths_of(resolved(flags).curriculum, 64).at(0) == 7


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def seqlen(step):\n    return 50 - step\n", ["decreases at step 2, from 49 to 48"]),
        ("def seqlen(step):\n    return 65\n", ["returns 65 for step 1", "--seq-length 64"]),
        ("def seqlen(step):\n    return 4.0\n", ["returns 4.0 for step 1", "an integer"]),
        ("def seqlen(step):\n    return 1 // (step - 2)\n", ["returns -1 for step 1"]),
        ("def seqlen(step):\n    return 9 if step < 3 else 1 / 0\n", ["fails at step 3: ZeroDivisionError"]),
        ("def other(step):\n    return 1\n", ["has no function seqlen(step)"]),
        ("def (\n", ["cannot be used: SyntaxError"]),
        ("raise SystemExit\n", ["cannot be used: SystemExit"]),
        ("def seqlen(step):\n    raise SystemExit(3)\n", ["fails at step 1: SystemExit: 3"]),
    ],
)
def test_all_lengths_of_a_custom_curriculum_are_checked_before_the_run(
    body: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        resolved(custom(tmp_path, body))
    message = str(caught.value)
    assert message.startswith(f"--curriculum-function {tmp_path / 'lengths.py'}")
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--curriculum-learning", ["--curriculum-learning", "--curriculum-seqlen-min and --curriculum-seqlen-steps"]),
        (LINEAR.replace("min 16", "min 72"), ["--curriculum-seqlen-min 72 is above --seq-length 64"]),
        (LINEAR.replace("min 16", "min 20"), ["--curriculum-seqlen-step 8 does not divide --curriculum-seqlen-min 20"]),
        (LINEAR.replace("step 8", "step 16 --seq-length 72"), ["-step 16 does not divide --seq-length 72"]),
        (discrete("8 32 16 64", "1 2 3"), ["--curriculum-discrete-seqlens decreases, from 32 to 16"]),
        (discrete("8 32 64", "9 9"), ["--curriculum-discrete-steps decreases, from 9 to 9"]),
        (discrete("8 32", "9"), ["--curriculum-discrete-seqlens ends with 32", "--seq-length 64"]),
        (discrete("8 64", "9 10"), ["2 lengths", "2 steps"]),
        (
            f"{LINEAR.replace('step 8', 'step 1')} --sequence-parallel --tensor-model-parallel-size 2 "
            "--make-vocab-size-divisible-by 32",
            ["--sequence-parallel", "17 tokens", "--tensor-model-parallel-size 2"],
        ),
        (
            "--curriculum-learning --curriculum-type custom --curriculum-seqlen-steps 9 --curriculum-function none.py",
            ["--curriculum-function none.py: there is no such file"],
        ),
    ],
)
def test_invalid_curricula_are_refused(flags: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolved(f"{flags} --train-iters 9", 2 if "parallel" in flags else 1)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train-tokens 60 --global-batch-size 4", ["--train-tokens 60", "shortest sequences"]),
        (
            "--train-samples 640 --lr-decay-tokens 900 --lr-warmup-samples 3",
            ["--lr-decay-tokens", "--lr-warmup-tokens"],
        ),
        ("--train-samples 640 --lr-warmup-tokens 90", ["--lr-warmup-tokens", "--lr-decay-tokens"]),
    ],
)
def test_lengths_in_tokens_are_not_mixed_with_samples(flags: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolved(f"{LINEAR} {flags}")
    assert all(word in str(caught.value) for word in words), caught.value


def test_flags_that_a_curriculum_does_not_read_are_noted() -> None:
    run = parse_args(f"{BASE} {LINEAR} --curriculum-root-degree 3 --train-iters 9".split())
    run.resolve(1)
    assert [note for note in run.notes if "--curriculum" in note] == [
        "--curriculum-root-degree: no effect without --curriculum-type fixed_root"
    ]
