"""Generation against the model's logits, one prompt at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.logical import shard_of_local
from megatron.checkpoint.model_state import model_tensors
from megatron.checkpoint.save import save_checkpoint
from megatron.inference.generate import Token, generate, score
from megatron.inference.model import LoadedModel, load_model
from megatron.inference.sampling import Sampling
from megatron.models.context import ForwardContext
from megatron.tokenizer.null import NullTokenizer
from tests.support.combinations import mark_repeats
from tests.support.tiny import VOCAB, tiny_engines
from tests.unit.convert.support import MODELS, NOT_CLASSIC, WITH_EXPERTS, convert, saved_model
from tests.unit.inference.support import trained_model

GREEDY = Sampling(greedy=True)


def slowly(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    window = model.config.model.max_position_embeddings
    for _ in range(count):
        with torch.no_grad():
            x_sbh = model.stage(torch.tensor([tokens[-window:]]), ForwardContext())
        chosen = int(model.stage.logits(x_sbh)[-1, 0].argmax())
        if chosen == model.tokenizer.eod:
            break
        tokens.append(chosen)
    return tokens


PROMPTS = [[3, 8, 13], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("cached", [True, False])
def test_a_batch_of_unequal_prompts_equals_each_alone_beyond_the_window(cached: bool) -> None:
    model, prompts = trained_model(), PROMPTS
    samples = generate(model, prompts, 20, GREEDY, cached=cached)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert sample.tokens == slowly(model, prompt, 20)
        assert sample.prompt_length == len(prompt)


EACH_CACHE = [
    *("qwen2, yarn with fractions", "mistral", "qwen2, windows in some layers", "qwen2, 2 groups, untied"),
    *("qwen3, 2 groups, with a window", "gemma2", "gemma3", "neox, side by side", "qwen2-moe"),
    "qwen3-moe, weights of all, every other layer, with a window, untied",
]
"""Models that have each kind of position, window, group, norm and layer between them."""


@pytest.mark.parametrize(
    "name", mark_repeats([*NOT_CLASSIC, *WITH_EXPERTS, "qwen2, 2 groups, untied"], keep=EACH_CACHE)
)
def test_the_cache_of_every_kind_of_model_suffices(name: str, tmp_path: Path) -> None:
    """Rows of unequal lengths, past a sliding window and then past the model's own."""
    saved = saved_model(tmp_path, {**MODELS, **NOT_CLASSIC, **WITH_EXPERTS}[name])
    model = load_model(saved, device=torch.device("cpu"))
    for prompt, sample in zip(PROMPTS, generate(model, PROMPTS, 12, GREEDY), strict=True):
        assert sample.tokens == slowly(model, prompt, 12)


def test_an_empty_prompt_starts_a_document() -> None:
    model = trained_model()
    (sample,) = generate(model, [[]], 5, GREEDY)
    assert sample.tokens == slowly(model, [model.tokenizer.eod], 5)[1:]
    assert sample.prompt_length == 0


def test_an_empty_prompt_starts_with_the_begin_token_where_there_is_one() -> None:
    tokenizer = NullTokenizer(VOCAB - 1)
    tokenizer.bos = 7
    model = replace(trained_model(), tokenizer=tokenizer)
    (sample,) = generate(model, [[]], 5, GREEDY)
    assert sample.tokens == slowly(model, [7], 5)[1:]


def test_the_end_of_document_ends_a_sample_and_is_dropped() -> None:
    model = trained_model()
    with torch.no_grad():
        norm = model.stage.final_layernorm
        assert norm.bias is not None
        norm.weight.zero_()
        norm.bias.fill_(1.0)
        model.stage.output_weight[model.tokenizer.eod] = 100.0
    (sample,) = generate(model, [[1, 2]], 5, GREEDY)
    assert sample.finished
    assert sample.tokens == [1, 2]
    assert sample.end is not None
    (scored,) = score(model, [[1, 2, model.tokenizer.eod]])
    assert sample.end.id == model.tokenizer.eod
    assert sample.end.logprob == pytest.approx(scored[-1].logprob, abs=1e-5)


def test_a_stop_token_ends_a_sample_and_is_dropped() -> None:
    model = trained_model()
    tokens = slowly(model, [3, 8, 13], 9)
    stop = tokens[6]
    index = tokens.index(stop, 3)
    (sample, other) = generate(model, [[3, 8, 13], [5]], 9, GREEDY, stop_tokens=[stop])
    assert sample.tokens == tokens[:index]
    assert sample.finished
    assert sample.end is not None
    assert sample.end.id == stop
    assert stop not in other.tokens


