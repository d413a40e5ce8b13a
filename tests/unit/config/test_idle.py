"""Every flag acts, is noted, or is refused: all of them alone, and each beside what it depends on."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest

from megatron.base.option import FieldOption, field_options
from megatron.config import UserError, build_run_parser
from megatron.config.flags import read_run
from megatron.config.idle import RULES
from megatron.config.run import run_sections
from megatron.config.translate.legacy import NEEDS, LegacyConfig
from megatron.config.translate.rules import SWITCH, KnownFlag, Shortcut

HERE = Path(__file__).parent
PARSER = build_run_parser()
_BASE = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 0.001
    --vocab-size 100 --train-iters 100
"""
BASE = _BASE.split()

# Values that a rule by type would not find.
VALUES = {
    "expert_tensor_parallel_size": "1",
    "position_buckets": "8",
    "conv_kernel_size": "3",
    "train_iters": "50",
    "hidden_size": "128",
    "micro_batch_size": "4",
    "global_batch_size": "8",
    "rampup_batch_size": "2 2 100",
    "step_batch_size_schedule": "0:2,320:4",
    "split": "8,1,1",
    "compress": "dp-grad=powersgd",
    "num_attention_heads": "8",
    "num_query_groups": "2",
    "max_position_embeddings": "64",
    "lr_decay_tokens": "640",
    "lr_warmup_init": "0.0001",
    "iterations_to_skip": "7-9",
    "load_tag": "global_step3",
    "forward_scale_dims": "(0,1,2)",
    "backward_scale_dims": "(0,1,2)",
    "rotary_percent": "0.5",
    "loss_scale": "2",
    "initial_loss_scale": "16",
    "train_samples": "6400",
    "train_tokens": "6400",
    "zero_stage": "1",
    "task_name": "wikitext",
    "min_lr": "0.0001",
    "decoupled_min_lr": "0.0001",
    "profile_step_start": "11",
    "weight_decay": "0.1",
    "lr_warmup_iters": "3",
    "peer_timeout_seconds": "30",
    "islands_timeout_seconds": "30",
    "islands_linger_seconds": "30",
    "seq_length": "16",
    "decoder_seq_length": "8",
    "pipeline_model_parallel_split_rank": "1",
    "ckpt_step": "3",
    "do_evaluation": "false",
    "stable_topk_warmup_method": "Dense",
    "curriculum_seqlen_min": "16",
    "curriculum_seqlen_step": "16",
    "curriculum_discrete_seqlens": "8 32",
    "curriculum_discrete_steps": "7",
    "curriculum_root_degree": "3",
}
SHORTCUT_VALUES = {
    "position_buckets": "8",
    "conv_kernel_size": "3",
    "activations-checkpoint-method": "uniform",
    "model-parallel-size": "2",
    "warmup": "0.1",
    "embedding-dim": "128",
    "num-heads": "8",
    "warmup-steps": "5",
    "pp-mode": "gpipe",
    "rotary-seq-len-interpolation-factor": "2",
    "fp8-format": "hybrid",
}
MEANT = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--pipeline-group-size": "--pipeline-model-parallel-size",
}
"""Flags that messages call by the name of what they mean."""


def words_of(flag: str) -> list[str]:
    """The flag with a value that is not its default."""
    target = PARSER.table.by_flag(flag)
    if isinstance(target, KnownFlag):
        return [f"--{flag}"] if target.arity == SWITCH else [f"--{flag}", "7"]
    if isinstance(target, Shortcut):
        return [f"--{flag}", SHORTCUT_VALUES[target.name]] if target.takes_value else [f"--{flag}"]
    assert isinstance(target, FieldOption)
    return [f"--{flag}", *value_of(target).split()]


