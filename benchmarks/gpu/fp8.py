"""Section fp8: training at 2.7B in bf16 and with 8-bit products, and the losses of a small model with them."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.setting import Claim, Setting
from benchmarks.gpu.train import GPT_2_7B, SHARE
from benchmarks.rows import RowLog
from benchmarks.tables import Cells, Column
from benchmarks.train_sides import Shape
from benchmarks.train_steps import run_config
from benchmarks.turns import timed
from megatron.data.batch import Batch
from megatron.distributed.topology import single_process
from megatron.kernels.fp8 import EIGHT_BIT_UNITS
from megatron.parallel.tensor.products import Recipe
from megatron.training.assembly import Engines, build_engines
from megatron.training.step import train_step

TITLE = "Training with 8-bit products"
NOTE = (
    "Speed: one model in one process, whose layers are switched between the kinds of products. These take turns;"
    " figures are medians over the turns, ratios to bf16 medians over pairs. TFLOP/s count what the model needs; the"
    " limit is the device's peak in bf16 for all rows. Loss: the mean of the last tenth of the steps of a small model,"
    " each from the same weights on the same text."
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
TOY = Shape(2, 64, 16, 2, vocab=100)
SMALL, SMALL_STEPS = Shape(4, 512, 256, 16, vocab=512), 1000
TOY_STEPS = 20


def _small(setting: Setting) -> tuple[Shape, int]:
    return (TOY, TOY_STEPS) if setting.toy else (SMALL, SMALL_STEPS)


def speed_key(setting: Setting, products: str) -> str:
    """The key of a row of speed."""
    return f"{(TOY if setting.toy else GPT_2_7B).name}, {products}"


def loss_key(setting: Setting, products: str) -> str:
    """The key of a row of loss."""
    shape, steps = _small(setting)
    return f"{shape.name}, {steps} steps, {products}"


def keys(setting: Setting) -> list[str]:
    """Speeds of all kinds of products, then losses."""
    return [key(setting, products) for key in (speed_key, loss_key) for products in PRODUCTS]


def _engines(setting: Setting, shape: Shape) -> Engines:
    backend = "nccl" if setting.device == "cuda" else "gloo"
    config = run_config(shape, BF16, {"distributed_backend": backend}, shape.batch, 1, 128)
    return build_engines(config, single_process(setting.device), shape.vocab)


def _choose(engines: Engines, products: str) -> None:
    for stage in engines.stages:
        stage.compute_in_fp8(PRODUCTS[products])


def text(shape: Shape, step: int) -> torch.Tensor:
    """Tokens of a step (samples, seq + 1): each follows from the one before it, but for a choice among four."""
    generator = torch.Generator().manual_seed(step)
    choices = torch.randint(0, 4, (shape.samples, shape.seq), generator=generator)
    tokens = [torch.randint(0, shape.vocab, (shape.samples,), generator=generator)]
    for choice in choices.unbind(1):
        tokens.append((tokens[-1] * 5 + choice * 7 + 1) % shape.vocab)
    return torch.stack(tokens, dim=1)


def _batches(shape: Shape, step: int, device: torch.device) -> list[Batch]:
    tokens = text(shape, step)
    return [
        Batch(
            sample_ids_b=torch.arange(shape.batch),
            draw_ids_b=torch.arange(shape.batch),
            tokens_bs=part[:, :-1].contiguous(),
            labels_bs=part[:, 1:].contiguous(),
            loss_mask_bs=torch.ones(shape.batch, shape.seq),
        ).to(device)
        for part in tokens.split(shape.batch)
    ]


def measure(setting: Setting, wanted: Sequence[str], report: RowLog) -> None:
    """Measures speeds in turns, then losses one after another."""
    if setting.device == "cuda" and torch.cuda.get_device_capability() < EIGHT_BIT_UNITS:
        raise SystemExit("this GPU has no 8-bit units")
    if any(speed_key(setting, products) in wanted for products in PRODUCTS):
        _speeds(setting, wanted, report)
    gc.collect()
    losses: dict[str, float] = {}
    kinds = [products for products in PRODUCTS if loss_key(setting, products) in wanted]
    for products in [BF16, *(kind for kind in kinds if kind != BF16)] if kinds else []:
        report.begin(loss_key(setting, products))
        losses[products] = _loss(setting, products, report)
        cells: dict[str, Any] = {"loss": losses[products]}
        if products != BF16:
            cells["loss_ratio"] = losses[products] / losses[BF16]
        report.row(loss_key(setting, products), model=_small(setting)[0].name, products=products, **cells)


def _speeds(setting: Setting, wanted: Sequence[str], report: RowLog) -> None:
    shape = TOY if setting.toy else GPT_2_7B
    report.begin(speed_key(setting, BF16))
    engines = _engines(setting, shape)
    batches = _batches(shape, 0, engines.topology.device)
    report.begin(speed_key(setting, BF16))  # a sign of life: weights of this size take a while
    seconds: dict[str, list[float]] = {products: [] for products in PRODUCTS}

    def step(products: str) -> float:
        _choose(engines, products)
        return timed(partial(train_step, engines, batches, 0, 1e-4, 0.01), setting.device)

    # Recorded as soon as there are figures: a limit of time may take the turns that are left.
    for products, found in seconds.items():
        report.begin(speed_key(setting, products))
        step(products)  # compiles
        found.append(step(products))
        _record_speeds(setting, shape, seconds, wanted, report)
    for _ in range(TURNS - 1):
        for products, found in seconds.items():
            found.append(step(products))
        _record_speeds(setting, shape, seconds, wanted, report)


def _record_speeds(
    setting: Setting, shape: Shape, seconds: Mapping[str, Sequence[float]], wanted: Sequence[str], report: RowLog
) -> None:
    """Records the speeds of the turns so far; rows of fewer turns are overwritten."""
    for products, found in seconds.items():
        if not found or speed_key(setting, products) not in wanted:
            continue
        rate = shape.flops() / statistics.median(found)
        cells: dict[str, Any] = {"of_limit": rate / setting.peak_flops} if setting.peak_flops else {}
        if products != BF16:
            cells["ratio"] = statistics.median(a / b for a, b in zip(seconds[BF16], found, strict=True))
        report.row(
            speed_key(setting, products), model=shape.name, products=products, tflops=rate / 1e12,
            tokens_per_s=shape.samples * shape.seq / statistics.median(found), turns=len(found), **cells,
        )  # fmt: skip


def _loss(setting: Setting, products: str, report: RowLog) -> float:
    """The mean loss of the last tenth of a small model's steps."""
    shape, steps = _small(setting)
    engines = _engines(setting, shape)
    _choose(engines, products)
    losses = []
    for step in range(steps):
        if step % (steps // 4) == 0:
            report.begin(loss_key(setting, products))
        taken = _batches(shape, step, engines.topology.device)
        losses.append(train_step(engines, taken, step, min(1.0, step / 50) * 1e-3, 0.01).loss)
    return statistics.fmean(losses[-steps // 10 :])


def tidy() -> None:
    """Does nothing: a killed section leaves nothing."""


def claims(rows: Mapping[str, Cells]) -> list[Claim]:
    """Claims: the speed of tensorwise products, their losses, and the share of the peak in bf16."""
    made = []
    for cells in rows.values():
        name = f"{cells['model']}, {cells['products']}"
        if "loss_ratio" in cells:
            made.append(Claim(f"fp8, {name}: bf16's loss over its", 0.999, (1 / cells["loss_ratio"],)))
        elif cells["products"] == "tensorwise":
            made.append(Claim(f"fp8, {name}: tokens/s over bf16", 1.15, (cells["ratio"],)))
        elif cells["products"] == BF16 and cells["model"] in SHARE and "of_limit" in cells:
            made.append(Claim(f"train, {cells['model']}: of the peak", SHARE[cells["model"]], (cells["of_limit"],)))
    return made
