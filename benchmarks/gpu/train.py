"""Section train: a step of the trainer beside nanoGPT's model and Hugging Face's, compiled, in bf16."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.gpu.setting import Claim, Setting
from benchmarks.rows import RowLog
from benchmarks.tables import Cells, Column
from benchmarks.train_sides import Shape
from benchmarks.train_steps import process_step
from benchmarks.turns import Side, SideError, in_turns

TITLE = "Training, bf16, one device"
NOTE = (
    "Sides take turns in one run, each in a process of its own; figures are medians over the turns, ratios medians over"
    " pairs. Ours is the trainer's own step with the vocabulary padded as users get it; peers have fp32 weights under"
    " autocast (Mixtral's experts bf16 ones, which autocast does not reach), torch.compile, torch's fused AdamW. A step"
    " is micro-batches of b sequences (x how many). TFLOP/s count what the model needs (causal attention, no padding,"
    " no recomputation) on either side; the limit is the device's peak. Memory is the most that the process allocated."
)
COLUMNS = (
    Column("shape", "shape"),
    Column("beside", "beside"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("theirs", "their_tokens_per_s", ",.0f"),
    Column("ratio", "ratio", ".2f"),
    Column("TFLOP/s", "tflops", ",.1f"),
    Column("limit, tokens/s", "limit", ",.0f"),
    Column("measured/limit", "of_limit", ".3f"),
    Column("GiB", "gib", ".1f"),
    Column("theirs, GiB", "their_gib", ".1f"),
)
WEIGHT = 28.0
PATIENCE_SECONDS = 150.0
TURNS, TURN_SECONDS, WARM = 7, 0.4, 2

GPT_124M = Shape(12, 768, 1024, 32)
GPT_1_3B = Shape(24, 2048, 2048, 4, micro_batches=2)
GPT_2_7B = Shape(32, 2560, 2048, 2, micro_batches=4)  # which section fp8 measures
LLAMA = Shape(16, 2048, 2048, 4, vocab=128_256, micro_batches=2, llama=True, ffn=5632, groups=8)
MIXTRAL = Shape(12, 1024, 2048, 4, vocab=32_000, micro_batches=2, llama=True, ffn=3584, groups=4, experts=8)
_TOY_GPT = Shape(2, 64, 16, 2, vocab=100)
_TOY_LLAMA = replace(_TOY_GPT, micro_batches=2, llama=True, ffn=128, groups=1)
REAL = (
    (GPT_124M, "nanogpt"),
    (GPT_1_3B, "nanogpt"),
    (GPT_124M, "hugging-face"),
    (GPT_1_3B, "hugging-face"),
    (LLAMA, "hugging-face"),
    (MIXTRAL, "hugging-face"),
)
"""Shapes and peers, in the order of what their rows are worth: a limit of time may cut the last ones."""
TOY = (
    (_TOY_GPT, "nanogpt"),
    (_TOY_GPT, "hugging-face"),
    (_TOY_LLAMA, "hugging-face"),
    (replace(_TOY_LLAMA, experts=4), "hugging-face"),
)
OURS = "ours"
WANTED = {"nanogpt": 1.15, "hugging-face": 1.2}
WANTED_OF_EXPERTS = 1.5
SHARE = {GPT_1_3B.name: 0.5, GPT_2_7B.name: 0.5}


def _pairs(setting: Setting) -> dict[tuple[Shape, str], tuple[str, ...]]:
    """The sides that have rows, by shape and peer: ours has its own beside the first peer of a shape."""
    pairs, seen = TOY if setting.toy else REAL, set[Shape]()
    found: dict[tuple[Shape, str], tuple[str, ...]] = {}
    for shape, peer in pairs:
        found[shape, peer] = (peer,) if shape in seen else (OURS, peer)
        seen.add(shape)
    return found


def key_of(shape: Shape, beside: str) -> str:
    """The key of a row."""
    return f"{shape.name}, {beside}"


def keys(setting: Setting) -> list[str]:
    """Keys of each shape alone and beside its peers, the most important pairs first."""
    return [key_of(shape, side) for (shape, _), sides in _pairs(setting).items() for side in sides]


def measure(setting: Setting, wanted: Sequence[str], report: RowLog) -> None:
    """Measures one pair after another."""
    for (shape, _), sides in _pairs(setting).items():
        left = [side for side in sides if key_of(shape, side) in wanted]
        if "hugging-face" in left and importlib.util.find_spec("transformers") is None:
            left.remove("hugging-face")
            report.failed(key_of(shape, "hugging-face"), "transformers is not installed")
        if left:
            _Match(setting, shape, left, report).play()


class _Match:
    """Measures our side of one shape, alone and then in turns with a peer.

    Only one side at a time is built, compiles, or is measured: they share the device and the processors.
    """

    def __init__(self, setting: Setting, shape: Shape, left: Sequence[str], report: RowLog) -> None:
        self.setting, self.shape, self.report, self.left = setting, shape, report, list(left)
        self.own = OURS in self.left
        self.sides: list[Side] = []

    def _start(self, kind: str) -> Side:
        """Starts a side, and waits until it is built and compiled: its first step is over."""
        cuda = self.setting.device == "cuda"
        # The compiler of a CPU would take most of a toy's time.
        threads = max(1, (os.cpu_count() or 1) // 2) if cuda else 1  # weights are drawn on the processor
        device = self.setting.device
        build = partial(process_step, kind, self.shape, "bf16", threads, device, compiled=cuda, divisor=128)
        side = Side(kind, build, device)
        self.sides.append(side)
        side.step()
        return side

    def play(self) -> None:
        """Measures the rows, and ends both sides."""
        try:
            self.report.begin(key_of(self.shape, self.left[0]))
            ours = self._start(OURS)
            if self.own:  # now, as a limit of time may end the section while the peer compiles
                self._alone(ours, in_turns(ours.step, turns=TURNS, warm=WARM).median())
                self.left.remove(OURS)
            for kind in list(self.left):
                self._beside(ours, kind)
        except SideError as error:  # ours: no other row can be had, either
            for kind in self.left:
                self.report.failed(key_of(self.shape, kind), str(error))
        finally:
            for side in self.sides:
                side.kill()

    def _beside(self, ours: Side, kind: str) -> None:
        """Measures a peer in turns with ours, and records its row, and ours from the same turns."""
        key = key_of(self.shape, kind)
        self.report.begin(key)
        try:
            theirs = self._start(kind)
            self.report.begin(key)  # a sign of life
            counts = [max(1, min(20, int(TURN_SECONDS / side.step(WARM)))) for side in (ours, theirs)]
            turns = in_turns(partial(ours.step, counts[0]), partial(theirs.step, counts[1]), turns=TURNS)
            their_bytes = theirs.close()
        except SideError as error:
            if error.kind == OURS:
                raise
            self.report.failed(key, str(error))
            self.left.remove(kind)
            return
        if self.own:
            self._alone(ours, turns.median())
        self.report.row(
            key,
            **self._cells(ours, kind, turns.median()),
            their_tokens_per_s=self._tokens() / turns.median(1),
            ratio=turns.ratio(),
            their_gib=their_bytes / 2**30,
        )

    def _tokens(self) -> int:
        return self.shape.samples * self.shape.seq

    def _cells(self, ours: Side, beside: str, seconds: float) -> dict[str, object]:
        flops = self.shape.flops()
        return {
            "shape": self.shape.name,
            "beside": beside,
            "tokens_per_s": self._tokens() / seconds,
            "tflops": flops / seconds / 1e12,
            "limit": self._tokens() * self.setting.peak_flops / flops,
            "of_limit": flops / seconds / self.setting.peak_flops,
            "gib": ours.peak_bytes() / 2**30,
        }

    def _alone(self, ours: Side, seconds: float) -> None:
        self.report.row(key_of(self.shape, OURS), **self._cells(ours, "", seconds))


def tidy() -> None:
    """Does nothing: a killed section leaves nothing."""


def claims(rows: Mapping[str, Cells]) -> list[Claim]:
    """Claims: ratios, shares of the peak, memory."""
    made = []
    for cells in rows.values():
        if "ratio" in cells:
            beside, shape = cells["beside"], cells["shape"]
            wanted = WANTED_OF_EXPERTS if shape == MIXTRAL.name else WANTED[beside]
            made.append(Claim(f"train, {shape}: tokens/s over {beside}, compiled", wanted, (cells["ratio"],)))
            less = cells["their_gib"] / cells["gib"]
            made.append(Claim(f"train, {shape}: {beside}'s memory over ours", 1.0, (less,)))
        elif cells["shape"] in SHARE:
            made.append(Claim(f"train, {cells['shape']}: of the peak", SHARE[cells["shape"]], (cells["of_limit"],)))
    return made
