"""Conditions of options: a note wherever an option has no effect, and only there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.base.option import Condition, FieldOption, field_options
from megatron.config.flags import parse_args
from megatron.config.run import run_sections

BASE = {
    "num-layers": "4", "hidden-size": "64", "num-attention-heads": "4", "seq-length": "32", "micro-batch-size": "2",
    "lr": "0.001", "vocab-size": "1000", "train-iters": "100",
}  # fmt: skip
VALUES = {
    "expert_tensor_parallel_size": "1", "position_buckets": "8", "conv_kernel_size": "3", "split": "8,1,1",
    "min_lr": "0.0001", "lr_warmup_init": "0.0001", "profile_step_start": "11",
    "weight_decay": "0.1", "peer_timeout_seconds": "30", "islands_timeout_seconds": "30", "initial_loss_scale": "16",
    "decoder_seq_length": "8", "curriculum_seqlen_min": "16", "curriculum_seqlen_step": "16",
    "curriculum_discrete_seqlens": "8 32", "curriculum_discrete_steps": "7", "curriculum_root_degree": "3",
    "pipeline_model_parallel_split_rank": "1", "compile": "off", "decoupled_min_lr": "0.0001 --decoupled-lr 0.1",
    "moe_shared_expert_gate": "true --moe-shared-expert-intermediate-size 32",
    "vocab_extra_ids": "4 --tokenizer-model m", "overwrite_checkpoints": "true --save s",
}  # fmt: skip
"""Values of flags that need a special value or further flags."""

DISCRETE = "--curriculum-discrete-seqlens 8 32 --curriculum-discrete-steps 9"
# Flags with which the condition of a reason holds, or fails, unless they follow from the words of the reason ("without
# FLAGS", "with FLAGS").
HOLDS = {
    "no layer has experts (--num-experts)": "--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 2",
    "no token is dropped": "--moe-expert-capacity-factor 1.5",
    "every replica holds all experts (--expert-model-parallel-size)": "--num-experts 8 --expert-model-parallel-size 2",
    "there is one island": (
        "--islands 2 --island 0 --islands-address a:1 --distributed-backend gloo --compress outer=identity,every=1"
    ),
    "only BERT and T5 mask words": "--model-type bert",
    "without --model-type t5": (
        "--model-type t5 --decoder-seq-length 8 --tokenizer-type BertWordPieceCase --vocab-file v --vocab-extra-ids 4"
    ),
    "GELU has its tanh form anyway, except with --no-bias-gelu-fusion or --disable-bias-linear": (
        "--disable-bias-linear"
    ),
    "there is one pipeline stage": "--pipeline-model-parallel-size 2",
    "there is one tensor-parallel rank": "--tensor-model-parallel-size 2",
    "this is fp32 anyway, except with --fp16 or --bf16": "--fp16",
    "without --curriculum-learning": "--curriculum-learning --curriculum-seqlen-min 16 --curriculum-seqlen-steps 9",
    "without --curriculum-type fixed_discrete": f"--curriculum-type fixed_discrete {DISCRETE}",
    "without --lr-decay-style WSD": "--lr-decay-style WSD --lr-wsd-decay-iters 10",
    "there is no warm-up (--lr-warmup-iters and the like)": "--lr-warmup-iters 5",
    "no schedule is loaded (--load without --finetune and --no-load-lr-state does that)": "--load x",
    "nothing of it is loaded anyway (--load without --finetune does that)": "--load x",
    "without --data-path or --mock-data": "--mock-data",
    "without --tokenizer-type GPT2BPETokenizer": "--vocab-file v",
    "without --tokenizer-type GPT2BPETokenizer, BertWordPieceLowerCase or BertWordPieceCase": (
        "--tokenizer-type BertWordPieceCase"
    ),
    "without --tensorboard-dir": "--tensorboard-dir t",
    "without --tensorboard-dir, --wandb-project or --mlflow-experiment": "--mlflow-experiment m",
    "without --wandb-project": "--wandb-project p",
    "without --profile-trace": "--profile-trace p",
    "without --timing-log-level": "--timing-log-level 1",
    "without --log-gradients": "--log-gradients --log-json-file j",
    "without a compressor of forward messages": "--pipeline-model-parallel-size 2 --compress pp-forward=fixpoint",
    "layers are compiled by themselves only on CUDA, with one tensor-parallel rank": "--compile on",
}
FAILS = {
    "with a task, whose outputs are not words": "--task-head classification --task-classes 2",
    "a sample of BERT or T5 does not cross the end of a document": "--model-type bert",
    "with another activation or --disable-bias-linear": "--swiglu",
    "with --DDP-impl torch, which has its own": "--DDP-impl torch",
    "with --loss-scale": "--loss-scale 128",
    "with --curriculum-type fixed_discrete": f"--curriculum-type fixed_discrete {DISCRETE}",
    "without --curriculum-type fixed_linear or fixed_root": f"--curriculum-type fixed_discrete {DISCRETE}",
    "without --optimizer adam": "--optimizer sgd",
    "without --optimizer adam or muon": "--optimizer sgd",
    "without --weight-decay-incr-style constant": (
        "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2"
    ),
    "--load goes on from the checkpoints of --save": "--load s",
}
REFUSED = {
    "lr_decay_samples", "lr_decay_tokens", "lr_wsd_decay_samples", "compress_module", "curriculum_function",
}  # fmt: skip
"""Fields that this run always refuses, or that need a file."""


def _flags_that_meet(condition: Condition) -> list[str]:
    reason = condition.otherwise
    derived = reason.partition("without ")[2].replace(",", " or").partition(" or ")[0]
    return HOLDS.get(reason, derived).split()


def _flags_that_miss(condition: Condition) -> list[str]:
    reason = condition.otherwise
    return FAILS.get(reason, reason.removeprefix("with ") if reason.startswith("with ") else "").split()


def _value(field: FieldOption) -> list[str]:
    """A value other than the default."""
    if field.name in VALUES:
        return VALUES[field.name].split()
    if field.is_switch:
        return []
    if field.choices:
        return [next(choice for choice in field.choices if field.default not in (choice, [choice]))]
    return [{int: str((field.default or 1) + 1), float: "0.25"}.get(field.element, "x")] if not field.is_list else ["1"]


def _notes(field: FieldOption, words: list[str], world_size: int) -> list[str]:
    base = [word for flag, value in BASE.items() if flag != field.flag for word in (f"--{flag}", value)]
    run = parse_args([*base, f"--{field.flag}", *_value(field), *words])
    run.resolve(world_size)
    return [note for note in run.notes if f"--{field.flag}" in note.partition(":")[0].split(", ")]


OPTIONS = [field for section, cls in run_sections().items() for field in field_options(section, cls)]
DECLARED = [
    pytest.param(field, number, id=f"{field.name} {number}")
    for field in OPTIONS
    for number in range(len(field.option.only_if) + 1)
    if field.option.only_if and field.name not in REFUSED
]


@pytest.mark.parametrize(("field", "met"), DECLARED)
def test_a_flag_is_noted_where_a_condition_does_not_hold(field: FieldOption, met: int) -> None:
    """With the first ``met`` conditions, the next condition is the reason; with all, there is no note."""
    conditions = field.option.only_if
    words = [word for condition in conditions[:met] for word in _flags_that_meet(condition)]
    single = met < len(conditions) and conditions[met].otherwise in ("there is one process", "there is one replica")
    if met == len(conditions):
        assert _notes(field, words, 4) == []
        return
    words += _flags_that_miss(conditions[met])
    (note,) = _notes(field, words, 1 if single else 4)
    assert note.partition("no effect")[2].lstrip(", ") == conditions[met].otherwise


def _attributes(node: ast.AST) -> Iterator[str]:
    """Attributes that are read outside of conditions of options."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Condition":
        return
    if isinstance(node, ast.Attribute):
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from _attributes(child)


def test_every_setting_is_read_by_some_engine() -> None:
    """A field that is not read outside this package must be declared without effect."""
    read: set[str] = set()
    for source in (Path(__file__).parents[3] / "megatron").rglob("*.py"):
        if not (source.parent.name == "config" and source.name.startswith(("check_", "resolve"))):
            read |= set(_attributes(ast.parse(source.read_text(encoding="utf-8"))))
    # Converted to the number of chunks.
    read.add("num_layers_per_virtual_pipeline_stage")
    assert [field.name for field in OPTIONS if field.name not in read and not field.option.no_effect] == []


def test_flags_that_repeat_a_default_are_not_noted() -> None:
    words = [word for flag, value in BASE.items() for word in (f"--{flag}", value)]
    run = parse_args([*words, "--hysteresis", "2", "--sgd-momentum", "0.9", "--adam-beta1", "0.9"])
    run.resolve(1)
    assert run.notes == []
