"""Sides of a comparison that take turns, so that all see the same state of the machine.

A side is a function that takes a turn and returns its seconds. ``in_turns`` calls the sides in order and compares them
turn by turn. A ``Side`` runs in a worker process, which builds its step and takes steps on request.
"""

from __future__ import annotations

import multiprocessing as mp
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

Step = Callable[[], object]


@dataclass(frozen=True)
class Turns:
    """Seconds of every turn, a sequence for each side; the other sides are compared with the first."""

    seconds: tuple[Sequence[float], ...]

    def median(self, side: int = 0) -> float:
        """Median seconds of a side."""
        return statistics.median(self.seconds[side])

    def best(self, side: int = 0) -> float:
        """Minimum seconds of a side."""
        return min(self.seconds[side])

    def ratio(self, side: int = 1) -> float:
        """Seconds of a side over those of the first side, the median over the turns."""
        return statistics.median(b / a for a, b in zip(self.seconds[0], self.seconds[side], strict=True))


def in_turns(*turn_functions: Callable[[], float], turns: int, warm: int = 0) -> Turns:
    """Let sides take turns: functions that take a turn and return its seconds.

    After ``warm`` turns, which do not count, ``turns`` turns of each side are counted.
    """
    seconds = [[take_turn() for take_turn in turn_functions] for _ in range(warm + turns)][warm:]
    return Turns(tuple(zip(*seconds, strict=True)))


def synchronize(device: str) -> None:
    """Wait for a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Step, device: str = "cpu", count: int = 1) -> float:
    """Seconds of a step, the mean of ``count`` steps."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def peak_bytes(device: str) -> int:
    """Peak memory of this process: its allocations on CUDA, else its resident size."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _serve(pipe: Connection, build: Callable[[], Step], device: str) -> None:
    """Answer a number of steps with the seconds of a step, 0 with the peak memory, errors as text; end at None."""
    try:
        step = build()
        while (count := pipe.recv()) is not None:
            pipe.send(timed(step, device, count) if count else peak_bytes(device))
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


class SideError(Exception):
    """Raised when a side fails; the message is a single line."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class Side:
    """Worker process of a side, which builds its step there.

    Every request raises a SideError if the process has failed or is gone.
    """

    def __init__(self, name: str, build: Callable[[], Step], device: str = "cpu") -> None:
        # A server that has imported torch starts workers sooner; CUDA cannot be used after a fork.
        context = mp.get_context("spawn" if device == "cuda" else "forkserver")
        if device != "cuda":
            context.set_forkserver_preload(["__main__", "torch._dynamo"])
        self.name = name
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, build, device), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        child.close()  # so that a worker that dies is noticed

    def step(self, count: int = 1) -> float:
        """Take steps; return the seconds of a step."""
        with suppress(BrokenPipeError, ConnectionResetError):  # receiving raises with the reason
            self.pipe.send(count)
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise SideError(self.name, f"the process ended with status {self.process.exitcode}") from None
        if isinstance(answer, str):
            raise SideError(self.name, answer)
        return float(answer)

    def peak_bytes(self) -> int:
        """Its peak memory."""
        return int(self.step(0))

    def close(self) -> int:
        """End the process; return its peak memory in bytes."""
        memory = self.peak_bytes()
        self.pipe.send(None)
        self.process.join()
        return memory

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