def value_of(field: FieldOption) -> str:
    if field.name in VALUES:
        return VALUES[field.name]
    if field.is_switch:
        return ""
    if field.name.endswith("comp_type"):
        return "PowerSGD"
    if field.choices:
        return next(choice for choice in field.choices if field.default not in (choice, [choice]))
    if field.element is int:
        step = -1 if field.option.maximum is not None and field.default == field.option.maximum else 1
        return str((field.default or 1) + step)
    if field.element is float:
        return "0.25"
    return "x"


def without(words: list[str], flag: str) -> list[str]:
    """The base without a flag that is given anew."""
    target = PARSER.table.by_flag(flag)
    kept = []
    for name, value in zip(BASE[::2], BASE[1::2], strict=True):
        theirs = PARSER.table.by_flag(name)
        sets = target.sets if isinstance(target, Shortcut) else {}
        if theirs is not target and (not isinstance(theirs, FieldOption) or theirs.path not in sets):
            kept += [name, value]
    return kept + words


def outcome(words: list[str], flag: str, world_size: int = 1) -> str:
    """What becomes of a flag: refused, noted, acts or silent."""
    target = PARSER.table.by_flag(flag)
    names = [f"--{flag}".lower()]
    names.append(MEANT.get(names[0], names[0]))
    fields = [target] if isinstance(target, FieldOption) else []
    if isinstance(target, Shortcut):
        fields = [PARSER.table.fields[path] for path in target.sets]
    names += [f"--{one}".lower() for field in fields for one in field.flags]
    try:
        run = read_run(PARSER, words)
        config = run.resolve(world_size)
    except UserError as error:
        named = any(name in str(error).lower() for name in names)
        return "refused" if named else f"refused, but not by name: {error}"
    if any(name in note.lower() for note in run.notes for name in names):
        return "noted"
    return "acts" if config.to_dict() != _base() else "silent"


@functools.cache
def _base() -> dict[str, Any]:
    return read_run(PARSER, BASE).resolve(1).to_dict()


@pytest.mark.slow
def test_every_flag_alone_acts_or_is_noted_or_refused() -> None:
    """What becomes of each is written down; one that is said to act must be read by a run without more."""
    lines = [f"--{flag} {outcome(without(words_of(flag), flag), flag)}" for flag in PARSER.table.all_flags()]
    assert [line for line in lines if line.endswith("silent") or "but not by name" in line] == []
    assert lines == (HERE / "flags_alone.txt").read_text(encoding="utf-8").splitlines()


PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 32"
RESUMED = "--load x"
CURRICULUM = "--curriculum-learning --curriculum-seqlen-min 16 --curriculum-seqlen-steps 9"
DISCRETE = (
    "--curriculum-learning --curriculum-type fixed_discrete --curriculum-discrete-seqlens 8 32 "
    "--curriculum-discrete-steps 9"
)
T5 = "--model-type t5 --decoder-seq-length 8 --tokenizer-type BertWordPieceCase --vocab-file v --vocab-extra-ids 4"
CAPACITY = "--moe-expert-capacity-factor 1.5"
EP2 = "--expert-model-parallel-size 2"
SHARED = "--moe-shared-expert-intermediate-size 32"
# What makes a rule's fields act, by the words of the rule: (flags, processes).
PARTNERS: dict[str, tuple[str, int]] = {
    "without --lr-decay-style WSD": ("--lr-decay-style WSD --lr-wsd-decay-iters 10", 1),
    "there is no warm-up (--lr-warmup-iters and the like)": ("--lr-warmup-iters 5", 1),
    "without --position-embedding-type rope": ("--position-embedding-type rope", 1),
    "no layer has experts (--num-experts)": (
        f"--num-experts 8 --moe-router-enable-expert-bias {CAPACITY} --moe-router-num-groups 2 "
        "--moe-router-group-topk 2",
        1,
    ),
    "no layer has experts (--num-experts), nor one beside them": (f"--num-experts 8 {SHARED}", 1),
    "beside --moe-router-load-balancing-type none": ("--num-experts 8", 1),
    "without --moe-router-enable-expert-bias": ("--num-experts 8 --moe-router-enable-expert-bias", 1),
    "beside --moe-router-topk 1, whose one weight is that of all experts anyway": ("--num-experts 8", 1),
    "no token is dropped": (f"--num-experts 8 {CAPACITY}", 1),
    "every replica holds all experts (--expert-model-parallel-size)": (f"--num-experts 8 {EP2}", 2),
    "there is one island": (
        "--islands 2 --island 0 --islands-address a:1 --distributed-backend gloo --compress outer=identity,every=1",
        1,
    ),
    "only BERT has that head": ("--model-type bert", 1),
    "beside a task, which masks no words": ("--model-type bert", 1),
    "beside a task, whose outputs are no words": ("--model-type gpt", 1),
    "only DeBERTa has distances and a convolution": ("--model-type deberta", 1),
    "only BERT and T5 mask words": ("--model-type bert", 1),
    "only T5 has a decoder beside an encoder": (f"{PP2} {T5}", 2),
    "T5's encoder and decoder share the one pipeline stage": (f"{PP2} {T5}", 2),
    "a sample of BERT or T5 does not go over the end of a document": ("", 1),
    "beside another activation or --disable-bias-linear": ("", 1),
    "GELU has its tanh form anyway, but with --no-bias-gelu-fusion or --disable-bias-linear": (
        "--disable-bias-linear",
        1,
    ),
    "beside --init-method-xavier-uniform": ("", 1),
    "there is one pipeline stage": (PP2, 2),
    "there is one tensor-parallel rank, or one pipeline stage": (f"{PP2} {TP2}", 4),
    "beside --sequence-parallel, under which a rank holds only a part of a message": (f"{PP2} {TP2}", 4),
    "there is one tensor-parallel rank": (TP2, 2),
    "there is one replica": ("", 2),
    "beside --DDP-impl torch, which has its own": ("--overlap-grad-reduce", 2),
    "this is fp32 anyway, but with --fp16 or --bf16": ("--fp16", 1),
    "there is one process": ("", 2),
    "layers are compiled by themselves only on CUDA, with one tensor-parallel rank": ("", 1),
    "without --curriculum-learning": (CURRICULUM, 1),
    "without --curriculum-learning by --curriculum-type fixed_root": (f"{CURRICULUM} --curriculum-type fixed_root", 1),
    "without --curriculum-learning by --curriculum-type fixed_discrete": (DISCRETE, 1),
    "without --curriculum-learning by --curriculum-type custom": ("", 1),
    "beside --curriculum-type fixed_discrete and custom, which have lengths of their own": (CURRICULUM, 1),
    "beside --curriculum-type fixed_discrete, which has steps of its own": (CURRICULUM, 1),
    "without --fp16": ("--fp16", 1),
    "beside a constant --loss-scale": ("--fp16", 1),
    "without --optimizer adam": ("", 1),
    "without --optimizer adam or muon": ("", 1),
    "without --optimizer muon": ("--optimizer muon", 1),
    "without --optimizer lamb": ("--optimizer lamb", 1),
    "without --optimizer sgd": ("--optimizer sgd", 1),
    "with --lr-decay-style constant": ("--decoupled-lr 0.1", 1),
    "beside --start-weight-decay and --end-weight-decay": ("", 1),
    "no schedule is loaded (--load without --finetune and --no-load-lr-state does that)": (RESUMED, 1),
    "nothing of it is loaded anyway (--load without --finetune does that)": (RESUMED, 1),
    "without --data-path or --mock-data": ("--data-path d", 1),
    "only --tokenizer-type GPT2BPETokenizer and BertWordPiece... read it": (
        "--tokenizer-type BertWordPieceCase",
        1,
    ),
    "only --tokenizer-type GPT2BPETokenizer reads it": ("--vocab-file v", 1),
    "only --tokenizer-type SentencePieceTokenizer and HFTokenizer read it": ("--tokenizer-type HFTokenizer", 1),
    "only --tokenizer-type SentencePieceTokenizer and BertWordPiece... have such tokens": (
        "--tokenizer-type BertWordPieceCase --vocab-file v",
        1,
    ),
    "--load goes on from the checkpoints of --save": ("--save s", 1),
    "without --tensorboard-dir, --wandb-project or --mlflow-experiment": ("--wandb-project p", 1),
    "without --tensorboard-dir": ("--tensorboard-dir t", 1),
    "without --wandb-project": ("--wandb-project p", 1),
    "without --timing-log-level above 0": ("--timing-log-level 1", 1),
    "without --log-gradients": ("--log-gradients --log-json-file j", 1),
    "without --profile-trace": ("--profile-trace p", 1),
    "nothing is evaluated during training": ("", 1),
    "--eval-iters 0 turns evaluation off": ("", 1),
    "there is no first step": ("", 1),
    "--full-validation reads all samples each time": ("", 1),
    "without a compressor of what goes forward": (f"{PP2} --compress pp-forward=fixpoint", 2),
}
BESIDE: dict[str, str] = {
    "beside a task, whose outputs are no words": "--task-head classification --task-classes 2",
    "beside a task, which masks no words": "--model-type bert --task-head classification --task-classes 2",
    "only T5 has a decoder beside an encoder": PP2,
    "T5's encoder and decoder share the one pipeline stage": T5,
    "a sample of BERT or T5 does not go over the end of a document": T5,
    "beside another activation or --disable-bias-linear": "--swiglu",
    "beside --init-method-xavier-uniform": "--init-method-xavier-uniform",
    "beside --moe-router-load-balancing-type none": "--num-experts 8 --moe-router-load-balancing-type none",
    "beside --moe-router-topk 1, whose one weight is that of all experts anyway": "--num-experts 8 --topk 1",
    "beside --DDP-impl torch, which has its own": "--DDP-impl torch",
    "beside a constant --loss-scale": "--fp16 --loss-scale 128",
    "without --optimizer adam": "--optimizer sgd",
    "with --lr-decay-style constant": "--lr-decay-style constant --decoupled-lr 0.1",
    "beside --start-weight-decay and --end-weight-decay": (
        "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2"
    ),
    "beside --curriculum-type fixed_discrete and custom, which have lengths of their own": DISCRETE,
    "beside --curriculum-type fixed_discrete, which has steps of its own": DISCRETE,
    "nothing is evaluated during training": "--skip-train",
    "--eval-iters 0 turns evaluation off": "--eval-iters 0",
    "there is no first step": "--skip-train",
    "--full-validation reads all samples each time": "--full-validation",
    "--load goes on from the checkpoints of --save": "--save s --load s",
}
"""What takes the ground from fields that act alone."""

