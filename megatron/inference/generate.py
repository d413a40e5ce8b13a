"""Autoregressive generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.model.context import ForwardContext


@dataclass(frozen=True)
class Generated:
    """One continuation.

    Args:
        tokens: ids of the prompt and of what follows it, without the end of document.
        prompt_length: how many of them are the prompt.
        finished: the model ended the document.
    """

    tokens: list[int]
    prompt_length: int
    finished: bool


@torch.no_grad()
def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int | None = None,
) -> list[Generated]:
    """Continues each prompt until the end of document or ``max_new_tokens``.

    Prompts may differ in length: shorter ones begin to generate while longer ones are still being read, and what lies
    behind a row's newest token cannot influence it, since attention is causal. Beyond the model's longest sequence the
    window moves along.

    Args:
        model: a loaded model.
        prompts: token ids; an empty prompt starts from the end-of-document token, as every document does.
        max_new_tokens: for each prompt.
        sampling: how tokens are chosen.
        seed: makes the draw repeatable.
    """
    stage, eod = model.stage, model.tokenizer.eod
    window = model.config.model.max_position_embeddings
    device = next(stage.parameters()).device
    generator = None
    if seed is not None:
        generator = torch.Generator(device=device).manual_seed(seed)
    started_empty = [not prompt for prompt in prompts]
    rows = [list(prompt) or [eod] for prompt in prompts]
    lengths = [len(row) for row in rows]
    finished = [False] * len(rows)
    for _ in range(max_new_tokens):
        active = [i for i, done in enumerate(finished) if not done]
        if not active:
            break
        recent = [rows[i][-window:] for i in active]
        longest = max(len(row) for row in recent)
        tokens_bs = torch.tensor([row + [eod] * (longest - len(row)) for row in recent], device=device)
        x_sbh = stage(tokens_bs, ForwardContext())
        last_1bh = torch.stack([x_sbh[len(row) - 1, b] for b, row in enumerate(recent)]).unsqueeze(0)
        chosen = sampling.choose(stage.logits(last_1bh)[0], generator).tolist()
        for i, token in zip(active, chosen, strict=True):
            if token == eod:
                finished[i] = True
            else:
                rows[i].append(token)
    return [
        Generated(row[1:] if empty else row, length - empty, done)
        for row, empty, length, done in zip(rows, started_empty, lengths, finished, strict=True)
    ]
