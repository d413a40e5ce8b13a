"""Steps of the trainer in turns with those of peers, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.models import Shape
from benchmarks.report import Column
from benchmarks.rows import RowLog
from benchmarks.steps import process_step
from benchmarks.turns import Side, SideError, in_turns

OURS = "ours"
MAX_STEPS_PER_TURN = 20
COLUMNS = (
    Column("shape", "shape"),
    Column("precision", "precision"),
    Column("beside", "beside"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("theirs", "their_tokens_per_s", ",.0f"),
    Column("ratio", "ratio", ".2f"),
    Column("TFLOP/s", "tflops", ",.3g"),
    Column("of the peak", "of_limit", ".0%"),
    Column("GiB", "gib", ".2f"),
    Column("theirs, GiB", "their_gib", ".2f"),
)


def row_key(shape: Shape, precision: str, name: str) -> str:
    """Return the key of the row beside a peer, or of our row."""
    return f"{shape.name}, {precision}, {name}"


@dataclass(frozen=True)
class StepComparison:
    """The steps of a shape in a precision.

    Sides are built and compiled one at a time, since they share the device and the processors.

    Args:
        shape, precision: the model and its precision.
        threads: number of threads of each side on a CPU.
        device: torch's name of the device.
        peak_flops: peak rate of products in this precision, FLOP/s; 0 if unknown.
        log: log of the rows.
        divisor: number that divides our padded vocabulary.
        turns, warm: number of counted turns, and of steps before them.
        turn_seconds: minimum seconds of a turn, in which short steps are repeated.
    """

    shape: Shape
    precision: str
    threads: int
    device: str
    peak_flops: float
    log: RowLog
    divisor: int = 1
    turns: int = 5
    warm: int = 2
    turn_seconds: float = 0.0

    def key(self, name: str) -> str:
        return row_key(self.shape, self.precision, name)

    def measure(self, names: Sequence[str]) -> None:
        """Measure some sides: ours alone, and ours in turns with each peer."""
        workers: list[Side] = []
        missing = list(names)
        try:
            self.log.begin(self.key(names[0]))
            ours = self._start(OURS, workers)
            if OURS in missing:  # before peers compile, which may use up the time limit
                seconds = in_turns(ours.step, turns=self.turns, warm=self.warm).median()
                self.log.row(self.key(OURS), **self._cells(ours, seconds))
                missing.remove(OURS)
            for peer in list(missing):
                try:
                    self._compare(ours, peer, workers, OURS in names)
                except SideError as error:
                    if error.name == OURS:
                        raise
                    self.log.failed(self.key(peer), str(error))
                missing.remove(peer)
        except SideError as error:  # of ours: no other row can be measured
            for name in missing:
                self.log.failed(self.key(name), str(error))
        finally:
            for side in workers:
                side.kill()

    def _start(self, name: str, workers: list[Side]) -> Side:
        """Start a side, and wait for its first step: then it is built and compiled."""
        build = partial(process_step, name, self.shape, self.precision, self.threads, self.device, self.divisor)
        side = Side(name, build, self.device)
        workers.append(side)
        side.step()
        return side

    def _compare(self, ours: Side, peer: str, workers: list[Side], with_ours: bool) -> None:
        key = self.key(peer)
        self.log.begin(key)
        theirs = self._start(peer, workers)
        self.log.begin(key)  # a sign of life
        steps = [
            max(1, min(MAX_STEPS_PER_TURN, int(self.turn_seconds / side.step(self.warm)))) for side in (ours, theirs)
        ]
        turns = in_turns(partial(ours.step, steps[0]), partial(theirs.step, steps[1]), turns=self.turns)
        their_gib = theirs.close() / 2**30
        cells = self._cells(ours, turns.median())
        if with_ours:
            self.log.row(self.key(OURS), **cells)
        their_rate = self.shape.tokens / turns.median(1)
        self.log.row(key, **cells, beside=peer, their_tokens_per_s=their_rate, ratio=turns.ratio(), their_gib=their_gib)

    def _cells(self, ours: Side, seconds: float) -> dict[str, object]:
        rate = self.shape.flops() / seconds
        return {
            "shape": self.shape.name,
            "precision": self.precision,
            "tokens_per_s": self.shape.tokens / seconds,
            "tflops": rate / 1e12,
            "of_limit": rate / self.peak_flops if self.peak_flops else None,
            "gib": ours.peak_bytes() / 2**30,
        }