OPTIONS = {field.path: field for section, cls in run_sections().items() for field in field_options(section, cls)}
PAIRS = [(rule.why, path) for rule in RULES for path in rule.fields]
# Refused with words of their own where the rule would hold, or in need of a file.
ELSEWHERE = {
    "optimizer.lr_decay_samples", "optimizer.lr_decay_tokens", "compression.compress_module",
    "optimizer.lr_wsd_decay_samples",
    "curriculum.curriculum_function",
}  # fmt: skip


def _notes_on(path: str, words: str, world_size: int) -> list[str]:
    flag = OPTIONS[path].flag.lower()
    given = without([*words_of(flag), *words.split()], flag)
    run = read_run(PARSER, given)
    run.resolve(world_size)
    return [note for note in run.notes if f"--{flag}" in note.lower() and "no effect" in note]


@pytest.mark.parametrize(("why", "path"), [pair for pair in PAIRS if pair[1] not in ELSEWHERE])
def test_beside_what_it_depends_on_a_flag_is_not_told_of(why: str, path: str) -> None:
    assert _notes_on(path, *PARTNERS[why]) == []


@pytest.mark.parametrize(("why", "path"), [pair for pair in PAIRS if pair[0] in BESIDE and pair[1] not in ELSEWHERE])
def test_beside_what_takes_its_ground_a_flag_is_told_of(why: str, path: str) -> None:
    assert _notes_on(path, BESIDE[why], 2) != []


