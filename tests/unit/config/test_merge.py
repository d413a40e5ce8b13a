"""--use-checkpoint-args: what comes from the checkpoint and what from the command line."""

from __future__ import annotations

import pytest

from megatron.config import RunConfig, UserError, merge_checkpoint_config, parse_args

SAVED = (
    "--num-layers 6 --hidden-size 96 --num-attention-heads 6 --num-query-groups 2 --seq-length 64 --swiglu "
    "--micro-batch-size 2 --lr 0.1 --train-iters 10 --normalization RMSNorm --hidden-dropout 0.3 --seed 9 "
    "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m --untie-embeddings-and-output-weights"
)


@pytest.fixture
def saved() -> RunConfig:
    """The resolved configuration of an earlier run."""
    return parse_args(SAVED.split()).resolve(1)


def _merge(line: str, saved: RunConfig) -> RunConfig:
    parsed = parse_args(line.split())
    return merge_checkpoint_config(parsed.config, parsed.explicit, saved)


def test_the_shape_comes_from_the_checkpoint_and_the_rest_from_the_flags(saved: RunConfig) -> None:
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
