"""The command line of a run: spellings, aliases, shorthand, notes and mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.base.option import FieldOption
from megatron.base.user_text import spell
from megatron.config.flags import build_run_parser, parse_args
from megatron.config.run import RunConfig
from megatron.config.translate.known import read_known_flags
from megatron.config.translate.rules import SWITCH, VALUE, KnownFlag, Shortcut
from tools.pages.flags_of_others import LISTS

FOLDER = Path(__file__).parent
PARSER = build_run_parser()


def value_of(config: RunConfig, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize(
    "line",
    [
        "--tensor-model-parallel-size 4",
        "--tensor_model_parallel_size 4",
        "--tensor_model-parallel_size=4",
        "--Tensor-Model-Parallel-Size 4",
        "--model-parallel-size 4",
    ],
)
def test_hyphens_underscores_and_case_are_equivalent(line: str) -> None:
    assert parse_args(line.split()).config.parallel.tensor_model_parallel_size == 4


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("--num-key-value-heads 2", "model.num_query_groups", 2),
        ("--num-query-groups 2 --group-query-attention", "model.num_query_groups", 2),
        ("--encoder-num-layers 3", "model.num_layers", 3),
        ("--encoder-seq-length 9", "model.seq_length", 9),
        ("--layernorm-epsilon 1e-6", "model.norm_epsilon", 1e-6),
        ("--norm-epsilon 1e-6", "model.norm_epsilon", 1e-6),
        ("--normalization rmsnorm", "model.normalization", "RMSNorm"),
        ("--normalization LAYERNORM", "model.normalization", "LayerNorm"),
        ("--use-rotary-position-embeddings", "model.position_embedding_type", "rope"),
        ("--position-embedding-type rope", "model.position_embedding_type", "rope"),
        ("--no-position-embedding", "model.position_embedding_type", "none"),
        ("--use-rotary-position-embeddings --no-position-embedding", "model.position_embedding_type", "rope"),
        ("--position-embedding-type learned-absolute", "model.position_embedding_type", "learned_absolute"),
        ("--rotary-position-embeddings-theta 5e5", "model.rotary_base", 5e5),
        ("--use-rope-scaling", "model.rotary_scaling", "llama3"),
        ("--use-rope-scaling --rope-scaling-factor 4", "model.rotary_scaling_factor", 4.0),
        ("--rotary-seq-len-interpolation-factor 2", "model.rotary_scaling", "linear"),
        ("--rotary-seq-len-interpolation-factor 2", "model.rotary_scaling_factor", 2.0),
        ("--disable-bias-linear", "model.add_bias_linear", False),
        ("--disable-bias-linear false", "model.add_bias_linear", True),
        ("--no-bias-gelu-fusion", "model.bias_gelu_fusion", False),
        ("--swiglu=true", "model.swiglu", True),
        ("--DDP-impl torch", "parallel.ddp_impl", "torch"),
        ("--ddp_impl TORCH", "parallel.ddp_impl", "torch"),
        ("--enable-zbh1-pipeline", "parallel.pipeline_schedule", "zb-h1"),
        ("--local_rank=3", "parallel.local_rank", 3),
        ("--local-rank 3", "parallel.local_rank", 3),
        ("--recompute-activations", "recompute.recompute_granularity", "selective"),
        ("--checkpoint-activations", "recompute.recompute_granularity", "full"),
        ("--checkpoint-activations", "recompute.recompute_method", "uniform"),
        ("--activations-checkpoint-method block", "recompute.recompute_method", "block"),
        ("--activations-checkpoint-method block", "recompute.recompute_granularity", "full"),
        ("--activations-checkpoint-granularity selective", "recompute.recompute_granularity", "selective"),
        ("--checkpoint-num-layers 2", "recompute.recompute_num_layers", 2),
        ("--batch-size 8", "training.micro_batch_size", 8),
        ("--train-samples 300_000_000", "training.train_samples", 300_000_000),
        ("--rampup-batch-size 16 16 5_859_375", "training.rampup_batch_size", [16, 16, 5859375]),
        ("--warmup 0.01", "optimizer.lr_warmup_fraction", 0.01),
        ("--lr-decay-style inverse_square_root", "optimizer.lr_decay_style", "inverse-square-root"),
        ("--override-opt_param-scheduler", "optimizer.override_opt_param_scheduler", True),
        ("--vocab v.json", "tokenizer.vocab_file", "v.json"),
        ("--tokenizer-type gpt2bpetokenizer", "tokenizer.tokenizer_type", "GPT2BPETokenizer"),
        ("--data-path 0.3 a 0.7 b", "data.data_path", ["0.3", "a", "0.7", "b"]),
        ("--log_txt_file log.txt", "logging.log_txt_file", "log.txt"),
        ("--no-log-learnig-rate-to-tensorboard", "logging.log_learning_rate_to_tensorboard", False),
        ("--no-save-optim", "checkpoint.no_save_optim", True),
        ("--compress dp-grad=none --compress none", "compression.compress", ["dp-grad=none", "none"]),
        ("--seed 1 --seed 2", "training.seed", 2),
        ("--recompute-activations --recompute-granularity selective", "recompute.recompute_method", None),
    ],
)  # fmt: skip
def test_all_spellings_of_flags_and_values(line: str, path: str, value: object) -> None:
    parsed = parse_args(line.split())
    assert value_of(parsed.config, path) == value
    if value_of(RunConfig(), path) != value:
        assert path in parsed.explicit


def test_an_empty_command_line_gives_the_defaults() -> None:
    parsed = parse_args([])
    assert parsed.config == RunConfig()
    assert parsed.explicit == set()
    assert parsed.notes == []


def test_fields_of_flags_are_told_from_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("parallel: {pipeline_schedule: 1f1b}\n")
    parsed = parse_args(["--config", str(path), "--overlap-grad-reduce", "false", "--pp-mode", "gpipe"])
    assert parsed.explicit == {"parallel.pipeline_schedule", "parallel.overlap_grad_reduce"}
    assert parsed.flag_fields == parsed.explicit
    assert parse_args(["--config", str(path)]).flag_fields == set()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tensor-model-paralel-size 2", ["--tensor-model-paralel-size", "--tensor-model-parallel-size"]),
        ("--tensor-model-parallel 2", ["unknown flag", "--tensor-model-parallel-size"]),
        ("--num-layer 2", ["--num-layer;", "nearest is --num-layers"]),
        ("--conf x.yaml", ["nearest is --config"]),
        ("--xyzzyxyzzy", ["unknown flag --xyzzyxyzzy"]),
        ("--num-layers two", ["--num-layers", "'two' is not an integer"]),
        ("--num-layers 1.5", ["--num-layers", "'1.5' is not an integer"]),
        ("--lr high", ["--lr", "not a number"]),
        ("--fp16 perhaps", ["--fp16", "neither true nor false"]),
        ("--rampup-batch-size 1 2", ["--rampup-batch-size", "expected 3"]),
        ("--DDP-impl FSDP", ["--ddp-impl", "local, torch"]),
        ("--data-path", ["--data-path", "expected at least one"]),
        ("pretrain", ["pretrain"]),
        ("--config a.yaml --config b.yaml", ["--config is given 2 times"]),
        ("--vocab a --vocab-file b", ["--vocab", "--vocab-file", "contradict"]),
        ("--batch-size 1 --micro-batch-size 2", ["--batch-size", "--micro-batch-size", "contradict"]),
        ("--recompute-activations --recompute-granularity full",
         ["--recompute-activations", "--recompute-granularity"]),
        ("--use-rotary-position-embeddings --position-embedding-type learned_absolute",
         ["--use-rotary-position-embeddings", "--position-embedding-type"]),
        ("--no-position-embedding --position-embedding-type learned_absolute",
         ["--no-position-embedding", "--position-embedding-type"]),
        ("--group-query-attention", ["--group-query-attention", "--num-query-groups"]),
        ("--no-pipeline-parallel --pipeline-model-parallel-size 2",
         ["--no-pipeline-parallel", "--pipeline-model-parallel-size 2"]),
        ("--activations-checkpoint-method", ["--activations-checkpoint-method", "expected one"]),
        ("--activations-checkpoint-method all", ["--activations-checkpoint-method", "uniform, block"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_flag(line: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_args(line.split())
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_equal_values_by_two_spellings_do_not_contradict() -> None:
    assert parse_args(["--vocab", "a", "--vocab-file", "a"]).config.tokenizer.vocab_file == "a"


def test_flags_without_effect_are_noted_once_and_other_flags_kept() -> None:
    line = "--fp8-margin 3 --no-masked-softmax-fusion --fp8-margin 4 --use-flash-attn --seed 7 --local_rank 0"
    parsed = parse_args(line.split())
    assert parsed.config.training.seed == 7
    assert [note.split(" ")[0] for note in parsed.notes] == [
        "--fp8-margin",
        "--no-masked-softmax-fusion",
        "--use-flash-attn",
    ]
    assert all("is known but has no effect here: " in note for note in parsed.notes)


def test_old_names_are_noted_with_their_value() -> None:
    parsed = parse_args(["--batch-size", "8", "--no-pipeline-parallel"])
    assert parsed.notes[0].startswith("--no-pipeline-parallel is known but has no effect here")
    assert parsed.notes[1] == "--batch-size is an old name: taken as --micro-batch-size 8"


def _words(flag: KnownFlag, value: str) -> list[str]:
    return [f"--{flag.name}"] if flag.arity == SWITCH else [f"--{flag.name}", value]


def test_each_harmless_flag_is_accepted_with_one_note() -> None:
    for flag in (flag for flag in read_known_flags() if not flag.refused):
        parsed = PARSER.parse([*_words(flag, "7"), "--seed", "5"], check=False)
        assert parsed.notes == [f"--{flag.name} is known but has no effect here: {flag.reason}"]
        assert parsed.explicit == {"training.seed"}


def test_each_refused_flag_is_refused_by_name_unless_neutral() -> None:
    for flag in (flag for flag in read_known_flags() if flag.refused):
        with pytest.raises(UserError) as caught:
            PARSER.parse(_words(flag, "7"), check=False)
        assert f"--{flag.name}" in str(caught.value)
        assert flag.reason in str(caught.value)
        for neutral in flag.neutral:
            parsed = PARSER.parse(_words(flag, neutral), check=False)
            assert parsed.explicit == set(), flag.name


@pytest.mark.parametrize("word", ["SIGTERM", "TERM", "sigterm", "15"])
def test_the_exit_signal_may_be_spelled_in_any_way(word: str) -> None:
    assert PARSER.parse(["--exit-signal", word], check=False).explicit == set()
    with pytest.raises(UserError, match="--exit-signal SIGINT: SIGTERM is awaited"):
        PARSER.parse(["--exit-signal", "SIGINT"], check=False)


def test_one_message_names_all_unusable_flags() -> None:
    line = (
        "--multi-latent-attention --tensor-model-paralel-size 2 --seed 5 --mystery 1 two --context-parallel-size 2 "
        "--num-layers two --learning-rate 3e-4 --mock-dat"
    )
    with pytest.raises(UserError) as caught:
        parse_args(line.split())
    message = str(caught.value)
    assert message.startswith("7 settings cannot be used: (1) ")
    for reason in (
        "unknown flag --tensor-model-paralel-size; the nearest is --tensor-model-parallel-size",
        "unknown flag --mystery; --help",
        "--multi-latent-attention: multi-latent attention (MLA): not offered; use --num-query-groups",
        "--context-parallel-size 2: context parallelism: not offered; for long sequences use --sequence-parallel",
        "--num-layers: 'two' is not an integer",
        "--learning-rate 3e-4: here it is --lr",
        "unknown flag --mock-dat",
    ):
        assert reason in message
    assert "--seed" not in message


def test_one_message_names_all_unusable_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  num_layer: 4\n  hidden_size: wide\nmodl:\n  x: 1\nuse_mup: true\nseed: 5\n")
    with pytest.raises(UserError) as caught:
        parse_args(["--config", str(path), "--nonsense"])
    message = str(caught.value)
    assert message.startswith("5 settings cannot be used: ")
    for name in ("--nonsense", "model.num_layer", "model.hidden_size", "unknown section modl", "--use-mup"):
        assert name in message


@pytest.mark.parametrize("flag", ["--lr", "--num-layers", "--fp8-format", "--config"])
def test_two_dashes_are_not_a_value(flag: str) -> None:
    with pytest.raises(UserError, match=f"{flag} --: give a value"):
        parse_args([f"{flag}=--"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("--hiden-size", "--hidden-size"),
        ("--expert-parallel-size", "--moe-expert-parallel-size"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--contextt-size", ""),
        ("--parameter-parallel-size", ""),
        ("--lr-warm-restarts", ""),
    ],
)
def test_only_similar_names_are_hinted_at(name: str, hint: str) -> None:
    assert PARSER.table.nearest_flag(name) == (f"; the nearest is {hint}" if hint else "")


def test_flags_of_megatron_lm_without_effect_are_accepted() -> None:
    line = (
        "--manual-gc --manual-gc-interval 100 --cross-entropy-loss-fusion --context-parallel-size 1 "
        "--rerun-mode disabled --calculate-per-token-loss --cp-comm-type p2p"
    )
    parsed = parse_args(line.split())
    assert parsed.explicit == set()
    assert len(parsed.notes) == 5


def test_bf16_gradient_reduction_of_megatron_lm_is_the_compressor_cast() -> None:
    parsed = parse_args(["--grad-reduce-in-bf16", "--compress", "pp-forward=fixpoint"])
    assert parsed.config.compression.compress == ["pp-forward=fixpoint", "dp-grad=cast"]


def test_virtual_stages_of_megatron_lm_are_counted_in_layers() -> None:
    line = "--num-layers 16 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank"
    assert parse_args([*line.split(), "2"]).config.parallel.num_layers_per_virtual_pipeline_stage == 4
    assert parse_args([*line.split(), "1"]).config.parallel.num_layers_per_virtual_pipeline_stage is None
    for words in (["3"], ["2", "--num-layers-per-virtual-pipeline-stage", "2"], ["0"]):
        with pytest.raises(UserError, match="--num-virtual-stages-per-pipeline-rank"):
            PARSER.parse([*line.split(), *words])


def test_a_single_expert_is_a_dense_layer(by_iterations: list[str]) -> None:
    words = [*by_iterations, *["--num-experts", "1", "--moe-loss-coeff", "0.5", "--moe-min-capacity", "8"]]
    parsed = parse_args(words)
    assert not parsed.config.model.has_experts
    parsed.resolve(1)
    assert [note.split(":")[0] for note in parsed.notes] == ["--moe-aux-loss-coeff, --moe-min-capacity"]


# Flags with defaults that differ in form only, or by design.
_OTHER_DEFAULTS = {
    "distributed-backend": "chosen by the presence of CUDA",
    "encoder-num-layers": "an alias",
    "topk": "Megatron-Core's default, two experts",
    "expert-interval": "Megatron-Core's default, all layers",
    "moe-loss-coeff": "the value of its examples",
    "moe-train-capacity-factor": "no token is dropped",
    "moe-eval-capacity-factor": "no token is dropped",
    "num-experts": "a list of one or none",
    "zero-stage": "DeepSpeed only, which asks for it with a file",
    "encoder-seq-length": "an alias",
}
_COMMON_WITHOUT_FIELD = {
    "disable-moe-token-dropping",
    "empty-unused-memory-level",
    "log-memory-to-tensorboard",
    "no-bias-dropout-fusion",
    "no-gradient-accumulation-fusion",
    "no-load-rng",
    "no-masked-softmax-fusion",
    "no-query-key-layer-scaling",
    "no-save-rng",
    "universal-checkpoint",
    "use-flash-attn",
    "use-flash-attn-builder",
    "use-flash-attn-triton",
    "use-flash-attn-v1",
    "use-flash-attn-v2",
}


def test_every_flag_of_megatron_deepspeed_is_recognized() -> None:
    table = build_run_parser().table
    lines = (LISTS / "megatron-deepspeed.txt").read_text(encoding="utf-8").splitlines()[1:]
    # 314 arguments; two have a second spelling.
    assert len(lines) == 316
    for line in lines:
        kind, name, arity, *default_words = line.split(" ", 3)
        default = default_words[0] if default_words else ""
        target = table.by_flag(name)
        assert target is not None, name
        if isinstance(target, KnownFlag):
            is_switch = target.arity == SWITCH
            if kind == "+":
                moe = "experts" in target.reason
                assert moe or name in _COMMON_WITHOUT_FIELD, name
        elif isinstance(target, FieldOption):
            is_switch = target.is_switch
            if not is_switch and name not in _OTHER_DEFAULTS:
                _assert_same_default(target, default)
        else:
            assert isinstance(target, Shortcut)
            is_switch = target.arity != VALUE
        assert is_switch == (arity == "switch"), name


def _assert_same_default(target: FieldOption, default: str) -> None:
    if default in ("∅", ""):
        assert target.default in (None, [])
    elif target.element in (int, float):
        assert target.default == (2.0**32 if default == "2**32" else float(default)), target.flag
    else:
        assert str(target.default).lower() == default.lower(), target.flag


def test_the_flag_surface_is_frozen() -> None:
    """New, removed and changed flags must be recorded in the golden file."""
    table = build_run_parser().table
    lines = []
    for flag in sorted({spell(name) for name, _ in table.spellings()}):
        target = table.by_flag(flag)
        if isinstance(target, FieldOption):
            values = "switch" if target.is_switch else "list" if target.is_list else target.element.__name__
            lines.append(f"--{flag} {values} {target.path}")
        elif isinstance(target, Shortcut):
            lines.append(f"--{flag} {'value' if target.arity == VALUE else 'switch'} shorthand")
        else:
            assert isinstance(target, KnownFlag)
            lines.append(f"--{flag} {target.arity} {'refused' if target.refused else 'no effect'}")
    golden = (FOLDER / "golden_flags.txt").read_text(encoding="utf-8").splitlines()
    assert lines == golden
