"""Behavior of trained models: answers to canaries, and next-token probabilities at held-out positions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.safety.canaries import Canary
from megatron.base.atomic import atomic_write
from megatron.data.indexed import IndexedDataset
from megatron.inference.generate import generate
from megatron.inference.model import LoadedModel, load_model
from megatron.inference.sampling import Sampling
from megatron.models.context import ForwardContext

_WINDOWS_AT_ONCE = 16


def is_right(canary: Canary, continuation: str) -> bool:
    """Return whether a continuation is the answer, with its end."""
    return continuation == canary.ended_answer


def generate_answers(model: LoadedModel, canaries: Sequence[Canary]) -> list[str]:
    """Continue the canaries' prompts by greedy decoding, to the lengths of the right answers."""
    continuations = [""] * len(canaries)
    by_length: dict[int, list[int]] = {}
    for index, canary in enumerate(canaries):
        by_length.setdefault(len(canary.ended_answer), []).append(index)
    for length, indices in by_length.items():
        prompts = [model.tokenizer.tokenize(canaries[index].prompt) for index in indices]
        results = generate(model, prompts, length, Sampling(greedy=True), [0] * len(prompts))
        for index, result in zip(indices, results, strict=True):
            continuations[index] = model.tokenizer.detokenize(result.tokens[result.prompt_length :])
    return continuations


def measure_canaries(checkpoint: Path, canaries: Mapping[str, Sequence[Canary]], output: Path) -> dict[str, float]:
    """Share of right answers by task; read from the output file if that exists."""
    if not output.exists():
        model = load_model(checkpoint, device=torch.device("cpu"))
        shares = {
            task: sum(map(is_right, of_task, generate_answers(model, of_task))) / len(of_task)
            for task, of_task in canaries.items()
        }
        with atomic_write(output) as stream:
            stream.write(json.dumps(shares).encode())
    measured: dict[str, float] = json.loads(output.read_text())
    return measured


def heldout_windows(prefix: Path, places: int, length: int) -> NDArray[Any]:
    """Windows of held-out tokens, (windows, length), spread over the text, with ``places`` positions to predict."""
    data = IndexedDataset(prefix)
    tokens = data.read_range(0, len(data)).astype(np.int64)
    count = min(places // length, len(tokens) // length)
    starts = [index * (len(tokens) - length) // max(count - 1, 1) for index in range(count)]
    return np.stack([tokens[start : start + length] for start in starts])


@torch.no_grad()
def measure_places(checkpoint: Path, windows_ns: NDArray[Any], output: Path) -> NDArray[Any]:
    """Log-probabilities after each token of the windows, (places, vocabulary); from the output file if that exists."""
    if not output.exists():
        model = load_model(checkpoint, device=torch.device("cpu"))
        logprobs = []
        for first in range(0, len(windows_ns), _WINDOWS_AT_ONCE):
            x_sbh = model.hidden(torch.from_numpy(windows_ns[first : first + _WINDOWS_AT_ONCE]), ForwardContext())
            assert x_sbh is not None
            logits_bsv = model.stage.logits(x_sbh).transpose(0, 1)[..., : model.tokenizer.vocab_size]
            logprobs.append(logits_bsv.float().log_softmax(dim=-1).flatten(0, 1).numpy())
        with atomic_write(output) as stream:
            np.save(stream, np.concatenate(logprobs))
    measured: NDArray[Any] = np.load(output)
    return measured


@dataclass(frozen=True)
class Change:
    """Difference between the next-token predictions of two models.

    Args:
        flips: share of the positions at which their likeliest tokens differ.
        kl: mean divergence of the second from the first, in nats.
    """

    flips: float
    kl: float


def compare_predictions(reference_pv: NDArray[Any], other_pv: NDArray[Any]) -> Change:
    """Compare log-probabilities with those of a reference."""
    flips = float((reference_pv.argmax(axis=1) != other_pv.argmax(axis=1)).mean())
    reference = reference_pv.astype(np.float64)
    return Change(flips, float((np.exp(reference) * (reference - other_pv)).sum(axis=1).mean()))


def mean_change(changes: Sequence[Change]) -> Change:
    """Return the means of some changes."""
    flips, kl = (sum(column) / len(changes) for column in zip(*((c.flips, c.kl) for c in changes), strict=True))
    return Change(flips, kl)


def mean_pairwise_change(models: Sequence[NDArray[Any]]) -> Change:
    """Return the mean change over all pairs of models, from the earlier to the later."""
    return mean_change([compare_predictions(first, second) for first, second in itertools.combinations(models, 2)])
