"""A small trained model."""

from __future__ import annotations

from megatron.inference.model import LoadedModel
from megatron.models.gpt import GPTStage
from megatron.tokenizer.null import NullTokenizer
from tests.support.tiny import VOCAB, tiny_engines, tiny_train


def trained_model(**precision: bool) -> LoadedModel:
    """Trained model on this process; the arguments are precision flags."""
    engines = tiny_engines({"precision": precision})
    tiny_train(engines, 10)
    stage = engines.stages[0]
    assert isinstance(stage, GPTStage)
    return LoadedModel(stage, NullTokenizer(VOCAB - 1), engines.config, 10)
