"""--use-checkpoint-args: settings of the checkpoint, and settings of the command line."""

from __future__ import annotations

import pytest

from megatron.base.documents import parse_yaml
from megatron.base.errors import UserError
from megatron.config.flags import parse_args
from megatron.config.merge import differing_flags, merge_checkpoint_config
from megatron.config.run import RunConfig

SAVED = (
    "--num-layers 6 --hidden-size 96 --num-attention-heads 6 --num-query-groups 2 --seq-length 64 --swiglu "
    "--micro-batch-size 2 --lr 0.1 --train-iters 10 --normalization RMSNorm --hidden-dropout 0.3 --seed 9 "
    "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m --untie-embeddings-and-output-weights"
)


@pytest.fixture
def saved() -> RunConfig:
    """Resolved configuration of an earlier run."""
    return parse_args(SAVED.split()).resolve(1)


def _merge(line: str, saved: RunConfig) -> RunConfig:
    parsed = parse_args(line.split())
    return merge_checkpoint_config(parsed.config, parsed.explicit, saved)


def test_the_checkpoint_gives_the_shape_and_the_flags_all_else(saved: RunConfig) -> None:
    line = "--load c --use-checkpoint-args --micro-batch-size 4 --lr 0.2 --train-samples 99 --hidden-dropout 0"
    merged = _merge(line, saved)
    assert merged.model.num_layers == 6
    assert merged.model.num_query_groups == 2
    assert merged.model.ffn_hidden_size == saved.model.ffn_hidden_size
    assert merged.model.swiglu is True
    assert merged.model.normalization == "RMSNorm"
    assert merged.model.untie_embeddings_and_output_weights is True
    assert merged.model.seq_length == 64
    assert merged.tokenizer == saved.tokenizer
    assert merged.model.hidden_dropout == 0.0
    assert merged.training.micro_batch_size == 4
    assert merged.training.seed == 1234
    assert merged.optimizer.lr == 0.2
    assert merged.resolve(1).training.train_samples == 99


def test_an_explicit_flag_may_agree(saved: RunConfig) -> None:
    assert _merge("--num-layers 6 --swiglu", saved).model.num_layers == 6


@pytest.mark.parametrize(
    ("line", "flag"),
    [("--num-layers 4", "--num-layers"), ("--swiglu false", "--swiglu"), ("--vocab-size 9", None)],
)
def test_an_explicit_flag_may_not_contradict_the_shape(saved: RunConfig, line: str, flag: str | None) -> None:
    if flag is None:
        assert _merge(line, saved).tokenizer.vocab_size == 9
        return
    with pytest.raises(UserError) as caught:
        _merge(line, saved)
    assert f"{flag}: " in str(caught.value)
    assert "--use-checkpoint-args" in str(caught.value)


def test_an_explicit_sequence_length_wins(saved: RunConfig) -> None:
    assert _merge("--seq-length 32", saved).model.seq_length == 32


EXPERTS = "--num-experts 4 --topk 3 --moe-router-pre-softmax"


@pytest.mark.parametrize(
    ("line", "theirs", "expected"),
    [
        ("", "", {}),
        ("--seq-length 32 --moe-aux-loss-coeff 0.5 --topk 1", "", {}),  # not of the shape, or without effect
        ("--rotary-base 5e4", "", {"--rotary-base": ("--rotary-base 50000.0", "--rotary-base 10000.0")}),
        ("--sliding-window 8", "", {"--sliding-window": ("--sliding-window 8", "no --sliding-window")}),
        (
            "--squared-relu --disable-bias-linear",
            "",
            {
                "--squared-relu": ("--squared-relu", "no --squared-relu"),
                "--disable-bias-linear": ("--disable-bias-linear", "no --disable-bias-linear"),
            },
        ),
        (EXPERTS, EXPERTS, {}),
        (f"{EXPERTS} --num-experts 1 4", f"{EXPERTS} --expert-interval 2", {}),  # the same layers
        (
            f"{EXPERTS} --topk 2 --num-experts 4 2",
            EXPERTS,
            {
                "--num-experts": ("--num-experts 4 2", "--num-experts 4"),
                "--moe-router-topk": ("--moe-router-topk 2", "--moe-router-topk 3"),
            },
        ),
        (
            "",
            EXPERTS,
            {
                "--num-experts": ("no --num-experts", "--num-experts 4"),
                "--moe-router-topk": ("--moe-router-topk 2", "--moe-router-topk 3"),
                "--moe-router-pre-softmax": ("no --moe-router-pre-softmax", "--moe-router-pre-softmax"),
            },
        ),
    ],
)
def test_flags_that_differ_from_the_checkpoint_are_listed(
    line: str, theirs: str, expected: dict[str, tuple[str, str]]
) -> None:
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 0.1"
    common_flags = (
        f"{shape} --position-embedding-type rope --max-position-embeddings 64 --train-iters 9 --vocab-size 50"
    )
    ours, saved = (parse_args(f"{common_flags} {flags}".split()).resolve(1) for flags in (line, theirs))
    model = parse_yaml(saved.to_yaml(), "saved")["model"]
    differing = differing_flags(ours.model, model)
    assert {flag: differing[flag] for flag in differing if flag != "--moe-ffn-hidden-size"} == expected
    assert differing_flags(ours.model, {}) == {}