def test_every_setting_is_read_by_some_engine() -> None:
    """A field that nothing outside this package looks at does nothing, and must say so."""
    read = set()
    for source in (HERE.parents[2] / "megatron").rglob("*.py"):
        inside = source.parent.name == "config" and source.name.startswith(("check_", "resolve", "idle"))
        if not inside:
            tree = ast.parse(source.read_text(encoding="utf-8"))
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # The number of layers of a chunk is turned into the number of chunks.
    turned = {"num_layers_per_virtual_pipeline_stage"}
    unread = {field.name for field in OPTIONS.values() if field.name not in read and not field.option.no_effect}
    assert unread - turned == set()


def test_layers_that_are_not_compiled_anyway_need_no_flag() -> None:
    assert _notes_of("--compile off", 1) == [
        "--compile: no effect, layers are compiled by themselves only on CUDA, with one tensor-parallel rank"
    ]
    assert _notes_of("--compile on", 1) == []


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ("", "no layer has experts (--num-experts)"),
        ("--num-experts 8", "every replica holds all experts (--expert-model-parallel-size)"),
    ],
)
def test_codecs_of_experts_are_told_of_where_no_rows_travel(words: str, idle: str) -> None:
    spec = "ep-dispatch-forward=fixpoint"
    assert _notes_of(f"--compress {spec} {words}", 2, "--compress") == [f"--compress {spec}: no effect, {idle}"]


def _notes_of(words: str, world_size: int, about: str = "--compile") -> list[str]:
    run = read_run(PARSER, [*BASE, *words.split()])
    run.resolve(world_size)
    return [note for note in run.notes if about in note]


def test_flags_that_repeat_a_default_ask_for_nothing() -> None:
    run = read_run(PARSER, [*BASE, *["--hysteresis", "2", "--sgd-momentum", "0.9", "--adam-beta1", "0.9"]])
    run.resolve(1)
    assert run.notes == []


def test_a_saved_configuration_is_read_back_without_a_note(tmp_path: Path) -> None:
    saved = tmp_path / "run.yaml"
    saved.write_text(read_run(PARSER, BASE).resolve(1).to_yaml())
    run = read_run(PARSER, ["--config", str(saved)])
    run.resolve(1)
    assert run.notes == []


# The old compression flags: what each needs.
_STABLE = "--grad_comp --grad_comp_type stable-topk"
_CLASSIC = "--grad_comp --grad_comp_type topk"
NEEDED: dict[str, str] = {
    "save_json_path": "--save_json_log",
    "experiment_name": "--save_json_log",
    "comp_seed": "--mp_acti_comp",
    "use_error_feedback": "--inter_grad_comp",
    "density": _CLASSIC,
    "stable_topk_interval": _STABLE,
    "stable_topk_threshold": _CLASSIC,
    "stable_topk_warmup_method": _STABLE,
    "stable_topk_range": _STABLE,
    "stable_topk_density_warmup_steps": _CLASSIC,
    "selective_grad_comp": "--grad_comp",
    "selective_grad_comp_way": "--grad_comp --selective_grad_comp",
    "max_activation_cache_size": "--forward-compress-method delta",
    "warmup_epochs": "--backward-compress-method fixpoint",
    "dp_bits": "--dp-mode sharded_ps_compressed",
    "log_gradients_output_dir": "--log_gradients",
    "emb_use_error_feedback": "--emb_grad_comp",
    **{name: "--" + name.rpartition("_type")[0] for name in NEEDS if name.endswith("comp_type")},
    **{name: "--" + name.rpartition("_rank")[0] for name in NEEDS if name.endswith("comp_rank")},
    **{name: "--" + name.rpartition("_warm_up")[0] for name in NEEDS if name.endswith("comp_warm_up")},
    "inter_grad_comp_epilogue_only": "--inter_grad_comp",
    **{name: "--forward-compress-method fixpoint" for name in NEEDS if name.startswith(("forward_bits", "forward_s"))},
    **{name: "--backward-compress-method fixpoint" for name in NEEDS if name.startswith(("backward_",))},
    "forward_bits_act": "--forward-compress-method delta-lowbits",
}


