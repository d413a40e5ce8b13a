"""Derived values, notes, and real command lines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.base.errors import UserError
from megatron.config.flags import parse_args
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.training import batch_schedule
from tests.unit.config.original_scripts import JUPITER


def _resolve(words: list[str], world_size: int = 1, *, cuda_available: bool = False) -> RunConfig:
    return parse_args(words).resolve(world_size, cuda_available=cuda_available)


def test_pipelines_without_a_flush_need_gloo(by_iterations: list[str]) -> None:
    words = [*by_iterations, *["--pipeline-model-parallel-size", "2", "--delay", "1", "--no-pipeline-flush"]]
    with pytest.raises(UserError, match=r"--no-pipeline-flush cannot be combined with NCCL.*-backend gloo"):
        _resolve(words, 2, cuda_available=True)
    config = _resolve([*words, "--distributed-backend", "gloo"], 2, cuda_available=True)
    assert config.parallel.overlaps_steps


def test_extrapolation_allows_compressors_that_do_not_clip(by_iterations: list[str]) -> None:
    """Neither without clipping nor on a single replica do they clip."""
    line = "--delay 1 --delay-correction extrapolate --compress dp-grad=quantized-adam,bits=8,warmup=4"
    words = line.split()
    assert _resolve([*by_iterations, *words, "--clip-grad", "0"], 2).parallel.delay
    assert _resolve([*by_iterations, *words], 1).parallel.delay


def test_jupiter_175b_resolves() -> None:
    parsed = parse_args(JUPITER["jupiter 175B"].flags.split())
    config = parsed.resolve(384, cuda_available=True)
    assert config.parallel.data_parallel_size(384) == 6
    assert config.model.ffn_hidden_size == 4 * 12288
    assert config.model.kv_channels == 128
    assert config.model.init_method_std == 0.0048
    assert config.training.train_samples == 300_000_000
    assert config.optimizer.lr_decay_samples == 126_953_125
    assert config.precision.initial_loss_scale == 4096.0
    assert config.recompute.recompute_granularity == "selective"
    assert config.parallel.distributed_backend == "nccl"
    assert [note.split()[0] for note in parsed.notes] == ["--use-flash-attn"]


def test_jupiter_13b_resolves() -> None:
    config = parse_args(JUPITER["jupiter 13B"].flags.split()).resolve(32, cuda_available=True)
    assert config.parallel.data_parallel_size(32) == 4
    assert config.model.init_method_std == 0.02
    assert config.training.global_batch_size == 1024


def test_gpt3_with_ramp_up_and_blend_resolves() -> None:
    line = """
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings
    2048 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --micro-batch-size 1
    --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 146484375 --lr-decay-samples
    126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --split 98,2,0
    --data-path 0.2 a 0.3 b 0.5 c --vocab-file v --merge-file m --tokenizer-type GPT2BPETokenizer
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --fp16
    --checkpoint-activations
    """
    config = _resolve(line.split(), 1024)
    assert list(batch_schedule(config.training, 2048).sizes) == list(range(16, 1537, 16))
    assert config.recompute.recompute_method == "uniform"


def test_an_old_readme_command_resolves() -> None:
    line = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --batch-size 8 --seq-length 1024
    --max-position-embeddings 1024 --train-iters 320000 --lr-decay-iters 320000 --save c --load c --data-path
    d --vocab v --merge-file m --tokenizer-type gpt2bpetokenizer --data-impl mmap --split 949,50,1
    --distributed-backend gloo --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
    --clip-grad 1.0 --warmup .01 --activations-checkpoint-method uniform --log-interval 100 --save-interval
    10000 --eval-interval 1000 --eval-iters 10 --fp16 --local_rank=0
    """
    config = _resolve(line.split())
    assert config.training.micro_batch_size == 8
    assert config.optimizer.lr_warmup_fraction == 0.01
    assert config.recompute.recompute_granularity == "full"


def test_the_length_of_a_decoder_sets_positions_of_t5_only(by_iterations: list[str]) -> None:
    longer = [*by_iterations, "--decoder-seq-length", "64"]
    assert _resolve(longer).model.max_position_embeddings == 32
    t5 = "--model-type t5 --tokenizer-type BertWordPieceCase --vocab-file v --vocab-extra-ids 4"
    assert _resolve([*longer, *t5.split()]).model.max_position_embeddings == 64


def test_derived_values(by_iterations: list[str]) -> None:
    config = _resolve(by_iterations, 3)
    assert config.model.ffn_hidden_size == 256
    assert config.model.kv_channels == 16
    assert config.model.num_query_groups == 4
    assert config.model.max_position_embeddings == 32
    assert config.training.global_batch_size == 6
    assert config.optimizer.lr_decay_iters == 100
    assert config.optimizer.lr_decay_samples is None
    assert (config.optimizer.start_weight_decay, config.optimizer.end_weight_decay) == (0.01, 0.01)
    assert config.parallel.distributed_backend == "gloo"


