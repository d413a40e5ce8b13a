"""Section generate: continuing one prompt, beside Hugging Face's generate, in bf16."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.generate import LENGTH, loaded, weights_of
from benchmarks.generate import measure as measure_model
from benchmarks.gpu.setting import Claim, Setting
from benchmarks.rows import RowLog
from benchmarks.tables import Cells, Column
from benchmarks.train_sides import Shape, hugging_face
from benchmarks.turns import synchronize
from megatron.inference.generate import generate
from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.inference.steps import Workspaces

TITLE = "Generation, bf16, greedy, one prompt"
NOTE = (
    "Both sides have the same random weights and take turns in one process; prompts of 64 tokens, 128 new ones. The"
    " limit is that of one token a step: the bytes of all weights at the rate of a large copy. Without graphs, ours"
    " launches each kernel of a token by itself."
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
REAL = {SMALL: (Shape(12, 768, LENGTH, 1), 3), LARGE: (Shape(24, 2048, LENGTH, 1), 2)}
TOY = {"toy": (Shape(2, 64, LENGTH, 1, vocab=512), 2)}
"""Shapes, and numbers of measured runs of each side, by the name of the row."""


def _models(setting: Setting) -> dict[str, tuple[Shape, int]]:
    return TOY if setting.toy else REAL


def keys(setting: Setting) -> list[str]:
    """The models."""
    return list(_models(setting))


def measure(setting: Setting, wanted: Sequence[str], report: RowLog) -> None:
    """Measures both sides on the same weights."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("transformers is not installed")
    device = torch.device(setting.device)
    prompt, new = (8, 8) if setting.toy else (64, 128)
    for name, (shape, turns) in _models(setting).items():
        if name not in wanted:
            continue
        alive = partial(report.begin, name)
        alive()
        with device:
            theirs = hugging_face(shape, use_cache=True).eval().to(torch.bfloat16)
        alive()
        ours = loaded(theirs, torch.bfloat16, device)
        alive()
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(0, shape.vocab - 1, (1, prompt), generator=generator).tolist()
        found = measure_model(ours, theirs, prompts, new, turns, alive)
        size = sum(weight.numel() * weight.element_size() for weight in weights_of(ours))
        limit = setting.copy_bytes_per_s / size
        found |= {"limit": limit, "of_limit": found["tokens_per_s"] / limit}
        report.row(name, model=name, **found)  # at once: a limit of time may take what follows
        found["eager_tokens_per_s"] = _rate(replace(ours, workspaces=Workspaces()), prompts, new)
        report.row(name, model=name, **found)


def _rate(model: LoadedModel, prompts: Sequence[Sequence[int]], new: int) -> float:
    """Tokens per second of the second of two runs."""
    for _ in range(2):
        synchronize(model.device.type)
        start = time.perf_counter()
        generate(model, prompts, new, Sampling(greedy=True))
        synchronize(model.device.type)
    return len(prompts) * new / (time.perf_counter() - start)


def tidy() -> None:
    """Does nothing: a killed section leaves nothing."""


def claims(rows: Mapping[str, Cells]) -> list[Claim]:
    """Claims: a multiple of Hugging Face's rate at the small size, a share of the bound at the large one."""
    made = []
    if SMALL in rows:
        made.append(Claim("generate, GPT-2 small: tokens/s over Hugging Face", 5.0, (rows[SMALL]["ratio"],)))
    if LARGE in rows:
        made.append(Claim("generate, 1.3B: of the bound", 0.4, (rows[LARGE]["of_limit"],)))
    return made