def _old_notes(words: list[str], name: str) -> list[str]:
    notes = read_run(PARSER, [*BASE, *words]).notes
    return [note for note in notes if note.startswith(f"--{name.replace('_', '-')}: no effect without ")]


@pytest.mark.parametrize("name", NEEDS)
def test_an_old_flag_acts_beside_what_it_needs_and_is_told_of_alone(name: str) -> None:
    words = words_of(name.replace("_", "-"))
    assert _old_notes(words, name) == [f"--{name.replace('_', '-')}: no effect without {NEEDS[name]}"]
    assert _old_notes([*words, *NEEDED[name].split()], name) == []


def test_old_flags_need_something_or_act_by_themselves() -> None:
    alone = {
        "grad_comp", "inter_grad_comp", "inter_acti_comp", "emb_comm_opt", "emb_grad_comp", "mp_grad_comp",
        "mp_acti_comp", "forward_compress_method", "backward_compress_method", "dp_mode", "save_json_log",
        "collect_log_path",
    }  # fmt: skip
    fields = list(field_options("legacy", LegacyConfig))
    assert {field.name for field in fields if not field.option.no_effect} == alone | set(NEEDS)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (f"{_STABLE} --use_error_feedback", "use_error_feedback"),
        (f"{_STABLE} --grad_comp_rank 8", "grad_comp_rank"),
        (f"{_STABLE} --comp_seed 8", "comp_seed"),
        (f"{_STABLE} --stable_topk_density_warmup_steps 9", "stable_topk_density_warmup_steps"),
        (f"{_STABLE} --stable_topk_threshold 0 --stable_topk_warmup_method Dense", "stable_topk_warmup_method"),
        (f"{_CLASSIC} --grad_comp_warm_up 0.3", "grad_comp_warm_up"),
        (f"{_CLASSIC} --stable_topk_range 3", "stable_topk_range"),
        (f"{_CLASSIC} --stable_topk_interval 3", "stable_topk_interval"),
        ("--grad_comp --density 0.3", "density"),
        ("--grad_comp --selective_grad_comp_way 1", "selective_grad_comp_way"),
        ("--emb_grad_comp --emb_grad_comp_type stable-topk --emb_use_error_feedback", "emb_use_error_feedback"),
        ("--emb_grad_comp --emb_grad_comp_type stable-topk --emb_grad_comp_warm_up 0.2", "emb_grad_comp_warm_up"),
        ("--mp_grad_comp --use_error_feedback", "use_error_feedback"),
        ("--emb_grad_comp --use_error_feedback", "use_error_feedback"),
        ("--forward-compress-method fixpoint --forward-bits-act 2", "forward_bits_act"),
        ("--forward-compress-method fixpoint --max-activation-cache-size 9", "max_activation_cache_size"),
        ("--backward-compress-method fixpoint --forward-bits 2", "forward_bits"),
        ("--dp-mode allreduce --dp-bits 2", "dp_bits"),
        ("--dp-mode sharded_ps --warmup-epochs 2", "warmup_epochs"),
        ("--log-json-file j --experiment_name e", "experiment_name"),
    ],
)
def test_an_old_flag_beside_a_type_that_it_does_not_belong_to_is_told_of(words: str, name: str) -> None:
    assert len(_old_notes(words.split(), name)) == 1
