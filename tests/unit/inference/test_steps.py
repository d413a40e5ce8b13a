"""Generation steps recorded once per shape: the same tokens, and as few recordings as promised."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.inference import steps
from megatron.inference.generate import Token, generate
from megatron.inference.model import LoadedModel, load_model
from megatron.inference.sampling import Sampling
from megatron.inference.steps import Record, Recording, Workspaces, rows_to_keep
from megatron.models.kv_cache import KVCache
from tests.support.combinations import mark_repeats
from tests.support.tape import Recorder
from tests.unit.convert.support import MODELS, NOT_CLASSIC, saved_model
from tests.unit.inference.support import trained_model

CPU = torch.device("cpu")
GREEDY = Sampling(greedy=True)
PROMPTS = [[3, 8, 13], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "BLOCK", 4)


def recorded(model: LoadedModel, record: Record) -> LoadedModel:
    return dataclasses.replace(model, workspaces=Workspaces(record))


def never_ending(model: LoadedModel) -> LoadedModel:
    """The model with texts as long as possible."""
    with torch.no_grad():
        model.stage.output_weight[model.tokenizer.eod] = 0.0
    return model


EACH_STEP = [
    *("gpt2", "llama, 2 groups, untied", "llama with biases", "llama, yarn", "neox, half rotated, exact gelu, untied"),
    *("qwen3, 2 groups, with a window", "qwen2, windows in some layers", "gemma2", "gemma3", "neox, side by side"),
]
"""Models that have each kind of position, window, norm and activation of a step between them."""


@pytest.mark.parametrize("name", mark_repeats([*MODELS, *NOT_CLASSIC], EACH_STEP))
def test_every_kind_of_model_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Rows of unequal lengths, past a sliding window and then past the model's own, twice in the same memory."""
    model = load_model(saved_model(tmp_path, {**MODELS, **NOT_CLASSIC}[name]), device=torch.device("cpu"))
    recorder = Recorder()
    replaying = recorded(model, recorder)
    for prompts in (PROMPTS, [[2, 2], [9, 8, 7], [6]]):
        expected = generate(model, prompts, 14, GREEDY, top=2)
        samples = generate(replaying, prompts, 14, GREEDY, top=2)
        assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
        for ours, theirs in zip(samples, expected, strict=True):
            for detail, other in zip(ours.details, theirs.details, strict=True):
                assert detail.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert recorder.replayed > 0


def test_a_shape_is_recorded_once_for_all_texts() -> None:
    model = never_ending(trained_model())
    recorder = Recorder()
    replaying = recorded(model, recorder)
    # Positions 3 to 11 are computed in steps of 4, 8 and 12 positions; the first step of each is not recorded.
    (first,) = generate(replaying, [[1, 2, 3]], 10, GREEDY)
    assert len(first.tokens) == 13
    assert (recorder.recorded, recorder.replayed) == (2, 6)  # a position of 4: seen, but not recorded
    (again,) = generate(replaying, [[1, 2, 3]], 10, GREEDY)
    assert again.tokens == first.tokens
    assert (recorder.recorded, recorder.replayed) == (3, 6 + 9)
    for prompt in ([1], [9, 2]):  # other positions of the shapes that are recorded
        (recorded_sample,), (expected,) = (generate(variant, [prompt], 9, GREEDY) for variant in (replaying, model))
        assert recorded_sample.tokens == expected.tokens
        logprobs = [[token.logprob for token in sample.details] for sample in (recorded_sample, expected)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
    assert recorder.recorded == 3
    generate(replaying, [[4], [5, 6]], 4, GREEDY)  # two rows: other memory
    assert recorder.recorded > 3
    before = recorder.recorded
    (last,) = generate(replaying, [[1, 2, 3]], 10, GREEDY)
    assert last.tokens == first.tokens
    assert recorder.recorded == before + 2


def test_a_text_that_ends_at_once_is_not_recorded() -> None:
    recorder = Recorder()
    generate(recorded(never_ending(trained_model()), recorder), [[1, 2, 3, 4]], 2, GREEDY)
    assert (recorder.recorded, recorder.replayed) == (0, 0)


def test_finished_rows_do_not_change_the_others() -> None:
    model = never_ending(trained_model())
    prompts = [[3], [8, 13], [5], [1, 2, 3], [7]]
    counts = [11, 3, 9, 5, 11]

    def stopping() -> Callable[[int, Token], bool]:
        lengths = [0] * len(counts)

        def enough(row: int, token: Token) -> bool:
            lengths[row] += 1
            return lengths[row] == counts[row]

        return enough

    recorder = Recorder()
    expected = generate(model, prompts, 11, GREEDY, on_token=stopping())
    samples = generate(recorded(model, recorder), prompts, 11, GREEDY, on_token=stopping())
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
    assert [len(sample.tokens) - len(prompt) for sample, prompt in zip(samples, prompts, strict=True)] == counts
    assert recorder.replayed > 5


def test_a_row_may_end_where_the_window_ends() -> None:
    model = never_ending(trained_model())
    prompts = [[1] * model.window, [5], [6, 7]]

    def stops(row: int, token: Token) -> bool:
        return row == 0

    expected = generate(model, prompts, 4, GREEDY, on_token=stops)
    samples = generate(recorded(model, Recorder()), prompts, 4, GREEDY, on_token=stops)
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]