@pytest.mark.parametrize(("hidden", "width"), [(512, 1344), (4096, 10880), (64, 128)])
def test_the_width_of_swiglu(by_iterations: list[str], hidden: int, width: int) -> None:
    config = _resolve([*by_iterations, "--swiglu", "--hidden-size", str(hidden)])
    assert config.model.ffn_hidden_size == width


def test_resolving_is_idempotent_and_does_not_change_its_input(by_samples: list[str]) -> None:
    words = [
        *by_samples,
        *["--train-tokens", "200_000", "--lr-decay-tokens", "64_000", "--lr-warmup-tokens", "6400", "--bf16"],
        *["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
        *["--global-batch-size", "8", "--recompute-granularity", "full"],
    ]
    parsed = parse_args(words)
    before = parsed.config.to_dict()
    resolved = parsed.resolve(4)
    assert parsed.config.to_dict() == before
    assert resolved != parsed.config
    assert resolved.resolve(4) == resolved
    assert RunConfig.from_dict(resolved.to_dict()).resolve(4) == resolved


def test_sections_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().model.num_layers = 3  # type: ignore[misc]


def test_tokens_become_samples(minimal: list[str]) -> None:
    parsed = parse_args([*minimal, "--train-tokens", "3250", "--lr-warmup-tokens", "328"])
    config = parsed.resolve(1)
    assert config.training.train_samples == 101
    assert config.optimizer.lr_warmup_samples == 0
    assert config.optimizer.lr_decay_samples == 101
    assert any("--train-tokens 3250 ends the run after 101 samples" in note for note in parsed.notes)
    assert any("--lr-warmup-tokens 328 is taken as 10.25 samples" in note for note in parsed.notes)


def test_the_shorter_of_tokens_and_samples_ends_the_run(minimal: list[str]) -> None:
    short = _resolve([*minimal, "--train-samples", "50", "--train-tokens", "3250"])
    long = _resolve([*minimal, "--train-samples", "5000", "--train-tokens", "3250"])
    assert (short.training.train_samples, long.training.train_samples) == (50, 101)


def test_bf16_accumulates_in_fp32_with_a_note(by_iterations: list[str]) -> None:
    parsed = parse_args([*by_iterations, "--bf16"])
    assert parsed.resolve(1).parallel.accumulate_allreduce_grads_in_fp32
    assert parsed.notes == ["--bf16 turns --accumulate-allreduce-grads-in-fp32 on"]


@pytest.mark.parametrize(
    "flags",
    ["--num-layers-per-virtual-pipeline-stage 2", "--virtual-pipeline-model-parallel-size 3"],
)
def test_both_ways_to_interleave(by_iterations: list[str], flags: str) -> None:
    words = [*by_iterations, "--num-layers", "12", "--pipeline-model-parallel-size", "2", *flags.split()]
    config = _resolve([*words, "--global-batch-size", "4"], 2)
    assert config.parallel.virtual_pipeline_model_parallel_size == 3
    assert config.parallel.num_layers_per_virtual_pipeline_stage == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "no layer has experts (--num-experts)"),
        ("--num-experts 8", "every replica holds all experts (--expert-model-parallel-size)"),
    ],
)
def test_codecs_of_experts_are_noted_without_expert_parallelism(
    by_iterations: list[str], words: str, reason: str
) -> None:
    parsed = parse_args([*by_iterations, "--compress", "ep-dispatch-forward=fixpoint", *words.split()])
    parsed.resolve(2)
    assert f"--compress ep-dispatch-forward=fixpoint: no effect, {reason}" in parsed.notes


def test_a_saved_configuration_is_read_back_without_a_note(by_iterations: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "run.yaml"
    saved.write_text(_resolve(by_iterations, 1).to_yaml())
    parsed = parse_args(["--config", str(saved)])
    parsed.resolve(1)
    assert parsed.notes == []


@pytest.mark.parametrize(
    ("model", "activation"),
    [
        (ModelConfig(), "gelu_tanh"),
        (ModelConfig(bias_gelu_fusion=False), "gelu"),
        (ModelConfig(bias_gelu_fusion=False, openai_gelu=True), "gelu_tanh"),
        (ModelConfig(add_bias_linear=False), "gelu"),
        (ModelConfig(swiglu=True), "swiglu"),
        (ModelConfig(squared_relu=True), "squared_relu"),
    ],
)
def test_activation(model: ModelConfig, activation: str) -> None:
    assert model.activation == activation


def test_params_dtype() -> None:
    assert PrecisionConfig().params_dtype == torch.float32
    assert PrecisionConfig(fp16=True).params_dtype == torch.float16
    assert PrecisionConfig(bf16=True).params_dtype == torch.bfloat16
    assert PrecisionConfig(fp64=True).params_dtype == torch.float64
