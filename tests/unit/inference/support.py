"""A small trained model."""

from __future__ import annotations

import copy
import functools

from megatron.inference.model import LoadedModel
from megatron.models.gpt import GPTStage
from megatron.tokenizer.null import NullTokenizer
from tests.support.tiny import VOCAB, tiny_engines, tiny_train


@functools.cache
def _trained_model(**precision: bool) -> LoadedModel:
    engines = tiny_engines({"precision": precision})
    tiny_train(engines, 10)
    stage = engines.stages[0]
    assert isinstance(stage, GPTStage)
    return LoadedModel(stage, NullTokenizer(VOCAB - 1), engines.config, 10)


def trained_model(**precision: bool) -> LoadedModel:
    """A copy of a model trained on this process; the arguments are precision flags."""
    return copy.deepcopy(_trained_model(**precision))
