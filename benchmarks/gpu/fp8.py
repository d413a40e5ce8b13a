"""Section fp8: training at 2.7B in bf16 and with 8-bit products, and the losses of a small model with them."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.train import GPT_2_7B, TOY_GPT
from benchmarks.models import Shape
from benchmarks.report import Column
from benchmarks.rows import RowLog
from benchmarks.steps import run_config
from benchmarks.turns import timed
from megatron.data.batch import Batch
from megatron.distributed.topology import single_process
from megatron.kernels.fp8 import EIGHT_BIT_UNITS
from megatron.parallel.tensor.products import Recipe
from megatron.training.assembly import Engines, build_engines
from megatron.training.step import train_step

TITLE = "Training with 8-bit products"
NOTE = (
    "Speed: one model in one process, whose layers switch between the kinds of products. These take turns; figures are"
    " medians over the turns, ratios to bf16 medians over pairs. TFLOP/s count the model's operations; the limit is the"
    " device's peak in bf16 for all rows. Loss: the mean over the last tenth of a small model's steps, with the same"
    " initial weights and text in each row."
)
COLUMNS = (
    Column("model", "model"),
    Column("products", "products"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("over bf16", "ratio", ".2f"),
    Column("TFLOP/s", "tflops", ",.1f"),
    Column("measured/limit", "of_limit", ".3f"),
    Column("turns", "turns"),
    Column("loss", "loss", ".4f"),
    Column("loss over bf16's", "loss_ratio", ".5f"),
)
WEIGHT = 20.0
PATIENCE_SECONDS = 120.0

BF16 = "bf16"
PRODUCTS: dict[str, Recipe | None] = {BF16: None, "tensorwise": "tensorwise", "rowwise": "rowwise"}
TURNS = 5
SMALL, SMALL_STEPS = Shape(4, 512, 256, 16, vocab=512), 1000
TOY_STEPS = 20


def speed_key(setting: Setting, products: str) -> str:
    return f"{(TOY_GPT if setting.toy else GPT_2_7B).name}, {products}"


def loss_key(setting: Setting, products: str) -> str:
    shape, steps = (TOY_GPT, TOY_STEPS) if setting.toy else (SMALL, SMALL_STEPS)
    return f"{shape.name}, {steps} steps, {products}"


def keys(setting: Setting) -> list[str]:
    """Speeds of all kinds of products, then losses."""
    return [key(setting, products) for key in (speed_key, loss_key) for products in PRODUCTS]


def build(setting: Setting, shape: Shape) -> Engines:
    """Return the engines of a training in bf16."""
    backend = "nccl" if setting.device == "cuda" else "gloo"
    config = run_config(shape, BF16, {"distributed_backend": backend}, shape.batch, 1, 128)
    return build_engines(config, single_process(setting.device), shape.vocab)


def _select_products(engines: Engines, products: str) -> None:
    for stage in engines.stages:
        stage.compute_in_fp8(PRODUCTS[products])


def predictable_batches(shape: Shape, step: int, device: torch.device) -> list[Batch]:
    """Micro-batches of a step; each token of their text is one of four that the previous token determines."""
    generator = torch.Generator().manual_seed(step)
    choices = torch.randint(0, 4, (shape.samples, shape.seq), generator=generator)
    columns = [torch.randint(0, shape.vocab, (shape.samples,), generator=generator)]
    for choice in choices.unbind(1):
        columns.append((columns[-1] * 5 + choice * 7 + 1) % shape.vocab)
    return [
        Batch(
            sample_ids_b=torch.arange(shape.batch),
            draw_ids_b=torch.arange(shape.batch),
            tokens_bs=text_bs[:, :-1].contiguous(),
            labels_bs=text_bs[:, 1:].contiguous(),
            loss_mask_bs=torch.ones(shape.batch, shape.seq),
        ).to(device)
        for text_bs in torch.stack(columns, dim=1).split(shape.batch)
    ]


def measure(setting: Setting, row_keys: Sequence[str], log: RowLog) -> None:
    """Measure speeds in turns, then losses."""
    if setting.device == "cuda" and torch.cuda.get_device_capability() < EIGHT_BIT_UNITS:
        raise SystemExit("this GPU has no 8-bit units")
    if any(speed_key(setting, products) in row_keys for products in PRODUCTS):
        _measure_speeds(setting, row_keys, log)
    gc.collect()
    missing = [products for products in PRODUCTS if loss_key(setting, products) in row_keys]
    shape, steps = (TOY_GPT, TOY_STEPS) if setting.toy else (SMALL, SMALL_STEPS)
    losses: dict[str, float] = {}
    for products in [BF16, *(other for other in missing if other != BF16)] if missing else []:
        key = loss_key(setting, products)
        losses[products] = _train(setting, shape, steps, products, partial(log.begin, key))
        cells: dict[str, Any] = {"model": shape.name, "products": products, "loss": losses[products]}
        if products != BF16:
            cells["loss_ratio"] = losses[products] / losses[BF16]
        log.row(key, **cells)


def _measure_speeds(setting: Setting, row_keys: Sequence[str], log: RowLog) -> None:
    """Measure steps in turns; rows are recorded after every turn, since a time limit may end the measurement."""
    shape = TOY_GPT if setting.toy else GPT_2_7B
    log.begin(speed_key(setting, BF16))
    engines = build(setting, shape)
    batches = predictable_batches(shape, 0, engines.topology.device)
    log.begin(speed_key(setting, BF16))  # a sign of life: weights of this size take a while
    seconds: dict[str, list[float]] = {products: [] for products in PRODUCTS}

    def step(products: str) -> float:
        _select_products(engines, products)
        return timed(partial(train_step, engines, batches, 0, 1e-4, 0.01), setting.device)

    for turn in range(TURNS):
        for products in PRODUCTS:
            log.begin(speed_key(setting, products))
            if turn == 0:
                step(products)  # compiles
            seconds[products].append(step(products))
            if speed_key(setting, products) in row_keys:
                log.row(speed_key(setting, products), **_speed_cells(setting, shape, seconds, products))


def _speed_cells(setting: Setting, shape: Shape, seconds: dict[str, list[float]], products: str) -> dict[str, Any]:
    median = statistics.median(seconds[products])
    rate = shape.flops() / median
    pairs = list(zip(seconds[BF16], seconds[products], strict=True))
    return {
        "model": shape.name,
        "products": products,
        "tokens_per_s": shape.tokens / median,
        "ratio": None if products == BF16 else statistics.median(bf16_s / seconds_s for bf16_s, seconds_s in pairs),
        "tflops": rate / 1e12,
        "of_limit": rate / setting.peak_flops if setting.peak_flops else None,
        "turns": len(pairs),
    }


def _train(setting: Setting, shape: Shape, steps: int, products: str, sign_of_life: Callable[[], None]) -> float:
    """Train a small model; return the mean loss of the last tenth of the steps."""
    sign_of_life()
    engines = build(setting, shape)
    _select_products(engines, products)
    losses = []
    for step in range(steps):
        if step % (steps // 4) == 0:
            sign_of_life()
        batches = predictable_batches(shape, step, engines.topology.device)
        losses.append(train_step(engines, batches, step, min(1.0, step / 50) * 1e-3, 0.01).loss)
    return statistics.fmean(losses[-steps // 10 :])
