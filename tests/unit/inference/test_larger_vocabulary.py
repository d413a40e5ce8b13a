"""Models whose vocabulary is larger than their tokenizer's, such as padded imports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.base.errors import UserError
from megatron.checkpoint.load import saved_config
from megatron.checkpoint.vocabulary import saved_vocab_size
from megatron.config.flags import parse_args
from megatron.config.tokenizer import TokenizerConfig
from megatron.distributed.process_group import LaunchEnvironment
from megatron.inference.generate import generate, score
from megatron.inference.model import load_model
from megatron.inference.sampling import Sampling
from megatron.models.context import ForwardContext
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.vocabulary import fit_vocab_size, model_entries
from megatron.training.pretrain import resolve
from tests.support.tiny import VOCAB
from tests.unit.convert.support import saved_model

TOKENIZER_SIZE = VOCAB - 20
SMALLER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=TOKENIZER_SIZE - 1)
CPU = torch.device("cpu")


class _Words(NullTokenizer):
    name = "words"


@pytest.mark.parametrize(("vocab_size", "entries"), [(None, 101), (101, 101), (50304, 50304)])
def test_vocab_size_with_a_tokenizer_is_the_size_of_the_model(vocab_size: int | None, entries: int) -> None:
    assert model_entries(TokenizerConfig(vocab_size=vocab_size), _Words(100)) == entries


def test_a_vocab_size_below_the_tokenizers_is_refused() -> None:
    with pytest.raises(UserError, match="--vocab-size 100 is less than the 101 entries of the tokenizer"):
        model_entries(TokenizerConfig(vocab_size=100), _Words(100))


def test_the_null_tokenizer_has_the_given_vocab_size() -> None:
    assert model_entries(TokenizerConfig(vocab_size=100), NullTokenizer(100)) == 101
    assert fit_vocab_size(SMALLER, 101).vocab_size == 100
    assert fit_vocab_size(TokenizerConfig(tokenizer_type="GPT2BPETokenizer"), 101).vocab_size == 101


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a random model."""
    return saved_model(tmp_path_factory.mktemp("saved"), {"untie_embeddings_and_output_weights": True})


def test_entries_without_a_text_are_never_chosen(saved: Path) -> None:
    model = load_model(saved, tokenizer=SMALLER, device=CPU)
    assert (model.tokenizer.vocab_size, model.stage.shard.vocab_size) == (TOKENIZER_SIZE, VOCAB)
    with torch.no_grad():  # the final norm's output is constant, so the rows decide
        norm = model.stage.final_layernorm
        assert norm.bias is not None
        norm.weight.zero_()
        norm.bias.fill_(1.0)
        model.stage.output_weight.zero_()
        model.stage.output_weight[TOKENIZER_SIZE:VOCAB] = 0.5
        model.stage.output_weight[7] = 0.1
    for sampling in (Sampling(greedy=True), Sampling(), Sampling(top_k=30), Sampling(top_p=0.9)):
        (sample,) = generate(model, [[1, 2]], 20, sampling, [3], top=3)
        assert all(token < TOKENIZER_SIZE for token in sample.tokens)
        assert all(number < TOKENIZER_SIZE for token in sample.details for number, _ in token.top)
    # Their probability is still the model's own: measured losses do not change.
    ((token,),) = score(model, [[1, 7]], top=2)
    x_sbh = model.stage(torch.tensor([[1]]), ForwardContext())
    assert token.logprob == pytest.approx(float(model.stage.logits(x_sbh)[0, 0].log_softmax(-1)[7]))
    assert token.top[0] == (7, token.logprob)


def test_a_tokenizer_larger_than_the_model_is_refused(saved: Path) -> None:
    larger = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB)
    with pytest.raises(
        UserError, match=f"the tokenizer has {VOCAB + 1} entries, but the checkpoint's model has {VOCAB}"
    ):
        load_model(saved, tokenizer=larger, device=CPU)


def test_training_resumes_with_the_entries_of_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    """Also with a checkpoint older than --vocab-size above the tokenizer's."""
    _, iteration = saved_config(saved)
    assert saved_vocab_size(saved, iteration) == VOCAB
    flags = f"--load {saved} --finetune --use-checkpoint-args --train-iters 1 --micro-batch-size 1 --data-path x --lr 1"
    files = "--tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt"
    env = LaunchEnvironment.read(None)
    for extra, size in (("", VOCAB - 1), (files, VOCAB), (f"{files} --vocab-size {VOCAB}", VOCAB)):
        assert resolve(parse_args([*flags.split(), *extra.split()]), env).tokenizer.vocab_size == size
    with pytest.raises(UserError, match=f"--vocab-size: 200 was given but the checkpoint's model needs {VOCAB}"):
        resolve(parse_args([*flags.split(), *files.split(), "--vocab-size", "200"]), env)
