"""Sides of the training benchmark without processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from benchmarks.turns import SideError, Step, timed


class InProcessSide:
    """Takes its steps in this process."""

    def __init__(self, name: str, build: Callable[[], Step], device: str) -> None:
        self.take_step = build()

    def step(self, count: int = 1) -> float:
        return timed(self.take_step, count=count)

    def peak_bytes(self) -> int:
        return 1 << 30

    def close(self) -> int:
        return 1 << 31

    def kill(self) -> None:
        pass


class ScriptedSide:
    """A side whose steps take given seconds, or fail; ``events`` has the order of starts and ends, ``builds`` the
    arguments of the steps."""

    events: ClassVar[list[str]] = []
    builds: ClassVar[list[tuple[object, ...]]] = []
    seconds: ClassVar[dict[str, float]] = {}

    def __init__(self, name: str, build: partial[Step], device: str) -> None:
        self.name = name
        self.builds.append(build.args)
        self.events.append(f"{name} starts")

    def step(self, count: int = 1) -> float:
        if self.name not in self.seconds:
            raise SideError(self.name, "out of memory")
        return self.seconds[self.name]

    def peak_bytes(self) -> int:
        return 1 << 30

    def close(self) -> int:
        self.events.append(f"{self.name} ends")
        return 1 << 31

    def kill(self) -> None:
        pass
