"""Section generate: continuing a prompt, compared with Hugging Face's generate, in bf16."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.generate import MAX_LENGTH, load_converted, weights_of
from benchmarks.generate import measure as measure_model
from benchmarks.gpu.setting import Setting
from benchmarks.models import Shape, hugging_face
from benchmarks.report import Column
from benchmarks.rows import RowLog
from benchmarks.turns import timed
from megatron.inference.generate import generate
from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.inference.steps import Workspaces

TITLE = "Generation, bf16, greedy, one prompt"
NOTE = (
    "Both sides have the same random weights and take turns in one process; prompts of 64 tokens, 128 new tokens. The"
    " limit is that of one token a step: the bytes of all weights at the rate of a large copy. Without graphs, ours"
    " launches each kernel of a token separately."
)
COLUMNS = (
    Column("model", "model"),
    Column("tokens/s", "tokens_per_s", ",.1f"),
    Column("Hugging Face", "their_tokens_per_s", ",.1f"),
    Column("ratio", "ratio", ".2f"),
    Column("without graphs", "eager_tokens_per_s", ",.1f"),
    Column("limit, tokens/s", "limit", ",.0f"),
    Column("measured/limit", "of_limit", ".3f"),
    Column("equal tokens", "equal", ".0%"),
)
WEIGHT = 10.0
PATIENCE_SECONDS = 90.0

SMALL, LARGE = "GPT-2 small (L12 h768)", "GPT-2 form, 1.3B (L24 h2048)"
REAL = {SMALL: (Shape(12, 768, MAX_LENGTH, 1), 3), LARGE: (Shape(24, 2048, MAX_LENGTH, 1), 2)}
TOY = {"toy": (Shape(2, 64, MAX_LENGTH, 1, vocab=512), 2)}
"""Shapes and measured turns of each side, by the name of the row."""


def keys(setting: Setting) -> list[str]:
    return list(TOY if setting.toy else REAL)


def measure(setting: Setting, row_keys: Sequence[str], log: RowLog) -> None:
    """Measure both sides on the same weights."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("transformers is not installed")
    device = torch.device(setting.device)
    prompt_length, new = (8, 8) if setting.toy else (64, 128)
    for name, (shape, turns) in (TOY if setting.toy else REAL).items():
        if name not in row_keys:
            continue
        sign_of_life = partial(log.begin, name)
        sign_of_life()
        with device:
            theirs = hugging_face(shape, use_cache=True).eval().to(torch.bfloat16)
        sign_of_life()
        ours = load_converted(theirs, torch.bfloat16, device)
        sign_of_life()
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(0, shape.vocab - 1, (1, prompt_length), generator=generator).tolist()
        figures = measure_model(ours, theirs, prompts, new, turns, sign_of_life)
        limit = setting.copy_bytes_per_s / sum(weight.numel() * weight.element_size() for weight in weights_of(ours))
        figures |= {"limit": limit, "of_limit": figures["tokens_per_s"] / limit}
        log.row(name, model=name, **figures)  # before the rest, which a time limit may cut off
        figures["eager_tokens_per_s"] = eager_rate(replace(ours, workspaces=Workspaces()), prompts, new)
        log.row(name, model=name, **figures)


def eager_rate(model: LoadedModel, prompts: Sequence[Sequence[int]], new: int) -> float:
    """Tokens per second of the second of two runs."""
    run = partial(generate, model, prompts, new, Sampling(greedy=True))
    run()
    return len(prompts) * new / timed(run, model.device.type)
