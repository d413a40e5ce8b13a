"""Section generate: continuing one prompt, beside Hugging Face's generate, in bf16."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.generate import gpt2, loaded, synchronizer, weights_of
from benchmarks.generate import measure as measure_model
from benchmarks.gpu.book import Cells, Claim, Column, SectionLog, Setting

TITLE = "Generation, bf16, greedy, one prompt"
NOTE = (
    "Both sides have the same random weights and take turns in one process; prompts of 64 tokens, 128 new ones. The"
    " limit is that of one token a step: the bytes of all weights at the rate of a large copy."
)
COLUMNS = (
    Column("model", "model"),
    Column("tokens/s", "tokens_per_s", ",.1f"),
    Column("Hugging Face", "their_tokens_per_s", ",.1f"),
    Column("ratio", "ratio", ".2f"),
    Column("limit, tokens/s", "limit", ",.0f"),
    Column("measured/limit", "of_limit", ".3f"),
    Column("equal tokens", "equal", ".0%"),
)
LIMIT_SECONDS = 75.0
PATIENCE_SECONDS = 45.0


@dataclass(frozen=True)
class GPTShape:
    """A model of GPT-2's architecture.

    Args:
        name: name of the row.
        layers, hidden, vocab: sizes of the model.
        turns: number of measured runs of each side.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    turns: int

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)


SMALL = GPTShape("GPT-2 small (L12 h768)", 12, 768, 50257, 3)
LARGE = GPTShape("GPT-2 form, 1.3B (L24 h2048)", 24, 2048, 50257, 2)
TOY = GPTShape("toy", 2, 64, 512, 2)


def _models(setting: Setting) -> tuple[GPTShape, ...]:
    return (TOY,) if setting.toy else (SMALL, LARGE)


def keys(setting: Setting) -> list[str]:
    """The models."""
    return [model.name for model in _models(setting)]


def measure(setting: Setting, wanted: Sequence[str], report: SectionLog) -> None:
    """Measures both sides on the same weights."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("transformers is not installed")
    device, sync = torch.device(setting.device), synchronizer(setting.device)
    prompt, new = (8, 8) if setting.toy else (64, 128)
    for model in _models(setting):
        if model.name not in wanted:
            continue
        report.begin(model.name)
        with device:
            theirs = gpt2(model.layers, model.hidden, model.heads, model.vocab).to(torch.bfloat16)
        ours = loaded(theirs, torch.bfloat16, device)
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(0, model.vocab - 1, (1, prompt), generator=generator).tolist()
        own, other, ratio, equal = measure_model(ours, theirs, prompts, new, model.turns, sync)
        size = sum(weight.numel() * weight.element_size() for weight in weights_of(ours))
        limit = setting.copy_bytes_per_s / size
        report.row(
            model.name, model=model.name, tokens_per_s=own, their_tokens_per_s=other, ratio=ratio, limit=limit,
            of_limit=own / limit, equal=equal,
        )  # fmt: skip


def tidy() -> None:
    """Does nothing: a killed section leaves nothing."""


def claims(rows: Mapping[str, Cells]) -> list[Claim]:
    """Claims: a multiple of Hugging Face's rate at the small size, a share of the bound at the large one."""
    made = []
    if SMALL.name in rows:
        made.append(Claim("generate, GPT-2 small: tokens/s over Hugging Face", 5.0, (rows[SMALL.name]["ratio"],)))
    if LARGE.name in rows:
        made.append(Claim("generate, 1.3B: of the bound", 0.4, (rows[LARGE.name]["of_limit"],)))
    return made
