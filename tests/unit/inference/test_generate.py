"""Generation against the model's logits, one prompt at a time."""

from __future__ import annotations

import torch

from megatron.inference.generate import generate
from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.model.context import ForwardContext
from megatron.tokenizer.null import NullTokenizer
from tests.support.tiny import VOCAB, tiny_engines, tiny_train

GREEDY = Sampling(greedy=True)


def trained_model() -> LoadedModel:
    engines = tiny_engines({})
    tiny_train(engines, 10)
    return LoadedModel(engines.stages[0], NullTokenizer(VOCAB - 1), engines.config, 10)


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


def test_a_batch_of_unequal_prompts_equals_each_alone_beyond_the_window() -> None:
    model = trained_model()
    prompts = [[3, 8, 13], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    samples = generate(model, prompts, 20, GREEDY)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert sample.tokens == slowly(model, prompt, 20)
        assert sample.prompt_length == len(prompt)


def test_an_empty_prompt_starts_a_document() -> None:
    model = trained_model()
    (sample,) = generate(model, [[]], 5, GREEDY)
    assert sample.tokens == slowly(model, [model.tokenizer.eod], 5)[1:]
    assert sample.prompt_length == 0


def test_the_end_of_document_ends_a_sample_and_is_left_out() -> None:
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


def test_seeds_repeat() -> None:
    model = trained_model()
    first, again, other = (generate(model, [[1]] * 3, 12, Sampling(), seed) for seed in (1, 1, 2))
    assert first == again != other
