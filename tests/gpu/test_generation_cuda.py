"""Generation on a CUDA device: steps as CUDA graphs give the tokens of steps launched kernel by kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.inference import steps
from megatron.inference.generate import generate
from megatron.inference.model import LoadedModel, load_model
from megatron.inference.sampling import Sampling
from megatron.inference.steps import Recording, Workspaces, record_on_cuda
from tests.unit.convert.support import MODELS, NOT_CLASSIC, saved_model

pytestmark = pytest.mark.gpu

GREEDY = Sampling(greedy=True)
PROMPTS = [[3, 8, 13], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


class Counting:
    """Records as a run does, and counts."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        self.recorded += 1
        return record_on_cuda(compute)


@pytest.fixture(autouse=True)
def _fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def _with(model: LoadedModel, workspaces: Workspaces) -> LoadedModel:
    return dataclasses.replace(model, workspaces=workspaces)


@pytest.mark.parametrize(("name", "block"), [("gpt2", 256), *((name, 4) for name in (*MODELS, *NOT_CLASSIC))])
def test_tokens_are_those_of_single_launches(
    name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of the CPU: rows of unequal lengths, past a sliding window and the model's own; twice in the same memory."""
    monkeypatch.setattr(steps, "BLOCK", block)
    saved = saved_model(tmp_path, {**MODELS, **NOT_CLASSIC}[name])
    loaded = load_model(saved, device=torch.device("cuda"))
    assert loaded.workspaces.record is record_on_cuda
    counting = Counting()
    alone = load_model(saved, device=torch.device("cpu"))
    models = [_with(loaded, Workspaces()), _with(loaded, Workspaces(counting)), alone]
    for prompts in (PROMPTS, [[2, 2], [9, 8, 7], [6]]):
        expected, *results = (generate(model, prompts, 14, GREEDY) for model in models)
        for samples in results:
            assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
    assert counting.recorded > 0
    assert models[1].workspaces.record is counting  # and never failed


def test_the_next_text_uses_the_same_recording(tmp_path: Path) -> None:
    counting = Counting()
    model = _with(load_model(saved_model(tmp_path, {}), device=torch.device("cuda")), Workspaces(counting))
    first = [generate(model, [[1, 2, 3]], 9, GREEDY)[0].tokens for _ in range(4)]
    assert first == [first[0]] * 4
    assert counting.recorded <= 1
