"""Sides of a comparison that take turns, so that all of them see the same state of the machine.

A side is a function that takes one turn and returns its seconds. ``in_turns`` calls the sides one after another and
compares them turn by turn. A ``Side`` is the worker process of such a side: it builds its step, then takes steps when
it is told to.
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

from megatron.distributed.process_group import shutdown

Step = Callable[[], object]


@dataclass(frozen=True)
class Turns:
    """The seconds of every turn, a sequence for each side. The first side is the one that others are compared with."""

    seconds: tuple[Sequence[float], ...]

    def median(self, side: int = 0) -> float:
        """Median seconds of a side."""
        return statistics.median(self.seconds[side])

    def best(self, side: int = 0) -> float:
        """Least seconds of a side."""
        return min(self.seconds[side])

    def ratio(self, side: int = 1) -> float:
        """Seconds of a side over those of the first one, the median over the turns."""
        return statistics.median(b / a for a, b in zip(self.seconds[0], self.seconds[side], strict=True))


def in_turns(*sides: Callable[[], float], turns: int, warm: int = 0) -> Turns:
    """Lets sides take turns.

    Args:
        sides: functions that take a turn and return its seconds.
        turns: counted turns of each side.
        warm: turns before those.
    """
    taken = [[side() for side in sides] for _ in range(warm + turns)][warm:]
    return Turns(tuple(zip(*taken, strict=True)))


def synchronize(device: str) -> None:
    """Waits for a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Step, device: str = "cpu", count: int = 1) -> float:
    """Seconds of a step, the mean of ``count`` of them."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def peak_bytes(device: str) -> int:
    """Peak memory of this process: of its allocations on CUDA, else its resident size."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _serve(pipe: Connection, build: Callable[[], Step], device: str) -> None:
    """Takes as many steps as it is asked for, until it reads None; answers with seconds of one, or to 0 with its peak
    memory. Errors are answered as text."""
    try:
        step = build()
        while (count := pipe.recv()) is not None:
            pipe.send(timed(step, device, count) if count else peak_bytes(device))
        shutdown()
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


class SideError(Exception):
    """Raised when a side has failed; one line.

    Args:
        kind: kind of the side.
        why: the reason.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


class Side:
    """The worker process of a side. Every request to it raises a SideError when it has failed or is gone.

    Args:
        kind: name of the side in errors.
        build: builds its step, in the process; a process group that it joins is left at the end.
        device: torch's name of the device.
    """

    def __init__(self, kind: str, build: Callable[[], Step], device: str = "cpu") -> None:
        # A server that has imported torch starts workers sooner; CUDA cannot be used after a fork.
        context = mp.get_context("spawn" if device == "cuda" else "forkserver")
        if device != "cuda":
            context.set_forkserver_preload(["__main__", "torch._dynamo"])
        self.kind = kind
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, build, device), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        child.close()  # so that a worker that dies is noticed

    def begin(self, count: int = 1) -> None:
        """Asks it to take steps."""
        with suppress(BrokenPipeError, ConnectionResetError):  # its answer says more
            self.pipe.send(count)

    def end(self) -> float:
        """Waits for its answer."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise SideError(self.kind, f"the process ended with status {self.process.exitcode}") from None
        if isinstance(answer, str):
            raise SideError(self.kind, answer)
        return float(answer)

    def step(self, count: int = 1) -> float:
        """Takes some steps; returns the seconds of one."""
        self.begin(count)
        return self.end()

    def peak_bytes(self) -> int:
        """Its peak memory."""
        return int(self.step(0))

    def close(self) -> int:
        """Ends it; returns its peak memory in bytes."""
        memory = self.peak_bytes()
        self.pipe.send(None)
        self.process.join()
        return memory

    def kill(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.join()


def step_together(sides: Sequence[Side]) -> float:
    """Takes one step of sides that need each other; returns the seconds of the slowest."""
    for side in sides:
        side.begin()
    return max(side.end() for side in sides)