def test_finished_rows_stay_in_memory_while_others_grow() -> None:
    cache = KVCache({0: None}, 3, 8, CPU, block=4)
    cache.set_lengths([2, 8, 3])
    cache.grow_only([0, 2])
    cache.advance()
    assert cache.lengths == cache.positions_b1.flatten().tolist() == [3, 0, 4]
    assert cache.shape == (3, 8)
    cache.keep_rows([2, 0])
    cache.advance()
    assert cache.lengths == cache.positions_b1.flatten().tolist() == [5, 4]
    cache.clear()
    cache.set_lengths([1, 1])
    cache.advance()
    assert cache.lengths == cache.positions_b1.flatten().tolist() == [2, 2]


def test_recordings_are_freed_with_their_memory() -> None:
    space = Workspaces(Recorder()).workspace(2, 8, lambda capacity: KVCache({0: None}, 2, 8, CPU))
    space.cache.set_lengths([1, 1])
    results = [space.step([0, 0], lambda: torch.zeros(2)) for _ in range(2)]
    space.cache.lengths = [1, 1]  # the same shape again
    results += [space.step([0, 0], lambda: torch.zeros(2)) for _ in range(2)]
    reference = weakref.ref(results[-1])
    results.clear()
    gc.collect()
    assert reference() is not None
    space.shrink([1])
    gc.collect()
    assert reference() is None


def test_rows_stay_in_memory_until_half_have_ended() -> None:
    assert rows_to_keep([4, 5, 6, 7], {4, 5, 6, 7}, recorded=True) is None
    assert rows_to_keep([4, 5, 6, 7], {4, 6, 7}, recorded=True) is None
    assert rows_to_keep([4, 5, 6, 7], {5, 7}, recorded=True) == [1, 3]
    assert rows_to_keep([4, 5, 6, 7], {4, 6, 7}, recorded=False) == [0, 2, 3]


def test_a_failed_recording_is_noted_once_and_computed_without(capsys: pytest.CaptureFixture[str]) -> None:
    model, attempts = never_ending(trained_model()), []

    def refuse(compute: Callable[[], Tensor]) -> Recording:
        attempts.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    replaying = recorded(model, refuse)
    expected = generate(model, [[1, 2, 3]], 10, GREEDY)
    for _ in range(2):
        assert generate(replaying, [[1, 2, 3]], 10, GREEDY)[0].tokens == expected[0].tokens
    assert generate(replaying, PROMPTS, 5, GREEDY)[0].tokens == generate(model, PROMPTS, 5, GREEDY)[0].tokens
    assert len(attempts) == 1
    note = "note: tokens are generated without CUDA graphs, slower: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().err == note


def test_without_a_recorder_steps_are_computed_each_time() -> None:
    calls: list[int] = []

    def compute() -> Tensor:
        calls.append(1)
        return torch.zeros(1)

    space = Workspaces().workspace(1, 4, lambda capacity: KVCache({0: None}, 1, capacity, CPU))
    for _ in range(3):
        space.cache.lengths = [1]  # the same shape each time
        space.step([0], compute)
    assert len(calls) == 3
