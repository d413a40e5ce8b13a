"""Section train: a step of the trainer compared with nanoGPT's model and Hugging Face's, compiled, in bf16."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.comparison import COLUMNS as COLUMNS
from benchmarks.comparison import OURS, StepComparison, row_key
from benchmarks.gpu.setting import Setting
from benchmarks.models import Shape
from benchmarks.rows import RowLog
from benchmarks.steps import COMPILED

TITLE = "Training, bf16, one device"
NOTE = (
    "Sides take turns in one run, each in its own process; figures are medians over the turns, ratios medians over"
    " pairs. Ours is the trainer's step with the vocabulary padded as by default; peers have fp32 weights under"
    " autocast (bf16 weights of Mixtral's experts, which autocast does not reach), torch.compile, torch's fused AdamW."
    " A step has micro-batches of b sequences (x their number). TFLOP/s count the model's operations (causal attention,"
    " no padding, no recomputation) on either side; the peak is the device's. Memory is the process's peak."
)
WEIGHT = 28.0
PATIENCE_SECONDS = 150.0

GPT_124M = Shape(12, 768, 1024, 32)
GPT_1_3B = Shape(24, 2048, 2048, 4, micro_batches=2)
GPT_2_7B = Shape(32, 2560, 2048, 2, micro_batches=4)  # for section fp8
LLAMA = Shape(16, 2048, 2048, 4, vocab=128_256, micro_batches=2, llama=True, ffn=5632, groups=8)
MIXTRAL = Shape(12, 1024, 2048, 4, vocab=32_000, micro_batches=2, llama=True, ffn=3584, groups=4, experts=8)
TOY_GPT = Shape(2, 64, 16, 2, vocab=100)
TOY_LLAMA = replace(TOY_GPT, micro_batches=2, llama=True, ffn=128, groups=1)
NANOGPT, HUGGING_FACE = "nanogpt", "hugging-face"
REAL = (
    (GPT_124M, (OURS, NANOGPT + COMPILED)),
    (GPT_1_3B, (OURS, NANOGPT + COMPILED)),
    (GPT_124M, (HUGGING_FACE + COMPILED,)),
    (GPT_1_3B, (HUGGING_FACE + COMPILED,)),
    (LLAMA, (OURS, HUGGING_FACE + COMPILED)),
    (MIXTRAL, (OURS, HUGGING_FACE + COMPILED)),
)
"""Shapes and sides, the most important first: a time limit may cut off the last."""
TOY = (
    (TOY_GPT, (OURS, NANOGPT)),
    (TOY_GPT, (HUGGING_FACE,)),
    (TOY_LLAMA, (OURS, HUGGING_FACE)),
    (replace(TOY_LLAMA, experts=4), (OURS, HUGGING_FACE)),
)
"""The same without compilation, which would take most of a toy's time on a CPU."""


def keys(setting: Setting) -> list[str]:
    """Keys of each shape alone and beside its peers, the most important pairs first."""
    return [row_key(shape, "bf16", side) for shape, names in (TOY if setting.toy else REAL) for side in names]


def measure(setting: Setting, row_keys: Sequence[str], log: RowLog) -> None:
    """Measure one pair after another."""
    cuda, peak = setting.device == "cuda", setting.peak_flops
    threads = max(1, (os.cpu_count() or 1) // 2) if cuda else 1  # weights are drawn on the processor
    turns, seconds = (7, 0.4) if cuda else (1, 0.0)
    for shape, names in TOY if setting.toy else REAL:
        comparison = StepComparison(
            shape, "bf16", threads, setting.device, peak, log, divisor=128, turns=turns, turn_seconds=seconds
        )
        missing = [side for side in names if comparison.key(side) in row_keys]
        for side in list(missing):
            if side.startswith(HUGGING_FACE) and importlib.util.find_spec("transformers") is None:
                missing.remove(side)
                log.failed(comparison.key(side), "transformers is not installed")
        if missing:
            comparison.measure(missing)
