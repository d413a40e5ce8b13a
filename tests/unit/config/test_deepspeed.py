"""Flags and files of Megatron-DeepSpeed: translations and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.config.flags import ParsedRun, parse_args

BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 0.001 --vocab-size 100"


def _parsed(folder: Path, content: Any, flags: str = "--micro-batch-size 2") -> ParsedRun:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_args([*BASE.split(), "--train-iters", "9", *flags.split(), "--deepspeed_config", str(path)])


def test_all_supported_keys_of_a_file_are_translated(tmp_path: Path) -> None:
    content = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "fp16": {
            "enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 7,
            "hysteresis": 3, "min_loss_scale": 2,
        },
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 3e9},
        "data_types": {"grad_accum_dtype": "fp32"},
        "elasticity": {"enabled": False},
        "steps_per_print": "auto",
        "activation_checkpointing": {"partition_activations": True},
    }  # fmt: skip
    run = _parsed(tmp_path, content, "")
    config = run.resolve(2)
    assert (config.training.global_batch_size, config.training.micro_batch_size) == (24, 4)
    assert config.optimizer.clip_grad == 0.5
    precision = config.precision
    assert (precision.fp16, precision.bf16, precision.loss_scale) == (True, False, None)
    assert (precision.initial_loss_scale, precision.loss_scale_window) == (4096, 7)
    assert (precision.hysteresis, precision.min_loss_scale) == (3, 2)
    assert config.parallel.use_distributed_optimizer
    assert config.parallel.accumulate_allreduce_grads_in_fp32
    assert run.notes[1].endswith(
        "no effect: bf16, zero_optimization.reduce_bucket_size, elasticity, activation_checkpointing"
    )


def test_a_constant_loss_scale_and_stage_0(tmp_path: Path) -> None:
    content = {"fp16": {"enabled": True, "loss_scale": 128}, "zero_optimization": {"stage": 0}}
    config = _parsed(tmp_path, content).resolve(2)
    assert config.precision.loss_scale == 128
    assert not config.parallel.use_distributed_optimizer


def _grown(**changes: Any) -> dict[str, Any]:
    """A curriculum with some keys changed or, for None, left out."""
    keys = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 16,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 50, "difficulty_step": 8},
        **changes,
    }
    return {"curriculum_learning": {name: value for name, value in keys.items() if value is not None}}


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, "--curriculum-seqlen-min 16 --curriculum-seqlen-steps 50"),
        ({"schedule_config": {"total_step": 50, "difficulty_step": 8}},
         "--curriculum-seqlen-min 16 --curriculum-seqlen-steps 50"),
        (
            {
                "schedule_type": "fixed_root",
                "schedule_config": {"total_curriculum_step": 50, "difficulty_step": 16, "root_degree": 3},
            },
            "--curriculum-type fixed_root --curriculum-root-degree 3 --curriculum-seqlen-min 16 "
            "--curriculum-seqlen-step 16 --curriculum-seqlen-steps 50",
        ),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 16, 32], "max_step": [3, 9]}},
         "--curriculum-type fixed_discrete --curriculum-discrete-seqlens 8 16 32 --curriculum-discrete-steps 3 9"),
    ],
)  # fmt: skip
def test_a_curriculum_of_a_file_is_that_of_the_flags(tmp_path: Path, changes: dict[str, Any], flags: str) -> None:
    base = "--micro-batch-size 2"
    config = _parsed(tmp_path, _grown(**changes), base).resolve(1)
    expected = parse_args(f"{BASE} --train-iters 9 {base} --curriculum-learning {flags}".split()).resolve(1)
    assert config == expected


def test_a_custom_curriculum_of_a_file_needs_a_function(tmp_path: Path) -> None:
    content = _grown(schedule_type="custom", schedule_config=None)
    with pytest.raises(UserError, match="custom needs --curriculum-function and --curriculum-seqlen-steps"):
        _parsed(tmp_path, content, "--micro-batch-size 2").resolve(1)


def test_a_curriculum_that_is_off_has_no_effect(tmp_path: Path) -> None:
    config = _parsed(tmp_path, _grown(enabled=False), "--micro-batch-size 2").resolve(1)
    assert not config.curriculum.curriculum_learning


def test_a_flag_may_repeat_a_value_of_the_file(tmp_path: Path) -> None:
    content = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    flags = "--micro-batch-size 2 --global-batch-size 8 --bf16 --zero-stage 1 --use-distributed-optimizer"
    assert _parsed(tmp_path, content, flags).resolve(2).precision.bf16


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        ({"train_batch_size": 8}, "--global-batch-size 4", ["train_batch_size 8", "--global-batch-size 4"]),
        ({"train_micro_batch_size_per_gpu": 8}, "--micro-batch-size 4", ["--micro-batch-size 4", "contradict"]),
        ({"train_batch_size": 0}, "", ["train_batch_size is 0", "at least 1"]),
        ({"train_batch_size": True}, "", ["train_batch_size: true is not an integer"]),
        ({"gradient_accumulation_steps": 2}, "", ["gradient_accumulation_steps 2", "needs both batch sizes"]),
        ({"gradient_accumulation_steps": 3, "train_batch_size": 8}, "--micro-batch-size 2",
         ["gradient_accumulation_steps 3", "global batch of 8"]),
        ({"gradient_clipping": 0.5}, "--clip-grad 1.0", ["gradient_clipping 0.5", "--clip-grad 1.0"]),
        ({"gradient_clipping": "much"}, "", ["gradient_clipping: 'much' is not a number"]),
        ('{"gradient_clipping": 1e999}', "", ["gradient_clipping: inf is not a finite number"]),
        ('{"gradient_clipping": NaN}', "", ["gradient_clipping: nan is not a finite number"]),
        ({"bf16": {"enabled": True}}, "--fp16", ["bf16 and --fp16 exclude each other"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "", ["bf16 and --fp16 exclude each other"]),
        ({"fp16": {"enabled": False}}, "--fp16", ["fp16.enabled false and --fp16 contradict"]),
        ({"fp16": {"enabled": "yes"}}, "", ["fp16.enabled: 'yes' is neither true nor false"]),
        ({"fp16": {"enabled": True, "fancy": 1}}, "", ["fp16.fancy is not available"]),
        ({"fp16": {"enabled": True, "initial_scale_power": 4000}}, "", ["initial_scale_power is 4_000", "127"]),
        ({"fp16": 1}, "", ["fp16 must hold names and values"]),
        ({"zero_optimization": {"stage": 2}}, "", ["zero_optimization.stage 2", "stage 1"]),
        ({"zero_optimization": {"stage": 3}}, "", ["zero_optimization.stage 3"]),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {}}}, "", ["zero_optimization.offload_optimizer"]),
        ({"zero_optimization": {"stage": 0}}, "--zero-stage 1", ["stage 0", "--use-distributed-optimizer"]),
        ({"optimizer": {"type": "Adam"}}, "", ["optimizer: give --optimizer, --lr"]),
        ({"scheduler": {}}, "", ["scheduler: give --lr-decay-style"]),
        ({"curriculum_learning": {"enabled": True}}, "", ["curriculum_learning: curriculum_type is missing"]),
        ({"curriculum_learning": {}}, "", ["curriculum_learning: enabled is missing"]),
        ({"curriculum_learning": [1]}, "", ["curriculum_learning must hold names and values"]),
        (_grown(curriculum_type="vocab"), "", ["curriculum_learning: curriculum_type 'vocab' is not available"]),
        (_grown(max_difficulty=None), "", ["curriculum_learning: max_difficulty is missing"]),
        (_grown(min_difficulty=None), "", ["curriculum_learning: min_difficulty is missing"]),
        (_grown(min_difficulty=80), "", ["curriculum_learning: min_difficulty 80 is above max_difficulty 32"]),
        (_grown(min_difficulty=12), "", ["schedule_config.difficulty_step 8 does not divide min_difficulty 12"]),
        (_grown(schedule_type="fixed_square"), "", ["schedule_type: 'fixed_square' is not one of fixed_linear"]),
        (_grown(schedule_type=None), "", ["curriculum_learning: schedule_type is missing"]),
        (_grown(schedule_config=None), "", ["curriculum_learning: schedule_config is missing"]),
        (_grown(schedule_config={"difficulty_step": 8}), "", ["schedule_config: total_curriculum_step is missing"]),
        (_grown(schedule_config={"difficulty_step": 8, "total_curriculum_step": 0}), "",
         ["schedule_config: total_curriculum_step is 0", "at least 1"]),
        (_grown(schedule_type="fixed_root"), "", ["schedule_config: root_degree is missing"]),
        (_grown(schedule_type="fixed_discrete", schedule_config={"difficulty": [16, 8, 32], "max_step": [1, 2]}), "",
         ["schedule_config.difficulty decreases, from 16 to 8"]),
        (_grown(schedule_type="fixed_discrete", schedule_config={"difficulty": [], "max_step": []}), "",
         ["schedule_config.difficulty holds 0 lengths", "one step less"]),
        (_grown(schedule_type="fixed_discrete", schedule_config={"difficulty": [16, 32], "max_step": 3}), "",
         ["schedule_config: max_step: expected a list"]),
        (_grown(metric="seqlen"), "", ["curriculum_learning: metric is not available"]),
        (_grown(), "--seq-length 128", ["curriculum_learning.max_difficulty 32 and --seq-length 128 contradict"]),
        (_grown(), "--curriculum-seqlen-min 8", ["min_difficulty 16 and --curriculum-seqlen-min 8 contradict"]),
        ({"data_efficiency": {"enabled": True}}, "", ["data_efficiency: of these, only growing sequences"]),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "", ["grad_accum_dtype bf16", "use fp32"]),
        ({"whatever": 1}, "", ["whatever: is not available; remove it from the file"]),
        ("[]", "", ["expected names and values, not a list"]),
        ('{"fp16": {}, "fp16": {}}', "", ["'fp16' is given twice"]),
        ("{", "", ["is not valid JSON"]),
        ("[" * 100_000, "", ["nested too deeply"]),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "", ["is not valid JSON"]),
        ("x" * (1 << 21), "", ["is larger than"]),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_that_names_file_and_key(
    tmp_path: Path, content: Any, flags: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        _parsed(tmp_path, content, flags)
    message = str(caught.value)
    assert message.startswith(f"--deepspeed-config {tmp_path / 'ds.json'}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_micro_batch_of_0_beside_a_file_is_refused(tmp_path: Path) -> None:
    run = _parsed(tmp_path, {"gradient_accumulation_steps": 2}, "--micro-batch-size 0 --global-batch-size 8")
    with pytest.raises(UserError, match=r"^--micro-batch-size is 0; it must be at least 1"):
        run.resolve(2)


def test_a_path_that_is_not_a_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "is not a regular file"), ("nowhere", "cannot be read"), (".", "cannot be read")):
        with pytest.raises(UserError, match=reason):
            parse_args(["--deepspeed-config", str(tmp_path / name)])


_KEYS = [
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16",
    "bf16", "zero_optimization", "data_types", "optimizer", "steps_per_print", "enabled", "stage", "loss_scale",
    "initial_scale_power", "hysteresis", "grad_accum_dtype",
]  # fmt: skip
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "", "fp32"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(content=st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4))
def test_any_file_is_accepted_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    message = ""
    try:
        _parsed(folder, content).resolve(1)
    except UserError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(("stage", "sharded"), [("0", False), ("1", True), ("1.0", True)])
def test_zero_stage_1_shards_the_optimizer(stage: str, sharded: bool) -> None:
    words = f"{BASE} --train-iters 9 --micro-batch-size 2 --zero-stage {stage}"
    run = parse_args(words.split())
    assert run.resolve(2).parallel.use_distributed_optimizer is sharded


@pytest.mark.parametrize("flags", ["--zero-stage 2", "--zero-stage 3", "--zero-stage 0.5", "--zero-stage -1"])
def test_other_zero_stages_and_contradictions_are_refused(flags: str) -> None:
    with pytest.raises(UserError, match="--zero-stage"):
        parse_args(flags.replace(" -", "=-").split())
    with pytest.raises(UserError, match="--zero-stage 0 and --use-distributed-optimizer contradict"):
        parse_args(["--zero-stage", "0", "--use-distributed-optimizer"])


@pytest.mark.parametrize("tag", ["global_step12", "iter_0000012", "12"])
def test_a_tag_names_an_iteration(tag: str) -> None:
    assert parse_args(["--load", "x", "--load-tag", tag]).config.checkpoint.ckpt_step == 12


def test_a_tag_without_an_iteration_is_refused() -> None:
    for tag in ("latest", "global_step", "global_step-1", "global_step" + "9" * 30):
        with pytest.raises(UserError, match=r"--load-tag .*: expected global_stepN; or use --ckpt-step N"):
            parse_args(["--load", "x", f"--load-tag={tag}"])
    with pytest.raises(UserError, match="--load-tag: the value is empty"):
        parse_args(["--load", "x", "--load-tag="])
    with pytest.raises(UserError, match="--load-tag needs --load FOLDER"):
        parse_args(["--load-tag", "global_step3"])
    with pytest.raises(UserError, match="--load-tag global_step3 and --ckpt-step 4 contradict each other"):
        parse_args(["--load", "x", "--load-tag", "global_step3", "--ckpt-step", "4"])


def test_flags_win_over_translated_flags_in_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("zero_stage: 1\nbatch_size: 4\nload_tag: global_step3\nload: x\n")
    words = ["--config", str(tmp_path / "run.yaml")]
    config = parse_args([*words, "--micro-batch-size", "2", "--ckpt-step", "5"]).config
    assert (config.training.micro_batch_size, config.checkpoint.ckpt_step) == (2, 5)
    assert config.parallel.use_distributed_optimizer is True
    assert parse_args(words).config.training.micro_batch_size == 4