def _penalized(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding with --repetition_penalty 1.6 and --frequency_penalty 0.4."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model.stage.logits(model.stage(torch.tensor([tokens]), ForwardContext()))[-1, 0]
        logits = logits[: model.tokenizer.vocab_size].clone()
        for token in set(tokens):
            logits[token] = logits[token] / 1.6 if logits[token] > 0 else logits[token] * 1.6
        for token in tokens[len(prompt) :]:
            logits[token] -= 0.4
        tokens.append(int(logits.argmax()))
    return tokens


def test_penalties_count_the_tokens_of_each_row() -> None:
    model, sampling = trained_model(), Sampling(greedy=True, repetition_penalty=1.6, frequency_penalty=0.4)
    first, second = [3, 8, 13], [5]
    expected = [_penalized(model, prompt, 8) for prompt in (first, second)]
    assert expected[1] != slowly(model, second, 8)
    samples = generate(model, [first, second], 8, sampling)
    assert [sample.tokens for sample in samples] == expected
    stop = next(token for token in expected[0][3:] if token not in expected[1])
    samples = generate(model, [first, second], 8, sampling, stop_tokens=[stop])
    assert samples[0].tokens == expected[0][: expected[0].index(stop, 3)]
    assert samples[1].tokens == expected[1]


def test_a_finished_row_does_not_change_the_others() -> None:
    model = trained_model()
    counts = {0: 3, 1: 11, 2: 5}
    tokens: list[tuple[int, int]] = []

    def enough(row: int, token: Token) -> bool:
        tokens.append((row, token.id))
        return sum(other == row for other, _ in tokens) == counts[row]

    samples = generate(model, PROMPTS, 11, GREEDY, on_token=enough)
    for row, (prompt, sample) in enumerate(zip(PROMPTS, samples, strict=True)):
        assert sample.tokens == slowly(model, prompt, counts[row])
        assert [token for number, token in tokens if number == row] == sample.tokens[len(prompt) :]
        assert not sample.finished


def test_seeds_repeat_in_any_batch() -> None:
    model = trained_model()
    rows = [sample.tokens for sample in generate(model, [[1]] * 3, 12, Sampling(), [4, 5, 4])]
    assert rows[0] == rows[2] != rows[1]
    (alone,) = generate(model, [[1]], 12, Sampling(), [5])
    assert alone.tokens == rows[1]


@pytest.mark.parametrize(
    ("fp64", "sampling", "tolerance"),
    [(False, Sampling(), 1e-5), (True, Sampling(min_p=0.01, frequency_penalty=0.1), 1e-13)],
    ids=["float32", "float64"],
)
def test_probabilities_have_the_precision_of_the_model(fp64: bool, sampling: Sampling, tolerance: float) -> None:
    model = trained_model(fp64=fp64)
    samples = generate(model, PROMPTS, 5, sampling, [1, 2, 3], top=4)
    scored = score(model, [sample.tokens for sample in samples], top=4)
    for sample, tokens in zip(samples, scored, strict=True):
        assert [token.id for token in tokens] == sample.tokens[1:]
        with torch.no_grad():
            x_sbh = model.stage(torch.tensor([sample.tokens[:-1]]), ForwardContext())
        expected = model.stage.logits(x_sbh)[:, 0].log_softmax(-1)
        assert expected.dtype == (torch.float64 if fp64 else torch.float32)
        for token, row in zip(tokens, expected, strict=True):
            best = row.topk(4)
            assert [number for number, _ in token.top] == best.indices.tolist()
            values = [token.logprob, *(logprob for _, logprob in token.top)]
            assert values == pytest.approx([float(row[token.id]), *best.values.tolist()], abs=tolerance)
        for detail, scored_token in zip(sample.details, tokens[sample.prompt_length - 1 :], strict=True):
            assert detail.logprob == pytest.approx(scored_token.logprob, abs=10 * tolerance)
            assert detail.top[0][0] == scored_token.top[0][0]


@pytest.mark.parametrize("name", ["gpt2", "llama, 2 groups, untied", "gemma2", "gemma3"])
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = saved_model(tmp_path / "ours", {**MODELS, **NOT_CLASSIC}[name])
    convert(saved, tmp_path / "hf", "hf")
    model = load_model(saved, device=torch.device("cpu"))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    for prompt in ([3, 8, 13], [5]):
        (ours,) = generate(model, [prompt], 8, GREEDY)
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=model.tokenizer.eod, pad_token_id=0
        )[0].tolist()
        assert ours.tokens == [token for token in expected if token != model.tokenizer.eod]


def test_checkpoints_with_more_than_the_model_can_be_loaded(tmp_path: Path) -> None:
    engines = tiny_engines({})
    tensors = model_tensors(engines.stages)
    names = ("optimizer.exp_avg.x", "compressor.state|x")
    extra_shards = {name: shard_of_local(torch.zeros(3), (0,), (3,)) for name in names}
    save_checkpoint(tmp_path, 3, {**tensors, **extra_shards}, {"separate_main": False}, engines.config.to_yaml())
    model = load_model(tmp_path, device=torch.device("cpu"))
    assert torch.equal(model.stage.output_weight, engines.stages[0].output_weight)
